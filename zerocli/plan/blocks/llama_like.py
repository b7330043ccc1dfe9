"""Hugging Face families whose blocks are Llama's but for norms, biases, gates and experts: rows of data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from zerocli.plan.blocks.fields import MAX_LAYERS, Fields
from zerocli.plan.blocks.shape import BIASES, Latent, Shape


def llama_like(
    f: Fields,
    family: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    mlp: int,
    vocab: int,
    tie: bool = False,
    head_dim: int = 0,
    reads_head_dim: bool = True,
    round_heads: bool = True,
    positions: int = 2048,
    qkv_bias: bool | str = "attention_bias",
    out_bias: bool | str = "attention_bias",
    mlp_bias: bool | str = "mlp_bias",
    biases: bool = False,
    qk_norm: str = "",
    **more: Any,
) -> Shape:
    """Return a shape with rotary positions and, unless `more` says otherwise, RMS norms and a gated MLP.

    Numbers are the family's defaults. A bias is there or not, or it is the name of the field that says so, with the
    default `biases`. `qk_norm` is a norm per `head` or over all `heads`. If the number of heads
    does not divide the hidden size, families that `round_heads` round a head's size down, and others refuse it.
    """
    hidden = f.whole("hidden_size", hidden)
    heads = f.whole("num_attention_heads", heads)
    kv_heads = f.whole("num_key_value_heads", heads if f.is_null("num_key_value_heads") else kv_heads or heads)
    size = f.whole("head_dim", head_dim, least=0) if reads_head_dim else 0
    if not size and not (round_heads and hidden > heads):
        f.divides("num_attention_heads", "hidden_size", heads, hidden)
    size = size or hidden // heads
    if "latent" not in more:
        f.divides("num_key_value_heads", "num_attention_heads", kv_heads, heads)
    given: dict[str, Any] = {"gated": True, "norm": "rms"}
    for name, each in zip(BIASES, (qkv_bias, out_bias, mlp_bias), strict=True):
        given[name] = f.flag(each, biases) if isinstance(each, str) else each
    if qk_norm:
        given |= {"q_norm": size * (heads if qk_norm == "heads" else 1)}
        given |= {"k_norm": size * (kv_heads if qk_norm == "heads" else 1)}
    return Shape(
        family,
        f.whole("num_hidden_layers", layers, most=MAX_LAYERS),
        hidden,
        heads,
        f.whole("vocab_size", vocab),
        f.whole("intermediate_size", mlp),
        kv_heads=0 if kv_heads == heads else kv_heads,
        head_dim=0 if size * heads == hidden else size,
        tie=f.flag("tie_word_embeddings", tie),
        rotary=True,
        max_positions=f.whole("max_position_embeddings", positions),
        **(given | more),
    )


def _row(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp, "vocab": vocab} | more


NO_BIAS: dict[str, Any] = dict.fromkeys(BIASES, False)
COHERE: dict[str, Any] = {"tie": True, "positions": 8192, "norm": "layer", "norms": "shared"}
COHERE |= {"norm_bias": False, "mlp_bias": False}
GEMMA: dict[str, Any] = {"tie": True, "head_dim": 256, "mlp_bias": False, "norms": "sandwich"}
GLM: dict[str, Any] = {"head_dim": 128, "positions": 131072, "biases": True, "out_bias": False, "mlp_bias": False}
LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": _row(32, 4096, 32, 0, 11008, 32000, round_heads=False),
    "mistral": _row(32, 4096, 32, 8, 14336, 32000, round_heads=False, positions=131072, **NO_BIAS),
    "qwen2": _row(
        32, 4096, 32, 32, 22016, 151936, round_heads=False, positions=32768, **(NO_BIAS | {"qkv_bias": True})
    ),
    "qwen3": _row(32, 4096, 32, 32, 22016, 151936, head_dim=128, positions=32768, qk_norm="head", mlp_bias=False),
    "gemma": _row(28, 3072, 16, 16, 24576, 256000, tie=True, head_dim=256, positions=8192, mlp_bias=False),
    "gemma2": _row(26, 2304, 8, 4, 9216, 256000, positions=8192, **GEMMA),
    "gemma3_text": _row(26, 2304, 8, 4, 9216, 262208, positions=131072, qk_norm="head", **GEMMA),
    "phi3": _row(32, 3072, 32, 0, 8192, 32064, positions=4096, **NO_BIAS),
    "olmo": _row(32, 4096, 32, 0, 11008, 50304, norm="plain", mlp_bias=False),
    "olmo2": _row(32, 4096, 32, 0, 11008, 50304, norms="post", qk_norm="heads", mlp_bias=False),
    "olmo3": _row(32, 4096, 32, 0, 11008, 50304, norms="post", qk_norm="heads", mlp_bias=False),
    "granite": _row(32, 4096, 32, 0, 11008, 32000),
    "smollm3": _row(36, 2048, 16, 4, 11008, 128256, tie=True, positions=32768),
    "glm": _row(40, 4096, 32, 2, 13696, 151552, **GLM),
    "glm4": _row(40, 4096, 32, 2, 13696, 151552, norms="sandwich", **GLM),
    "cohere2": _row(40, 8192, 64, 0, 22528, 256000, **COHERE),
    "starcoder2": _row(30, 3072, 24, 2, 12288, 49152, tie=True, positions=4096, norm="layer", gated=False)
    | dict.fromkeys(BIASES, "use_bias")
    | {"biases": True},
    "nemotron": _row(32, 6144, 48, 0, 24576, 256000, positions=4096, norm="layer", gated=False),
}
"""Families that differ from Llama by data alone."""


def cohere(f: Fields) -> Shape:
    qk_norm = "heads" if f.flag("use_qk_norm", False) else ""
    return llama_like(f, "cohere", **_row(40, 8192, 64, 0, 22528, 256000, qk_norm=qk_norm, **COHERE))


def stablelm(f: Fields) -> Shape:
    row = _row(32, 2560, 32, 32, 6912, 50304, positions=4096, norm="layer", out_bias=False, mlp_bias=False)
    row["qk_norm"] = "heads" if f.flag("qk_layernorm", False) else ""
    row["norms"] = "shared" if f.flag("use_parallel_residual", False) else "pre"
    return llama_like(f, "stablelm", **row, reads_head_dim=False, round_heads=False, qkv_bias="use_qkv_bias")


def phi(f: Fields) -> Shape:
    row = _row(24, 2048, 32, 0, 8192, 51200, norm="layer", norms="shared", gated=False, head_bias=True)
    shape = llama_like(f, "phi", **row, qkv_bias=True, out_bias=True, mlp_bias=True)
    normed = 2 * shape.head_size if f.flag("qk_layernorm", False) else 0  # with a bias
    if normed and shape.head_size != shape.hidden // shape.heads:
        f.refuse("head_dim", f"head_dim {shape.head_size}: the norms of qk_layernorm have hidden_size / heads elements")
    return dataclasses.replace(shape, q_norm=normed, k_norm=normed)


def _experts(f: Fields, name: str, number: int, per_token: int, width: str, hidden: int) -> dict[str, Any]:
    """Return a shape's experts, from the fields that say how many there are and how wide; numbers are defaults."""
    experts = f.whole(name, number, most=MAX_LAYERS)
    used = f.whole("num_experts_per_tok", per_token, most=experts)
    return {"experts": experts, "experts_per_token": used, "expert_hidden": f.whole(width, hidden)}


def mixtral(f: Fields) -> Shape:
    row = _row(32, 4096, 32, 8, 14336, 32000, positions=131072, **NO_BIAS)
    return llama_like(f, "mixtral", **row, **_experts(f, "num_local_experts", 8, 2, "intermediate_size", 14336))


def _qwen_moe(f: Fields, family: str, experts: int, per_token: int, expert: int, **more: Any) -> Shape:
    """Return a shape with experts in some blocks; numbers are the family's defaults."""
    more |= _experts(f, "num_experts", experts, per_token, "moe_intermediate_size", expert)
    more |= {"sparse_every": f.whole("decoder_sparse_step", 1), "dense_blocks": f.wholes("mlp_only_layers")}
    return llama_like(f, family, positions=32768, mlp_bias=False, **more)


def qwen2_moe(f: Fields) -> Shape:
    row = _row(24, 2048, 16, 16, 5632, 151936, qkv_bias="qkv_bias", biases=True, out_bias=False)
    shared = f.whole("shared_expert_intermediate_size", 5632)
    return _qwen_moe(f, "qwen2_moe", 60, 4, 1408, **row, shared_hidden=shared)


def qwen3_moe(f: Fields) -> Shape:
    return _qwen_moe(f, "qwen3_moe", 128, 8, 768, **_row(24, 2048, 32, 4, 6144, 151936, qk_norm="head"))


def _deepseek(f: Fields, family: str, row: dict[str, Any], experts: int, shared: int, per_token: int) -> Shape:
    """Return a shape with latent attention, experts after the first blocks, and shared experts without a gate."""
    heads, dense = f.whole("num_attention_heads", row["heads"]), row.pop("dense")
    found = _experts(f, "n_routed_experts", experts, per_token, "moe_intermediate_size", row.pop("expert"))
    q_rank = 0 if f.is_null("q_lora_rank") else f.whole("q_lora_rank", 1536)
    nope, rope, value = f.whole("qk_nope_head_dim", 128), f.whole("qk_rope_head_dim", 64), f.whole("v_head_dim", 128)
    number = 0 if f.is_null("n_shared_experts") else f.whole("n_shared_experts", shared)
    found |= {"shared_hidden": number * found["expert_hidden"], "shared_gate": False}
    found["dense_blocks"] = tuple(range(f.whole("first_k_dense_replace", dense, least=0, most=MAX_LAYERS)))
    found["latent"] = Latent(q_rank, f.whole("kv_lora_rank", 512), nope, rope, value)
    shape = llama_like(f, family, **row, mlp_bias=False, **found)
    return dataclasses.replace(shape, heads=heads, kv_heads=0, head_dim=nope + rope)


def deepseek_v2(f: Fields) -> Shape:
    f.fixed("mlp_bias", False)
    row = _row(32, 4096, 32, 0, 11008, 102400, expert=1407, dense=0, round_heads=False)
    return _deepseek(f, "deepseek_v2", row, 64, 2, 6)


def deepseek_v3(f: Fields) -> Shape:
    # Heads need not divide the hidden size: this head_dim is not hidden / heads, and is replaced by latent attention's.
    row = _row(61, 7168, 128, 0, 18432, 129280, expert=2048, dense=3, head_dim=64, positions=4096)
    return _deepseek(f, "deepseek_v3", row, 256, 1, 8)


def gpt_oss(f: Fields) -> Shape:
    row = _row(36, 2880, 64, 8, 2880, 201088, head_dim=64, positions=131072, biases=True, mlp_bias=True)
    row |= _experts(f, "num_local_experts", 128, 4, "intermediate_size", 2880)
    return llama_like(f, "gpt_oss", **row, router_bias=True, sinks=True)


FAMILIES: dict[str, Callable[[Fields], Shape]] = {
    **{name: functools.partial(llama_like, family=name, **row) for name, row in LLAMA_LIKE.items()},
    **{each.__name__: each for each in (cohere, deepseek_v2, deepseek_v3, gpt_oss, mixtral, phi, qwen2_moe, qwen3_moe)},
    "stablelm": stablelm,
}
