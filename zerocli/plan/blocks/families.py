"""Families of Hugging Face `config.json` files, as shapes. A config is data: its numbers are read, nothing is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from zerocli.config.hub import by_own_names
from zerocli.errors import ConfigError, Problem, closest, quote
from zerocli.plan.blocks import llama_like
from zerocli.plan.blocks.fields import MAX_LAYERS, Fields, NoFormula
from zerocli.plan.blocks.shape import BIASES, Shape

INSTALL = "pip install 'zerocli[hf]' (every family of transformers), or zerocli fit package.module:factory --trace"


def has_formula(values: Mapping[str, Any]) -> bool:
    """Return whether the family of a config is one of `FAMILIES`, whatever type the file's value has."""
    family = values.get("model_type")
    return isinstance(family, str) and family in FAMILIES


def read_shape(values: Mapping[str, Any], places: Mapping[str, str], path: str) -> Shape:
    """Return the shape that a Hugging Face config describes; ConfigError names every invalid field.

    NoFormula if its family has a formula, but not for the values of some fields.
    Of a model of several parts (images and text) that is not a family itself, the text model is read.
    """
    family = values.get("model_type")
    if text := text_family(values):
        inner = {key.removeprefix("text_config."): place for key, place in places.items() if "text_config." in key}
        outer = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
        return read_shape(outer | values["text_config"] | {"model_type": text}, inner, path)
    if not has_formula(values):
        known = ", ".join(FAMILIES)
        if family is None:
            fact = "holds neither a model_type (Hugging Face) nor a model section (a run's config.json)"
            raise ConfigError([Problem(path, fact)], hint=f"model_type: one of {known}")
        fact = f"model_type {quote(family)} is not supported; supported are {known}"
        meant = closest(family, FAMILIES) if isinstance(family, str) else ""
        raise ConfigError([Problem(places.get("model_type", path), fact, meant)], hint=INSTALL)
    fields = Fields(*by_own_names(values, places), path)
    shape = FAMILIES[values["model_type"]](fields)
    if fields.problems:
        raise ConfigError(fields.problems, hint=fields.hint)
    if fields.uncounted:
        raise NoFormula(fields.uncounted, hint=INSTALL)
    return shape


def text_family(values: Mapping[str, Any]) -> str:
    """Return the family of a config's text model; "" if the config is a family itself, or has no text model we know."""
    text = values.get("text_config")
    if not isinstance(text, dict) or has_formula(values):
        return ""
    family = text.get("model_type", f"{values.get('model_type')}_text")
    return family if isinstance(family, str) and family in FAMILIES else ""


Named = tuple[str, int]
"""The name of a field, and the family's default."""


def _sizes(f: Fields, layers: Named, hidden: Named, heads: Named, vocab: Named) -> dict[str, Any]:
    """Return a shape's sizes that every family has; refuse heads that do not divide the hidden size."""
    found = {"hidden": f.whole(*hidden), "heads": f.whole(*heads)}
    f.divides(heads[0], hidden[0], found["heads"], found["hidden"])
    return found | {"layers": f.whole(*layers, most=MAX_LAYERS), "vocab": f.whole(*vocab)}


def _biases(there: bool) -> dict[str, Any]:
    return dict.fromkeys(BIASES, there)


def _gpt2(f: Fields) -> Shape:
    sizes = _sizes(f, ("n_layer", 12), ("n_embd", 768), ("n_head", 12), ("vocab_size", 50257))
    f.fixed("add_cross_attention", False)
    positions, inner = f.whole("n_positions", 1024), f.whole("n_inner", 4 * sizes["hidden"])
    more = _biases(True) | {"tie": f.flag("tie_word_embeddings", True)}
    return Shape("gpt2", **sizes, mlp_hidden=inner, positions=positions, max_positions=positions, **more)


def _gpt_neox(f: Fields) -> Shape:
    layers, heads = ("num_hidden_layers", 44), ("num_attention_heads", 64)
    sizes = _sizes(f, layers, ("hidden_size", 6144), heads, ("vocab_size", 50432))
    has = _biases(f.flag("attention_bias", True)) | {"mlp_bias": True, "rotary": True}
    has |= {"norms": "parallel" if f.flag("use_parallel_residual", True) else "pre"}
    inner, tie = f.whole("intermediate_size", 24576), f.flag("tie_word_embeddings", False)
    longest = f.whole("max_position_embeddings", 2048)
    return Shape("gpt_neox", **sizes, mlp_hidden=inner, tie=tie, max_positions=longest, **has)


def _opt(f: Fields) -> Shape:
    layers, heads = ("num_hidden_layers", 12), ("num_attention_heads", 12)
    sizes = _sizes(f, layers, ("hidden_size", 768), heads, ("vocab_size", 50272))
    positions = f.whole("max_position_embeddings", 2048)
    return Shape(
        "opt",
        **sizes,
        mlp_hidden=f.whole("ffn_dim", 3072),
        tie=f.flag("tie_word_embeddings", True),
        norm="layer" if f.flag("layer_norm_elementwise_affine", True) else "plain",
        final_norm=f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm", False),
        positions=positions + 2,  # its table starts at 2
        embed_dim=f.whole("word_embed_proj_dim", sizes["hidden"]),
        max_positions=positions,
        **_biases(f.flag("enable_bias", True)),
    )


def _gptj(f: Fields, family: str) -> Shape:
    sizes = _sizes(f, ("n_layer", 28), ("n_embd", 4096), ("n_head", 16), ("vocab_size", 50400))
    inner, longest = f.whole("n_inner", 4 * sizes["hidden"]), f.whole("n_positions", 2048)
    has = _biases(False) | {"norms": "shared", "mlp_bias": True, "head_bias": True, "rotary": True}
    has["tie"] = f.flag("tie_word_embeddings", False)
    return Shape(family, **sizes, mlp_hidden=inner, max_positions=longest, **has)


def _bloom(f: Fields) -> Shape:
    sizes = _sizes(f, ("n_layer", 2), ("hidden_size", 64), ("n_head", 8), ("vocab_size", 250880))
    has = _biases(True) | {"embed_norm": True, "tie": f.flag("tie_word_embeddings", True)}
    return Shape("bloom", **sizes, mlp_hidden=4 * sizes["hidden"], **has)


NEW_FALCON = "new_decoder_architecture is true"


def _falcon(f: Fields) -> Shape:
    layers, vocab = ("num_hidden_layers", 32), ("vocab_size", 65024)
    sizes = _sizes(f, layers, ("hidden_size", 4544), ("num_attention_heads", 71), vocab)
    heads = sizes["heads"]
    new, parallel = f.flag("new_decoder_architecture", False), f.flag("parallel_attn", True)
    kv_heads, norms = 1, f.whole("num_ln_in_parallel_attn", 2 if new else 1, most=2)
    if new:
        kv_heads = f.whole("num_kv_heads", heads)
        f.divides("num_kv_heads", "num_attention_heads", kv_heads, heads)
    elif not f.flag("multi_query", True):
        kv_heads = heads
        if f.whole("num_kv_heads", heads) != heads:
            fact = f"num_kv_heads is not num_attention_heads {heads}: such blocks run only if {NEW_FALCON}"
            f.refuse("num_kv_heads", fact, hint=f"{NEW_FALCON}, or multi_query true (one of each), or no num_kv_heads")
    if new and not parallel:
        f.refuse("parallel_attn", f"parallel_attn is false: such blocks do not run if {NEW_FALCON}")
    if parallel and norms == 2 and not new:
        fact = f"num_ln_in_parallel_attn is 2: such blocks run only if {NEW_FALCON}"
        f.refuse("num_ln_in_parallel_attn", fact, hint=f"{NEW_FALCON}, or num_ln_in_parallel_attn 1")
    return Shape(
        "falcon",
        **sizes,
        mlp_hidden=f.whole("ffn_hidden_size", 4 * sizes["hidden"]),
        kv_heads=0 if kv_heads == heads else kv_heads,
        tie=f.flag("tie_word_embeddings", True),
        norms="pre" if not parallel else "parallel" if norms == 2 else "shared",
        **_biases(f.flag("bias", False)),
        rotary=not f.flag("alibi", False),
        max_positions=f.whole("max_position_embeddings", 2048),
    )


FAMILIES: dict[str, Callable[[Fields], Shape]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "gptj": functools.partial(_gptj, family="gptj"),
    "codegen": functools.partial(_gptj, family="codegen"),
    "bloom": _bloom,
    "falcon": _falcon,
    **llama_like.FAMILIES,
}
