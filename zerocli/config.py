"""The config: what can be set, how it is read and checked. `load` is the way in; every problem is reported at once."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerocli import configfile
from zerocli.configfile import bundled
from zerocli.errors import ConfigError, Problem, closest, quote
from zerocli.shards import nearest_divisor
from zerocli.sizes import parse_bytes

__all__ = ["Config", "assemble", "bundled", "from_dict", "load", "to_dict", "validate"]


def setting(default: Any, **law: Any) -> Any:
    """Return a field and the law of its value: `choices`, `least`, `most`, `above`, `below`, `size` (of bytes)."""
    return dataclasses.field(default=default, metadata=law)


@dataclass(frozen=True)
class ModelConfig:
    """The model's shape."""

    family: str = setting("gpt2", choices=("gpt2", "llama"))
    """Which built-in model: gpt2 or llama."""
    layers: int = setting(4, least=1)
    """Transformer blocks."""
    hidden: int = setting(128, least=1)
    """Width of the residual stream."""
    heads: int = setting(4, least=1)
    """Attention heads; they divide `hidden`."""
    kv_heads: int = setting(0, least=0)
    """Heads of keys and values (grouped-query attention); 0 = as many as `heads`."""
    vocab: int = setting(256, least=1)
    """Token ids the model knows: 0 to vocab - 1."""
    mlp_hidden: int = setting(0, least=0)
    """Width inside the MLP; 0 = the family's own rule."""
    dropout: float = setting(0.0, least=0, below=1)
    """Share of activations dropped in training."""
    tie: bool = setting(True)
    """Whether the output layer shares the embedding's weights."""
    bias: bool = setting(True)
    """Whether linear layers have biases."""
    rope_theta: float = setting(10000.0, above=0)
    """Base of the rotary embedding's wavelengths (llama)."""
    norm_eps: float = setting(1e-5, above=0)
    """Added under the root in normalisation."""
    factory: str = setting("", form=configfile.FACTORY, example="package.module:callable")
    """`package.module:callable` that builds the model instead of a built-in family."""
    compile: bool = setting(False)
    """Whether the blocks go through torch.compile."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    steps: int = setting(100, least=1)
    """Optimizer steps."""
    batch: int = setting(8, least=1)
    """Sequences per data-parallel rank and micro-step."""
    seq: int = setting(128, least=1)
    """Tokens of a sequence."""
    accumulate: int = setting(1, least=1)
    """Micro-steps whose gradients are summed before an optimizer step."""
    global_batch: int = setting(0, least=0)
    """Sequences a step over all ranks; `accumulate` follows from it. 0 = batch x ranks x accumulate."""
    clip: float = setting(1.0, least=0)
    """Largest norm of the whole gradient; 0 = not clipped."""
    precision: str = setting("auto", choices=("auto", "fp32", "bf16", "fp16"))
    """What the model computes in; auto = bf16 where the device supports it."""
    seed: int = setting(1234, least=0)
    """Decides the first weights, the order of the data and dropout."""
    on_nan: str = setting("stop", choices=("stop", "continue"))
    """What a loss that is not finite does to the run."""
    gpu_memory: int = setting(0, least=0, size=True)
    """Bytes of each GPU that the run may take, to try a smaller one; 0 = all."""
    init_from: str = setting("")
    """Folder with safetensors whose weights the run starts from; empty = new ones."""
    watchdog: float = setting(600.0, least=0)
    """Seconds after which a collective or transfer that is stuck ends the run; 0 = never."""
    log_every: int = setting(10, least=1)
    """Steps between two lines of progress where there is no terminal."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How a gradient becomes an update."""

    name: str = setting("adamw", form=re.compile(r"[^\W\d][\w.]*"), example="adamw")
    """adamw, or a class of torch.optim by its name."""
    lr: float = setting(3e-4, least=0)
    """The highest learning rate."""
    betas: tuple[float, float] = setting((0.9, 0.95), least=0, below=1)
    """Decay of the two moments (Adam)."""
    eps: float = setting(1e-8, least=0)
    """Added to the root of the second moment (Adam)."""
    weight_decay: float = setting(0.1, least=0)
    """Decoupled decay of matrices, a step, times the learning rate."""
    momentum: float = setting(0.9, least=0, below=1)
    """Momentum (SGD)."""
    warmup: int = setting(0, least=0)
    """Steps over which the learning rate rises from zero."""
    schedule: str = setting("cosine", choices=("cosine", "linear", "constant"))
    """How the learning rate falls after the warm-up."""
    min_lr: float = setting(0.1, least=0, most=1)
    """Where it ends, as a fraction of `lr`."""
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Further keyword arguments for other classes of torch.optim."""


@dataclass(frozen=True)
class ZeroConfig:
    """What is partitioned, and through which buffers it travels."""

    stage: int = setting(2, choices=(0, 1, 2, 3))
    """0: nothing; 1: optimizer states; 2: and gradients; 3: and parameters are partitioned."""
    bucket: int = setting(32 * 2**20, least=1, size=True)
    """Bytes of one reduction bucket; files may say `64MiB`."""
    buffers: int = setting(2, least=2)
    """Gather buffers per size class: one computes while the next is filled."""
    reduce: str = setting("compute", choices=("compute", "fp32"))
    """Type of gradients on the wire: the compute type, or fp32 at twice the bytes."""


@dataclass(frozen=True)
class ActivationsConfig:
    """What becomes of activations between forward and backward."""

    policy: str = setting("keep", choices=("keep", "recompute"))
    """Keep them, or keep each block's input (its checkpoint) and recompute the rest; `--offload activations=TIER` says
    where checkpoints rest, and means recompute."""
    partition: bool = setting(True)
    """Whether tensor-parallel ranks, which have equal checkpoints, each keep a part of them (Pa)."""


@dataclass(frozen=True)
class OffloadConfig:
    """Which tier holds which model states."""

    placement: str = setting("")
    """The text of `--offload`, such as `cpu` or `params=cpu,optimizer=nvme`; empty = all on the device."""
    update: str = setting("auto", choices=("auto", "cpu", "stream"))
    """Where offloaded optimizer states are updated: on the CPU, or streamed through the device."""
    nvme_path: tuple[str, ...] = setting(())
    """Folders of the nvme tier; several are striped."""
    staging: int = setting(512 * 2**20, least=1, size=True)
    """Bytes of pinned memory through which nvme transfers pass."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int = setting(0, least=0)
    """Steps between checkpoints; 0 = never."""
    async_: bool = setting(True)
    """Whether training goes on while a checkpoint is written (`async` in files)."""
    keep: int = setting(2, least=1)
    """How many of the newest are kept."""
    keep_every: int = setting(0, least=0)
    """Beside those, each whose step is a multiple of this is kept; 0 = none."""
    buffer: int = setting(2**30, least=1, size=True)
    """Bytes of host memory, a rank, that a checkpoint passes through on its way to disk."""
    time_limit: float = setting(0.0, least=0)
    """Seconds the run may take; shortly before, it is saved and ends with exit code 75. 0 = no limit."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    path: str = setting("")
    """Text file, folder of text files, .bin or .npy of token ids; empty = Python's standard library as bytes."""
    tokenizer: str = setting("bytes")
    """`bytes`, or the path of a tokenizer.json."""
    dtype: str = setting("", choices=("", "uint16", "uint32"))
    """Type of the ids in a .bin; empty = uint16."""


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes, and how they split the work."""

    ranks: int = setting(0, least=0)
    """Processes in all; 0 = one a GPU, or 2 without a GPU."""
    tp: int = setting(1, least=1)
    """Ranks that split each layer between them (tensor parallel); they divide `ranks`."""


PRESETS: dict[str, dict[str, object]] = {
    f"C{number}": {
        "zero.stage": stage,
        "activations.policy": "recompute",
        "activations.partition": partition,
        "offload.placement": placement,
    }
    for number, stage, partition, placement in (
        (1, 1, False, ""),
        (2, 1, True, ""),
        (3, 2, False, ""),
        (4, 2, True, ""),
        (5, 2, True, "activations=cpu"),
    )
}
"""The ZeRO paper's configurations. Constant buffers and contiguous arenas (CB, MD) are always there."""


@dataclass(frozen=True)
class Config:
    """Everything a run is made of."""

    name: str = setting("unnamed", form=re.compile(r"\w[\w.-]*"), example="my-model")
    """What the run is called: letters, digits, `.`, `_` and `-`."""
    preset: str = setting("", choices=("", *PRESETS))
    """C1 to C5 of the ZeRO paper: sets stage, activations and offload together; keys that come after it go first."""
    model: ModelConfig = ModelConfig()
    """The model's shape."""
    train: TrainConfig = TrainConfig()
    """The training run."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its learning rate."""
    zero: ZeroConfig = ZeroConfig()
    """What is partitioned."""
    activations: ActivationsConfig = ActivationsConfig()
    """What becomes of activations."""
    offload: OffloadConfig = OffloadConfig()
    """Which tier holds what."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    data: DataConfig = DataConfig()
    """Where tokens come from."""
    parallel: ParallelConfig = ParallelConfig()
    """How many processes."""


SECTIONS: dict[str, type] = {f.name: f.type for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)}  # type: ignore[misc]
# Dotted key, as in files, to field: `checkpoint.async` to async_, which Python keeps the bare word from.
FIELDS: dict[str, dataclasses.Field] = {field.name: field for field in dataclasses.fields(Config)[:2]} | {
    f"{section}.{field.name.rstrip('_')}": field
    for section, kind in SECTIONS.items()
    for field in dataclasses.fields(kind)
}
# Flags that are not named after their key.
_FLAGS = {"data.path": "--data", "offload.placement": "--offload"}


def load(source: str, sets: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> Config:
    """Return the config that `source` names, with `sets` (`section.key=value`) and then `flags` laid over it.

    `flags` maps dotted keys to typed values; None is a flag that was not given. Raises ConfigError with every
    problem found. Nothing is imported or executed, a factory neither.
    """
    return assemble(configfile.read(source), sets, flags, is_file=source.endswith((".toml", ".json")))


def assemble(
    document: configfile.Document,
    sets: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
    is_file: bool = False,
) -> Config:
    """Return the config that a document says, with `sets` and `flags` laid over it; see `load`."""
    draft = _Draft(list(document.problems))
    draft.add_document(document)
    if draft.values.get("model.factory") and is_file:
        fact = "a factory is code, and no code is run because a file says so: name it as CONFIG instead"
        draft.problems.append(Problem(draft.places["model.factory"], fact))
    for text in sets:
        place = f"--set {text[:80]}"
        try:
            key, value, raw = configfile.parse_set(text)
        except ValueError as error:
            draft.problems.append(Problem(place, str(error)))
        else:
            draft.add(key, value, place, raw)
    for key, value in (flags or {}).items():
        if value is not None and value != ():
            flag = _FLAGS.get(key, "--" + key.rpartition(".")[2].replace("_", "-"))
            draft.add(key, value, f"{flag} {value if isinstance(value, str) else quote(value)}")
    if document.positions:
        draft.bound_seq(document.positions)
    return draft.finish()


class _Draft:
    """A config being put together: typed values, where each came from, and what is wrong so far."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.bad: set[str] = set()  # keys already complained about: nothing is concluded from their values

    def add_document(self, document: configfile.Document) -> None:
        self.values["name"] = re.sub(r"[^\w.-]+", "-", document.name).lstrip("-.") or "unnamed"
        for section, table in document.values.items():
            place = document.places.get(section, section)
            if section not in SECTIONS or not isinstance(table, Mapping):
                self.add(section, table, place)
                continue
            for key, value in table.items():
                self.add(f"{section}.{key}", value, document.places.get(f"{section}.{key}", f"{section}.{key}"))

    def add(self, key: str, value: object, place: str, raw: str | None = None) -> None:
        """Take `key` as `value`; `raw` is its own text where it came from a command line."""
        if raw is not None and key.startswith("optimizer.options.") and key.count(".") == 2:
            options = self.values.get("optimizer.options", {})
            key, value = "optimizer.options", {**options, key.rpartition(".")[2]: value}
        if key not in FIELDS:
            self.problems.append(_unknown(key, value, place))
            return
        field = FIELDS[key]
        try:
            self.values[key] = _convert(field, value, raw)
            self.places.pop(key, None)  # the newest stands last
            self.places[key] = place
            if key == "preset":
                for preset_key, preset_value in PRESETS.get(str(value), {}).items():
                    self.add(preset_key, preset_value, place)
        except (ValueError, OverflowError) as error:
            self.problems.append(Problem(place, f"{_short(key)} {error}"))
            self.bad.add(key)

    def bound_seq(self, positions: int) -> None:
        seq = self.values.get("train.seq")
        if seq is None:
            self.values["train.seq"] = min(positions, TrainConfig.seq)
        elif seq > positions:
            fact = f"seq {seq} is beyond the {positions} positions the model was made for"
            self.problems.append(Problem(self.places["train.seq"], fact))

    def finish(self) -> Config:
        config = _build(self.values)
        for keys, problem in _violations(config):
            if not self.bad.intersection(keys):
                # Of the keys involved, the one given last is the likeliest to be wrong.
                place = next((self.places[key] for key in reversed(self.places) if key in keys), problem.place)
                self.problems.append(dataclasses.replace(problem, place=place))
        if self.problems:
            raise ConfigError(self.problems)
        return config


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        given = {k: v for k, v in values.items() if k.startswith(section + ".")}
        sections[section] = kind(**{FIELDS[key].name: value for key, value in given.items()})
    return Config(name=values.get("name", "unnamed"), preset=values.get("preset", ""), **sections)


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _unknown(key: str, value: object, place: str) -> Problem:
    section, dot, name = key.partition(".")
    shown = quote(key, 80)[1:-1]
    if not dot:
        if section in SECTIONS:
            return Problem(place, f"{section} is a section of keys, not {quote(value)}")
        if isinstance(value, Mapping):
            return Problem(place, f"there is no section {shown}", closest(section, SECTIONS))
        inside = [known for known in FIELDS if _short(known) == section]
        meant = inside[0] if inside else closest(section, FIELDS)
        return Problem(place, f"there is no key {shown} outside a section", meant)
    if section not in SECTIONS:
        meant = closest(section, SECTIONS)
        if meant and f"{meant}.{name}" in FIELDS:
            meant = f"{meant}.{name}"
        return Problem(place, f"there is no section {quote(section)[1:-1]}", meant)
    siblings = [_short(known) for known in FIELDS if known.startswith(section + ".")]
    elsewhere = [known for known in FIELDS if _short(known) == name]
    meant = closest(name, siblings)
    meant = f"{section}.{meant}" if meant else elsewhere[0] if elsewhere else ""
    return Problem(place, f"there is no key {shown}", meant)


def _convert(field: dataclasses.Field, value: object, raw: str | None) -> object:
    """Return `value` as the field's type; raise ValueError that says what it is not."""
    kind = field.type
    if kind is str:
        return _text(value if isinstance(value, str) or raw is None else raw)
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{quote(value)} is not true or false")
        return value
    if kind is int:
        return _whole(parse_bytes(value) if field.metadata.get("size") and isinstance(value, str) else value)
    if kind is float:
        return _number(value)
    if field.name == "options":
        return _options(value)
    if raw is not None and isinstance(value, str):
        # On a command line a list needs no brackets: 0.9,0.95
        value = configfile.parse_set(f"value=[{raw}]")[1] if kind == tuple[float, float] else raw.split(",")
    if kind == tuple[str, ...]:
        return tuple(map(_text, [value] if isinstance(value, str) else _listed(value)))
    pair = tuple(map(_number, _listed(value)))
    if len(pair) != 2:
        raise ValueError(f"{quote(value)} is not two numbers")
    return pair


def _listed(value: object) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{quote(value)} is not a list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{quote(value)} is not text: it needs quotes")
    if "\0" in value:
        raise ValueError(f"{quote(value)} has a zero byte in it")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        exact = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        raise ValueError(f"{quote(value)} is not a whole number" + (f": write {int(value)}" if exact else ""))  # type: ignore[call-overload]
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{quote(value)} is beyond 64 bits")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{quote(value)} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"{quote(value)} is not finite")
    return float(value)


def _options(value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{quote(value)} is not a table")

    def plain(item: object) -> object:
        if isinstance(item, Mapping):
            return {_text(key): plain(inner) for key, inner in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(inner) for inner in item]
        if isinstance(item, (str, bool)):
            return item
        return _whole(item) if isinstance(item, int) else _number(item)

    return {_text(key): plain(item) for key, item in value.items()}


def validate(config: Config) -> list[Problem]:
    """Return what is wrong with a config of the right types: ranges and cross checks, each at its dotted key."""
    return [problem for _, problem in _violations(config)]


def _violations(config: Config) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Yield (the keys involved, the problem)."""
    bad = set()
    for key, field in FIELDS.items():
        fact, meant = _law_broken(field, _get(config, key))
        if fact:
            bad.add(key)
            yield (key,), Problem(key, f"{_short(key)} {fact}", meant)
    for keys, fact in _cross_checks(config, bad):
        yield keys, Problem(keys[0], fact)
    for keys, fact, meant in _tp_checks(config, bad):
        yield keys, Problem(keys[0], fact, meant)


def _get(config: Config, key: str) -> Any:
    section = key.rpartition(".")[0]
    return getattr(getattr(config, section) if section else config, FIELDS[key].name)


def _law_broken(field: dataclasses.Field, value: Any) -> tuple[str, str]:
    """Return (the fact, what was probably meant); empty where the value keeps the field's law."""
    law = field.metadata
    choices = law.get("choices")
    if choices and value not in choices:
        meant = closest(value, choices) if isinstance(value, str) else ""
        return f"{quote(value)} is not one of {', '.join(str(c) for c in choices if c != '')}", meant
    if "form" in law and value != field.default and not law["form"].fullmatch(value):
        return f"{quote(value)} is not of the form {law['example']}", ""
    if field.name == "nvme_path" and "" in value:
        return "has an empty path in it", ""
    for number in value if isinstance(value, tuple) else (value,):
        if "least" in law and number < law["least"]:
            return f"{quote(number)} is below {law['least']}", ""
        if "above" in law and number <= law["above"]:
            return f"{quote(number)} is not above {law['above']}", ""
        if "below" in law and number >= law["below"]:
            return f"{quote(number)} is not below {law['below']}", ""
        if "most" in law and number > law["most"]:
            return f"{quote(number)} is above {law['most']}", ""
    return "", ""


def _cross_checks(config: Config, bad: set[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, fact) of each law between keys that is broken; a key already bad takes part in none."""
    model = config.model
    kv_heads = model.kv_heads or model.heads

    def sound(*names: str) -> bool:
        return not bad.intersection(names)

    if model.factory:
        return  # the factory decides the shape
    if sound("model.heads", "model.hidden"):
        if model.hidden % model.heads:
            yield ("model.heads", "model.hidden"), f"heads {model.heads} does not divide hidden {model.hidden}"
        elif model.family == "llama" and model.hidden // model.heads % 2:
            fact = f"heads of {model.hidden // model.heads} (hidden / heads) are odd: rotary embeddings turn pairs"
            yield ("model.heads", "model.hidden"), fact
    if sound("model.heads", "model.kv_heads") and model.heads % kv_heads:
        yield ("model.kv_heads", "model.heads"), f"kv_heads {kv_heads} does not divide heads {model.heads}"


def _tp_checks(config: Config, bad: set[str]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (keys, fact, the nearest degree that works) of each number that the tensor-parallel degree must divide.

    The model itself checks the widths that it derives from others, when it is split.
    """
    model, tp = config.model, config.parallel.tp
    numbers = {"parallel.ranks": config.parallel.ranks}
    if not model.factory:  # else the factory decides the shape
        numbers["model.kv_heads" if model.kv_heads else "model.heads"] = model.kv_heads or model.heads
        numbers["model.mlp_hidden"] = model.mlp_hidden
    numbers = {key: number for key, number in numbers.items() if number and key not in bad}
    if "parallel.tp" not in bad:
        for key, number in numbers.items():
            if number % tp:
                nearest = nearest_divisor(tp, math.gcd(*numbers.values()))
                yield ("parallel.tp", key), f"tp {tp} does not divide {_short(key)} {number}", f"tp {nearest}"


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as JSON-able values, keys as in files; `from_dict` gives the same config back."""
    made: dict[str, Any] = {"name": config.name, "preset": config.preset} | {section: {} for section in SECTIONS}
    for key in FIELDS:
        if "." in key:
            value = _get(config, key)
            plain = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            made[key.partition(".")[0]][_short(key)] = plain
    return made


def from_dict(values: Mapping[str, Any], place: str = "") -> Config:
    """Return the config that `to_dict` wrote; raise ConfigError with every problem, each at `place` and its key."""
    if not isinstance(values, Mapping):
        raise ConfigError([Problem(place or "config", f"{quote(values)} is not a table")])
    draft = _Draft([])
    draft.add_document(configfile.Document(Config.name, {str(key): value for key, value in values.items()}))
    try:
        return draft.finish()
    except ConfigError as error:
        if not place:
            raise
        named = [dataclasses.replace(problem, place=f"{place} {problem.place}") for problem in error.problems]
        raise ConfigError(named) from None
