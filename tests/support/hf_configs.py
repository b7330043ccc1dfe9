"""Small configs of 57 Hugging Face families, as their `config.json` would have them."""

from __future__ import annotations

from typing import Any

_DECODER = dict(
    vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GQA = _DECODER | dict(num_key_value_heads=2)
_OLD = dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
_MOE = _GQA | dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_MLA = _DECODER | dict(
    q_lora_rank=12, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, n_routed_experts=4,
    num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=24, first_k_dense_replace=1, n_group=1,
    topk_group=1,
)  # fmt: skip
_VISION = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
               patch_size=4)  # fmt: skip
_QWEN_VISION = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4)
_ROPE = dict(rope_type="default", rope_theta=1e4)

CONFIGS: dict[str, dict[str, Any]] = {
    # Decoders
    "gpt2": _OLD,
    "gpt_neo": dict(vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64,
                    attention_types=[[["global", "local"], 1]]),
    "gpt_neox": _DECODER,
    "gptj": _OLD | dict(rotary_dim=4),
    "gpt_bigcode": _OLD,
    "codegen": _OLD | dict(rotary_dim=4),
    "opt": _DECODER | dict(ffn_dim=48, word_embed_proj_dim=32),
    "bloom": dict(vocab_size=96, hidden_size=32, n_layer=3, n_head=4),
    "mpt": dict(vocab_size=96, d_model=32, n_layers=3, n_heads=4, max_seq_len=64),
    "falcon": _DECODER,
    "falcon-40b": _DECODER | dict(model_type="falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-rw": _DECODER | dict(model_type="falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "llama": _GQA,
    "mistral": _GQA,
    "ministral": _GQA | dict(head_dim=8),
    "mixtral": _MOE,
    "qwen2": _GQA,
    "qwen3": _GQA | dict(head_dim=16),
    "qwen2_moe": _MOE | dict(shared_expert_intermediate_size=40),
    "qwen3_moe": _MOE | dict(head_dim=16),
    "gemma": _GQA | dict(head_dim=16),
    "gemma2": _GQA | dict(head_dim=16),
    "gemma3_text": _GQA | dict(head_dim=16),
    "phi": _GQA,
    "phi3": _GQA,
    "phimoe": _MOE,
    "olmo": _GQA,
    "olmo2": _GQA,
    "olmo3": _GQA,
    "olmoe": _MOE,
    "starcoder2": _GQA,
    "granite": _GQA,
    "granitemoe": _MOE,
    "cohere": _GQA | dict(use_qk_norm=True),
    "cohere2": _GQA,
    "stablelm": _GQA,
    "stablelm-parallel": _GQA | dict(model_type="stablelm", use_parallel_residual=True, qk_layernorm=True,
                                     use_qkv_bias=True),
    "glm": _GQA | dict(head_dim=16),
    "glm4": _GQA | dict(head_dim=16),
    "smollm3": _GQA,
    "nemotron": _GQA,
    "deepseek_v2": _MLA,
    "deepseek_v2-lite": _MLA | dict(model_type="deepseek_v2", q_lora_rank=None),
    "deepseek_v3": _MLA,
    "gpt_oss": _MOE | dict(head_dim=16),
    "llama4_text": _MOE | dict(head_dim=16, intermediate_size_mlp=40, interleave_moe_layer_step=1),
    "mamba": dict(vocab_size=96, hidden_size=32, num_hidden_layers=3, state_size=4),
    # Encoders, encoder-decoders, images, audio, images and text
    "bert": _DECODER,
    "roberta": _DECODER,
    "distilbert": dict(vocab_size=96, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64),
    "electra": _DECODER | dict(embedding_size=16),
    "modernbert": _DECODER | dict(cls_token_id=1, sep_token_id=2),
    "t5": dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "bart": dict(vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                 decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64),
    "vit": _VISION,
    "whisper": dict(vocab_size=96, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
                    max_source_positions=32, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                    decoder_start_token_id=1),
    "gemma3": dict(text_config=_GQA | dict(head_dim=16), vision_config=_VISION | dict(vision_use_head=False),
                   mm_tokens_per_image=4),
    "llama4": dict(text_config=_MOE | dict(head_dim=16, intermediate_size_mlp=40),
                   vision_config=_VISION | dict(vision_output_dim=32, projector_input_dim=32, projector_output_dim=32)),
    "qwen2_vl": dict(text_config=_GQA | dict(rope_parameters=_ROPE | dict(mrope_section=[1, 1, 2])),
                     vision_config=_QWEN_VISION),
    "mllama": dict(
        text_config=_GQA | dict(cross_attention_layers=[1], rope_parameters=_ROPE),
        vision_config=dict(hidden_size=32, num_hidden_layers=2, num_global_layers=1, attention_heads=4,
                           intermediate_size=48, image_size=16, patch_size=4, vision_output_dim=64, max_num_tiles=1,
                           intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1]]),
    ),
}  # fmt: skip
for _name, _values in CONFIGS.items():
    CONFIGS[_name] = {"model_type": _name} | _values
