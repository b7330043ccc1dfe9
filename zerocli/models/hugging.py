"""Hugging Face's names and layouts for the weights of the two families, mapped to ours.

We fuse queries, keys and values (and a SwiGLU's gate and up) into one matrix, which Hugging Face keeps separate: a
range of rows of ours is one tensor there. Their GPT-2 keeps matrices transposed. (No torch: names and integers only.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerocli.config import ModelConfig


@dataclass(frozen=True)
class Mapping:
    """One of our parameters and the Hugging Face tensors that its rows are split into, in order."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of each; empty if there is only one tensor."""
    transposed: bool = False
    leading: bool = False
    """Whether a model may take the first rows of a longer tensor (positions)."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shape of each in the files, where it is not that of the rows: all of them in order have our elements."""


def known(model: ModelConfig) -> str:
    """Return why Hugging Face has no such model; empty if it has."""
    if model.foreign:
        return f"{model.source} is not a built-in family"
    if model.family == "gpt2" and model.kv_heads not in (0, model.heads):
        return "its GPT-2 has as many heads of keys and values as of queries"
    return ""


def mappings(model: ModelConfig) -> Iterator[Mapping]:
    """Yield each of our parameters with its Hugging Face names and layout."""
    yield from _gpt2(model) if model.family == "gpt2" else _llama(model)


def absent(model: ModelConfig) -> Iterator[tuple[str, int]]:
    """Yield (name, elements) of biases that exist in Hugging Face but not in a model without biases: zeros."""
    if model.family != "gpt2" or model.bias:
        return
    width = model.mlp_hidden or 4 * model.hidden
    for i in range(model.layers):
        at = f"transformer.h.{i}."
        sizes = {"ln_1": 1, "attn.c_attn": 3, "attn.c_proj": 1, "ln_2": 1, "mlp.c_proj": 1}
        for name, times in sizes.items():
            yield f"{at}{name}.bias", times * model.hidden
        yield f"{at}mlp.c_fc.bias", width
    yield "transformer.ln_f.bias", model.hidden


def _gpt2(model: ModelConfig) -> Iterator[Mapping]:
    kinds = ("weight", "bias") if model.bias else ("weight",)
    yield Mapping("embed.tokens.weight", ("transformer.wte.weight",))
    yield Mapping("embed.positions.weight", ("transformer.wpe.weight",), leading=True)
    names = {"norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "norm2": "ln_2"}
    names |= {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for i in range(model.layers):
        for ours, theirs in names.items():
            for kind in kinds:
                matrix = kind == "weight" and "norm" not in ours
                yield Mapping(f"blocks.{i}.{ours}.{kind}", (f"transformer.h.{i}.{theirs}.{kind}",), transposed=matrix)
    for kind in kinds:
        yield Mapping(f"head.norm.{kind}", (f"transformer.ln_f.{kind}",))
    if not model.tie:
        yield Mapping("head.weight", ("lm_head.weight",))


def _llama(model: ModelConfig) -> Iterator[Mapping]:
    head = model.hidden // model.heads
    kv = (model.kv_heads or model.heads) * head
    yield Mapping("embed.weight", ("model.embed_tokens.weight",))
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        qkv = tuple(f"{theirs}self_attn.{each}_proj.weight" for each in "qkv")
        gate_up = tuple(f"{theirs}mlp.{each}_proj.weight" for each in ("gate", "up"))
        width = mlp_width(model)
        yield Mapping(f"{ours}norm1.weight", (f"{theirs}input_layernorm.weight",))
        yield Mapping(f"{ours}attention.qkv.weight", qkv, (model.hidden, kv, kv))
        yield Mapping(f"{ours}attention.out.weight", (f"{theirs}self_attn.o_proj.weight",))
        yield Mapping(f"{ours}norm2.weight", (f"{theirs}post_attention_layernorm.weight",))
        yield Mapping(f"{ours}mlp.gate_up.weight", gate_up, (width, width))
        yield Mapping(f"{ours}mlp.down.weight", (f"{theirs}mlp.down_proj.weight",))
    yield Mapping("head.norm.weight", ("model.norm.weight",))
    if not model.tie:
        yield Mapping("head.weight", ("lm_head.weight",))


def mlp_width(model: ModelConfig) -> int:
    """Return the hidden width of a Llama's MLP, as the model computes it."""
    return model.mlp_hidden or -(-8 * model.hidden // (3 * 256)) * 256


def config_json(model: ModelConfig, seq: int, dtype: str) -> dict[str, Any]:
    """Return the config.json with which `transformers` builds the same model."""
    common = {"vocab_size": model.vocab, "tie_word_embeddings": model.tie, "torch_dtype": dtype}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if model.family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **common,
            "n_positions": seq,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.mlp_hidden or None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model.norm_eps,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
            **tokens,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **common,
        "max_position_embeddings": seq,
        "hidden_size": model.hidden,
        "intermediate_size": mlp_width(model),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
        **tokens,
    }
