"""Hugging Face's names and layouts for the weights of the two families, mapped to ours, and the config.json of them.

We fuse queries, keys and values (and a SwiGLU's gate and up) into one matrix, which Hugging Face keeps separate: a
range of rows of ours is one tensor there. Their GPT-2 keeps matrices transposed. (No torch: names and integers only.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zerocli.config import ModelConfig
from zerocli.layout.ranges import parse_ranges


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
    if model.external:
        return f"{model.source} is not a built-in family"
    if model.family == "gpt2" and model.kv_heads not in (0, model.heads):
        return "its GPT-2 has as many heads of keys and values as of queries"
    return "" if type_of(model) else "none of its families has this combination of biases, norms and windows"


def type_of(model: ModelConfig) -> str:
    """Return the model_type of a built-in model: `model.type` if that has this shape, else the simplest that has.

    Empty if none has it.
    """
    if model.family == "gpt2":
        return "gpt2"
    windowed = bool(model.window)
    everywhere = windowed and len(parse_ranges(model.window_layers)) in (0, model.layers)
    biased = model.qkv_bias or model.out_bias
    plain = not model.qk_norm and not windowed
    divides = model.hidden % model.heads == 0  # transformers' Llama demands it even of heads of another size
    fits = {
        "llama": plain and model.qkv_bias == model.out_bias and divides,
        "mistral": not biased and not model.mlp_bias and not model.qk_norm and (everywhere or not windowed),
        "qwen2": model.qkv_bias and not model.out_bias and not model.mlp_bias and not model.qk_norm,
        "qwen3": model.qk_norm and model.qkv_bias == model.out_bias and not model.mlp_bias,
    }
    if fits.get(model.type):
        return model.type
    return next((name for name, fit in fits.items() if fit), "")


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
    head = model.head_dim or model.hidden // model.heads
    wide, kv = model.heads * head, (model.kv_heads or model.heads) * head
    width = mlp_width(model)

    def kinds(bias: bool) -> tuple[str, ...]:
        return ("weight", "bias") if bias else ("weight",)

    yield Mapping("embed.weight", ("model.embed_tokens.weight",))
    for i in range(model.layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        yield Mapping(f"{ours}norm1.weight", (f"{theirs}input_layernorm.weight",))
        for kind in kinds(model.qkv_bias):
            qkv = tuple(f"{theirs}self_attn.{each}_proj.{kind}" for each in "qkv")
            yield Mapping(f"{ours}attention.qkv.{kind}", qkv, (wide, kv, kv))
        for name in ("q_norm", "k_norm") if model.qk_norm else ():
            yield Mapping(f"{ours}attention.{name}.weight", (f"{theirs}self_attn.{name}.weight",))
        for kind in kinds(model.out_bias):
            yield Mapping(f"{ours}attention.out.{kind}", (f"{theirs}self_attn.o_proj.{kind}",))
        yield Mapping(f"{ours}norm2.weight", (f"{theirs}post_attention_layernorm.weight",))
        for kind in kinds(model.mlp_bias):
            gate_up = tuple(f"{theirs}mlp.{each}_proj.{kind}" for each in ("gate", "up"))
            yield Mapping(f"{ours}mlp.gate_up.{kind}", gate_up, (width, width))
        for kind in kinds(model.mlp_bias):
            yield Mapping(f"{ours}mlp.down.{kind}", (f"{theirs}mlp.down_proj.{kind}",))
    yield Mapping("head.norm.weight", ("model.norm.weight",))
    if not model.tie:
        yield Mapping("head.weight", ("lm_head.weight",))


def mlp_width(model: ModelConfig) -> int:
    """Return the hidden width of a Llama's MLP, as the model computes it."""
    return model.mlp_hidden or -(-8 * model.hidden // (3 * 256)) * 256


CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def config_json(model: ModelConfig, seq: int, dtype: str) -> dict[str, Any]:
    """Return the config.json with which `transformers` builds the same model; `known` must have said that it can."""
    kind = type_of(model)
    common: dict[str, Any] = {"architectures": [CLASSES[kind]], "model_type": kind}
    common |= {"vocab_size": model.vocab, "tie_word_embeddings": model.tie, "torch_dtype": dtype}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if model.family == "gpt2":
        return {
            **common,
            "n_positions": model.positions or seq,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.mlp_hidden or None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model.norm_eps,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
            **tokens,
        }
    made = {
        **common,
        "max_position_embeddings": model.positions or seq,
        "hidden_size": model.hidden,
        "intermediate_size": mlp_width(model),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.head_dim or model.hidden // model.heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": dict(model.rope_scaling) or None,
        "attention_dropout": 0.0,
        **tokens,
    }
    if kind in ("llama", "qwen3"):
        made["attention_bias"] = model.qkv_bias
    if kind == "llama":
        made["mlp_bias"] = model.mlp_bias
    if kind == "mistral":
        made["sliding_window"] = model.window or None
    if kind in ("qwen2", "qwen3"):
        made |= _windows(model)
    return made


def _windows(model: ModelConfig) -> dict[str, Any]:
    windowed = parse_ranges(model.window_layers) or range(model.layers)
    kinds = ["sliding_attention" if model.window and i in windowed else "full_attention" for i in range(model.layers)]
    # Older versions of transformers know no layer_types: the windows of their layers begin with max_window_layers.
    first = kinds.index("sliding_attention") if model.window else model.layers
    return {
        "use_sliding_window": bool(model.window),
        "sliding_window": model.window or None,
        "max_window_layers": first,
        "layer_types": kinds,
    }
