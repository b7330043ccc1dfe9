"""MODEL, as `zerocli fit` takes it: a bundled config, a .toml, a config.json, a factory, or a bare parameter count."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerocli import config as configs
from zerocli.config import Config, ModelConfig, hub
from zerocli.config import file as configfile
from zerocli.config.hugging import TYPES, translate
from zerocli.errors import ConfigError, Problem, UserError
from zerocli.layout.sizes import parse_count
from zerocli.plan.blocks.families import has_formula, read_shape, text_family
from zerocli.plan.blocks.fields import NoFormula
from zerocli.plan.blocks.shape import BIASES, Shape

MAX_CONFIG_NBYTES = 8 << 20
"""Larger files are refused: a config.json has a few thousand bytes."""
DEFAULT_SEQ = 4096


@dataclass(frozen=True)
class Source:
    """What MODEL names: a shape or only a parameter count, its config, and notes about assumptions."""

    name: str
    config: Config
    shape: Shape | None
    count: int
    factory: str = ""
    notes: tuple[str, ...] = ()
    file: hub.ConfigFile | None = None
    """The Hugging Face config that was read."""


def read_source(source: str, sets: Sequence[str], flags: Mapping[str, object]) -> Source:
    """Return what MODEL names, with `--set` and flags applied to its config; raise ConfigError or UserError."""
    if count := _count(source):
        _refuse_shapes(sets, f"{source} is a count and has no shape")
        config = configs.assemble(configfile.Document("unnamed", {}), sets, flags)
        note = "a bare count gives model states alone: activations, logits and buffers need a shape"
        return Source(source, config, None, count, notes=(note,))
    inner = os.path.join(source, hub.CONFIG)
    if os.path.isdir(source) and os.path.isfile(inner):
        source = inner
    if source.endswith(".json"):
        return _read_json(source, sets, flags)
    config = configs.load(source, sets, flags)
    if config.model.factory:
        return Source(source, config, None, 0, factory=config.model.factory)
    return Source(config.name, config, shape_of(config.model, config.train.seq), 0)


def _count(source: str) -> int:
    """Return the number of parameters of a bare count; 0 if `source` is not a count."""
    if not source[:1].isdigit() and source[:1] not in ("-", "+", "."):
        return 0
    if source.endswith((".toml", ".json")) or os.path.exists(source):
        return 0
    try:
        return parse_count(source)
    except ValueError as error:
        raise UserError(str(error), hint="zerocli fit 7.5B") from error


def _read_json(path: str, sets: Sequence[str], flags: Mapping[str, object]) -> Source:
    if os.path.isfile(path) and os.path.getsize(path) > MAX_CONFIG_NBYTES:
        fact = f"is {os.path.getsize(path)} bytes: a config.json has a few thousand"
        raise ConfigError([Problem(path, fact)])
    values, places, stem = configfile.read_values(path)
    if "model_type" not in values and isinstance(values.get("model"), dict):
        config = configs.load(path, sets, flags)
        if config.model.code == "transformers":
            inner = _read_json(hub.config_path(config.model.folder), (), {})
            return dataclasses.replace(inner, name=config.name, config=config, notes=())
        return Source(config.name, config, shape_of(config.model, config.train.seq), 0)
    _refuse_shapes(sets, f"{path} says what the model is")
    file = hub.ConfigFile(values, places, path)
    notes: list[str] = []
    if (shape := _formula(file)) is not None:
        shape = _as_trained(shape, file, notes)
        longest = shape.max_positions
        if text_family(values):
            notes.append(
                "the text model alone (text_config): the other parts are counted where transformers is installed"
            )
    else:
        # Reading it takes seconds, for transformers and torch; a trace in the cache needs neither.
        given = _given("train.seq", sets, flags)
        longest = 0 if given else _stated_positions(values) or hub.max_positions(hub.read_config(file))
    name = stem or str(values["model_type"])
    config = configs.assemble(configfile.Document(name, {}), sets, flags)
    if not _given("train.seq", sets, flags):
        seq = min(longest or DEFAULT_SEQ, DEFAULT_SEQ)
        config = config.with_values({"train.seq": seq})
        notes.append(f"seq {seq} (not in the file; set it with --seq)")
    if not _given("train.batch", sets, flags):
        config = config.with_values({"train.batch": 1})
        notes.append("batch 1 (not in the file; set it with --batch)")
    hint = " (--trace runs transformers' own model)" if hub.installed() else ""
    if shape is not None and shape.family not in TYPES:
        notes.append(f"{shape.family} is planned as zerocli would build it{hint}; transformers trains it")
    return Source(name, config, shape, 0, notes=tuple(notes), file=file)


def _stated_positions(values: Mapping[str, object]) -> int:
    """Return the longest sequence that a file states itself; 0 where its family decides, or a model within it."""
    stated = values.get("max_position_embeddings")
    return stated if isinstance(stated, int) and stated > 0 and "text_config" not in values else 0


def _formula(file: hub.ConfigFile) -> Shape | None:
    """Return the shape of a family with a formula, None if transformers is to build the model.

    Without transformers the formula is all there is: what it does not know is refused.
    """
    installed = hub.installed()
    if installed and file.values.get("model_type") is not None and not has_formula(file.values):
        return None
    try:
        return read_shape(file.values, file.places, file.path)
    except NoFormula:
        if not installed:
            raise
        return None


def _as_trained(shape: Shape, file: hub.ConfigFile, notes: list[str]) -> Shape:
    """Return the shape of a built-in family with what training reads besides its sizes: dropout and windows."""
    if file.values.get("model_type") not in TYPES:
        return shape
    made = translate(file.values, file.places, file.path)
    notes += [f"planned as the built-in {shape.family}, but {problem.fact}" for problem in made.unsupported]
    model = made.model
    window, layers, dropout = (model.get(key) for key in ("window", "window_layers", "dropout"))
    rate = dropout if isinstance(dropout, int | float) and 0 <= dropout < 1 else 0.0
    return dataclasses.replace(shape, window=window or 0, window_layers=layers or "", dropout=float(rate))


def _refuse_shapes(sets: Sequence[str], why: str) -> None:
    """Raise UserError for a `--set model.KEY` of a shape, which would otherwise be ignored silently."""
    for text in sets:
        key = text.partition("=")[0].strip()
        if key.startswith("model.") and key != "model.compile":
            raise UserError(f"--set {text}: {why}", hint="change a copy of the file, or name a bundled config")


def _given(key: str, sets: Sequence[str], flags: Mapping[str, object]) -> bool:
    return flags.get(key) is not None or any(text.partition("=")[0].strip() == key for text in sets)


def run_shape(config: Config) -> Shape:
    """Return the shape of a built-in model as a run trains it, with the adapters that its config asks for."""
    shape = shape_of(config.model, config.train.seq)
    return shape.adapted(config.lora) if config.lora.rank else shape


ALIKE = ("layers", "hidden", "heads", "vocab", "tie", "window", "window_layers")
"""Fields of a built-in model that its shape has too."""


def shape_of(model: ModelConfig, seq: int) -> Shape:
    """Return the shape of a built-in model: what `zerocli.models` would build."""
    gpt2 = model.family == "gpt2"
    wide = model.mlp_hidden or (4 * model.hidden if gpt2 else -(-8 * model.hidden // (3 * 256)) * 256)
    head_dim = 0 if model.head_dim * model.heads == model.hidden else model.head_dim
    normed = (head_dim or model.hidden // model.heads) if model.qk_norm else 0
    alike: dict[str, Any] = {name: getattr(model, name) for name in ALIKE}
    alike |= {name: model.bias if gpt2 else getattr(model, name) for name in BIASES}
    return Shape(
        model.type or model.family,
        **alike,
        mlp_hidden=wide,
        kv_heads=0 if model.kv_heads == model.heads else model.kv_heads,
        head_dim=head_dim,
        gated=not gpt2,
        norm="layer" if gpt2 else "rms",
        norm_bias=model.bias,
        q_norm=normed,
        k_norm=normed,
        positions=max(seq, model.positions) if gpt2 else 0,
        rotary=not gpt2,
        dropout=model.dropout if gpt2 else 0.0,
    )


def model_of(shape: Shape) -> ModelConfig | None:
    """Return the built-in model of exactly this shape, None if there is none: the inverse of `shape_of`.

    A shape does not know how rotary positions are scaled.
    """
    if shape.family not in TYPES:
        return None
    gpt2 = shape.family == "gpt2"
    same_names = (*ALIKE, "kv_heads", "mlp_hidden", "dropout", "head_dim")
    alike: dict[str, Any] = {name: getattr(shape, name) for name in same_names}
    alike |= {name: not gpt2 and getattr(shape, name) for name in BIASES}
    model = ModelConfig(
        family="gpt2" if gpt2 else "llama",
        **alike,
        bias=shape.norm_bias,
        qk_norm=bool(shape.q_norm),
        type="" if shape.family in ("gpt2", "llama") else shape.family,
    )
    same = dataclasses.replace(shape_of(model, shape.positions), max_positions=shape.max_positions)
    return model if same == shape else None
