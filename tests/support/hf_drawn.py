"""Random configs of transformers' families: small sizes, and any field that may change the number of parameters."""

from __future__ import annotations

import dataclasses
import random
import typing
from typing import Any

LAYERS = (1, 2, 5)
EXPERTS = (2, 3, 4)
ALWAYS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    "num_experts_per_tok": (1, 2),
    "n_group": (1,),
    "topk_group": (1,),
    "rotary_dim": (4,),
    "pad_token_id": (0, 5),
}
"""Fields that a config always has if its family has them: a default would make a model too large, or one that cannot
run."""
OFTEN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed"), (64, 96, 100, 192)),
    **dict.fromkeys(("num_attention_heads", "n_head"), (4, 8, 16)),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1, 2, 4, 8, None)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), (70, 128, None)),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), (24, 40)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), (32, 48)),
    "vocab_size": (97, 128),
    "head_dim": (8, 16, 24, None),
    "word_embed_proj_dim": (16, 64, None),
    "num_ln_in_parallel_attn": (1, 2, None),
    "decoder_sparse_step": (1, 2, 3),
    "mlp_only_layers": ([], [0], [1, 7], None),
    "moe_layer_freq": (1, 2),
    "n_shared_experts": (1, 2, 3),
    "first_k_dense_replace": (0, 1, 9),
    "q_lora_rank": (12, None),
    "kv_lora_rank": (16, 24),
    "qk_nope_head_dim": (8, 12),
    "qk_rope_head_dim": (4, 8),
    "v_head_dim": (8, 12),
    "num_nextn_predict_layers": (0, 1, 2),
    "num_mtp_layers": (0, 1, 2),
    "n_head_kv": (2,),
    "sliding_window": (16,),
}
FLAGS = """
attention_bias mlp_bias qkv_bias use_bias use_qkv_bias enable_bias bias tie_word_embeddings qk_layernorm
use_qk_norm use_parallel_residual parallel_attn new_decoder_architecture multi_query alibi do_layer_norm_before
_remove_final_layer_norm layer_norm_elementwise_affine is_decoder add_cross_attention
apply_residual_connection_post_layernorm use_sliding_window norm_topk_prob
""".split()
OWN, STRAY = 0.6, 0.05
"""How often a config has a field of its family's class, and one that the class does not have."""


def draw(family: str, rng: random.Random) -> dict[str, Any]:
    """Return a config of this family."""
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[family]
    own = {field.name: field.type for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {"model_type": family}
    for name, choices in (ALWAYS | OFTEN | dict.fromkeys(FLAGS, (False, True))).items():
        share = (1.0 if name in ALWAYS else OWN) if name in own else STRAY
        if rng.random() < share:
            nullable = type(None) in typing.get_args(own.get(name))
            values[name] = rng.choice([each for each in choices if each is not None or nullable])
    return values
