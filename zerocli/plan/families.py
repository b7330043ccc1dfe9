"""Families of Hugging Face `config.json` files, as shapes. A config is data: its numbers are read, nothing is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerocli.errors import ConfigError, Problem, closest, quote
from zerocli.plan.shape import Shape

MAX_SIZE = 2**40
"""Upper bound of every dimension; a larger value is a mistake."""
MAX_LAYERS = 100_000


class Fields:
    """Reads and validates the fields of a config; collects every problem with its place in the file."""

    def __init__(self, values: Mapping[str, Any], places: Mapping[str, str], path: str) -> None:
        self._values, self._places, self._path = values, places, path
        self.problems: list[Problem] = []

    def whole(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number, or the default if it is absent or null; without a default that is a problem."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                self._refuse(name, f"{name} is missing: without it the model's size is not known")
                return least
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(name, f"{name} {quote(value)} is not a whole number")
            return least
        if not least <= value <= most:
            self._refuse(name, f"{name} {quote(value)} is not between {least} and {most}")
            return least
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(name, f"{name} {quote(value)} is not true or false")
            return default
        return value

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; empty if it is absent."""
        value = self._values.get(name) or []
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            self._refuse(name, f"{name} {quote(value)} is not a list of whole numbers")
            return ()
        return tuple(value)

    def divides(self, part: str, whole: str, parts: int, total: int) -> None:
        if total % parts:
            self._refuse(part, f"{part} {parts} does not divide {whole} {total}")

    def _refuse(self, name: str, fact: str) -> None:
        self.problems.append(Problem(self._places.get(name, self._path), fact))


def read_shape(values: Mapping[str, Any], places: Mapping[str, str], path: str) -> Shape:
    """Return the shape that a Hugging Face config describes; ConfigError names every invalid field.

    Of a model of several parts (images and text) that is not a family itself, the text model is read.
    """
    family = values.get("model_type")
    if text := text_family(values):
        inner = {key.removeprefix("text_config."): place for key, place in places.items() if "text_config." in key}
        outer = {key: values[key] for key in ("tie_word_embeddings",) if key in values}
        return read_shape(outer | values["text_config"] | {"model_type": text}, inner, path)
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        if family is None:
            fact = "holds neither a model_type (Hugging Face) nor a model section (a run's config.json)"
            raise ConfigError([Problem(path, fact)], hint=f"model_type: one of {known}")
        fact = f"model_type {quote(family)} is not supported; supported are {known}"
        meant = closest(family, FAMILIES) if isinstance(family, str) else ""
        hint = "pip install 'zerocli[hf]' (every family of transformers), or zerocli fit package.module:factory --trace"
        raise ConfigError([Problem(places.get("model_type", path), fact, meant)], hint=hint)
    fields = Fields(values, places, path)
    shape = FAMILIES[family](fields)
    if fields.problems:
        raise ConfigError(fields.problems)
    return shape


def text_family(values: Mapping[str, Any]) -> str:
    """Return the family of a config's text model; "" if the config is a family itself, or has no text model we know."""
    text = values.get("text_config")
    if not isinstance(text, dict) or values.get("model_type") in FAMILIES:
        return ""
    family = text.get("model_type", f"{values.get('model_type')}_text")
    return family if isinstance(family, str) and family in FAMILIES else ""


def _gpt2(f: Fields) -> Shape:
    hidden, heads = f.whole("n_embd", 768), f.whole("n_head", 12)
    f.divides("n_head", "n_embd", heads, hidden)
    positions = f.whole("n_positions", 1024)
    return Shape(
        "gpt2",
        f.whole("n_layer", 12, most=MAX_LAYERS),
        hidden,
        heads,
        f.whole("vocab_size", 50257),
        f.whole("n_inner", 4 * hidden),
        tie=f.flag("tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        positions=positions,
        max_positions=positions,
    )


def _gpt_neox(f: Fields) -> Shape:
    hidden, heads = f.whole("hidden_size", 6144), f.whole("num_attention_heads", 64)
    f.divides("num_attention_heads", "hidden_size", heads, hidden)
    bias = f.flag("attention_bias", True)
    return Shape(
        "gpt_neox",
        f.whole("num_hidden_layers", 44, most=MAX_LAYERS),
        hidden,
        heads,
        f.whole("vocab_size", 50432),
        f.whole("intermediate_size", 24576),
        tie=f.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        rotary=True,
        max_positions=f.whole("max_position_embeddings", 2048),
    )


def _opt(f: Fields) -> Shape:
    hidden, heads = f.whole("hidden_size", 768), f.whole("num_attention_heads", 12)
    f.divides("num_attention_heads", "hidden_size", heads, hidden)
    positions = f.whole("max_position_embeddings", 2048)
    bias = f.flag("enable_bias", True)
    first = f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm", False)
    return Shape(
        "opt",
        f.whole("num_hidden_layers", 12, most=MAX_LAYERS),
        hidden,
        heads,
        f.whole("vocab_size", 50272),
        f.whole("ffn_dim", 3072),
        tie=f.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        final_norm=first,
        positions=positions + 2,  # its table starts at 2
        embed_dim=f.whole("word_embed_proj_dim", hidden),
        max_positions=positions,
    )


def _llama_like(
    f: Fields,
    family: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    mlp: int | None = None,
    vocab: int | None = None,
    tie: bool = False,
    head_dim: int | None = None,
    positions: int = 2048,
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    **more: Any,
) -> Shape:
    """Return a shape with rotary positions, RMS norms and a gated MLP; the numbers are the family's defaults."""
    hidden = f.whole("hidden_size", hidden)
    heads = f.whole("num_attention_heads", heads)
    kv_heads = f.whole("num_key_value_heads", kv_heads or heads)
    size = f.whole("head_dim", head_dim or 0, least=0)
    if not size:
        f.divides("num_attention_heads", "hidden_size", heads, hidden)
    f.divides("num_key_value_heads", "num_attention_heads", kv_heads, heads)
    bias = f.flag("attention_bias", False)
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
        gated=True,
        norm="rms",
        rotary=True,
        qkv_bias=bias if qkv_bias is None else qkv_bias,
        out_bias=bias if out_bias is None else out_bias,
        mlp_bias=f.flag("mlp_bias", False),
        max_positions=f.whole("max_position_embeddings", positions),
        **more,
    )


def _llama(f: Fields) -> Shape:
    return _llama_like(f, "llama", layers=32, hidden=4096, heads=32, mlp=11008, vocab=32000)


def _mistral(f: Fields) -> Shape:
    defaults: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 32000}
    return _llama_like(f, "mistral", positions=131072, qkv_bias=False, out_bias=False, **defaults)


def _qwen2(f: Fields) -> Shape:
    return _llama_like(f, "qwen2", positions=32768, qkv_bias=True, out_bias=False)


def _qwen3(f: Fields) -> Shape:
    size = f.whole("head_dim", 128)
    return _llama_like(f, "qwen3", head_dim=128, positions=32768, qk_norm=size)


def _gemma(f: Fields) -> Shape:
    defaults: dict[str, Any] = {
        "layers": 28,
        "hidden": 3072,
        "heads": 16,
        "kv_heads": 16,
        "mlp": 24576,
        "vocab": 256000,
    }
    return _llama_like(f, "gemma", tie=True, head_dim=256, positions=8192, **defaults)


def _phi(f: Fields) -> Shape:
    hidden, heads = f.whole("hidden_size", 2048), f.whole("num_attention_heads", 32)
    f.divides("num_attention_heads", "hidden_size", heads, hidden)
    kv_heads = f.whole("num_key_value_heads", heads)
    f.divides("num_key_value_heads", "num_attention_heads", kv_heads, heads)
    return Shape(
        "phi",
        f.whole("num_hidden_layers", 24, most=MAX_LAYERS),
        hidden,
        heads,
        f.whole("vocab_size", 51200),
        f.whole("intermediate_size", 8192),
        kv_heads=0 if kv_heads == heads else kv_heads,
        tie=f.flag("tie_word_embeddings", False),
        block_norms=1,
        qk_norm=2 * (hidden // heads) if f.flag("qk_layernorm", False) else 0,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        rotary=True,
        max_positions=f.whole("max_position_embeddings", 2048),
    )


def _mixtral(f: Fields) -> Shape:
    experts = f.whole("num_local_experts", 8)
    defaults: dict[str, Any] = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 32000}
    return _llama_like(
        f,
        "mixtral",
        **defaults,
        positions=131072,
        qkv_bias=False,
        out_bias=False,
        experts=experts,
        experts_per_token=f.whole("num_experts_per_tok", 2, most=experts),
        expert_hidden=f.whole("intermediate_size", 14336),
    )


def _qwen_moe(f: Fields, family: str, **more: Any) -> Shape:
    experts = f.whole("num_experts", 60 if family == "qwen2_moe" else 128)
    return _llama_like(
        f,
        family,
        positions=32768,
        experts=experts,
        experts_per_token=f.whole("num_experts_per_tok", 4 if family == "qwen2_moe" else 8, most=experts),
        expert_hidden=f.whole("moe_intermediate_size"),
        sparse_every=f.whole("decoder_sparse_step", 1),
        dense_blocks=f.wholes("mlp_only_layers"),
        **more,
    )


def _qwen2_moe(f: Fields) -> Shape:
    shared = f.whole("shared_expert_intermediate_size")
    return _qwen_moe(f, "qwen2_moe", qkv_bias=True, out_bias=False, shared_hidden=shared)


def _qwen3_moe(f: Fields) -> Shape:
    size = f.whole("head_dim", 128)
    return _qwen_moe(f, "qwen3_moe", head_dim=128, qk_norm=size)


FAMILIES: dict[str, Callable[[Fields], Shape]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "phi": _phi,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
