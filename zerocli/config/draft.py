"""Assemble a config from a document, `--set` and flags; all problems are reported at once, each with its place."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from offload.placement import Placement
from zerocli.config import file as configfile
from zerocli.config.convert import convert
from zerocli.config.laws import violations
from zerocli.config.lora import read_lora
from zerocli.config.schema import FIELDS, PRESETS, SECTIONS, Config, TrainConfig, get, short
from zerocli.config.yaml import SUFFIXES as YAML
from zerocli.errors import ConfigError, Problem, closest, quote

# Flags that are not named after their key.
_FLAGS = {
    "data.path": "--data",
    "offload.placement": "--offload",
    "checkpoint.every": "--save-every",
    "lora.rank": "--lora",
}
OTHER_NAMES = {
    name: key
    for key, names in {
        "optimizer.lr": "learning_rate",
        "optimizer.name": "type optimizer optim",
        "optimizer.schedule": "lr_scheduler_type lr_scheduler",
        "optimizer.warmup": "warmup_steps warmup_ratio",
        "optimizer.betas": "adam_beta2",
        "train.clip": "max_grad_norm gradient_clipping grad_clip",
        "train.batch": "batch_size micro_batch_size per_device_train_batch_size bs",
        "train.accumulate": "gradient_accumulation_steps grad_accum gradient_accumulation",
        "train.steps": "max_steps num_steps",
        "train.epochs": "num_epochs num_train_epochs epoch",
        "train.seq": "seq_len seq_length sequence_len sequence_length max_len max_length max_seq_len max_seq_length "
        "context_length cutoff_len",
        "train.precision": "bf16 mixed_precision dtype",
        "checkpoint.every": "save_steps checkpoint_every",
        "train.eval_every": "eval_steps",
        "data.split": "val_set_size val_split test_size",
        "activations.policy": "gradient_checkpointing",
        "lora.rank": "lora_r lora_rank r",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.targets": "lora_target lora_target_modules target_modules",
        "lora.save_modules": "lora_modules_to_save modules_to_save",
        "lora.rslora": "use_rslora",
        "lora.dora": "use_dora",
        "model.layers": "num_hidden_layers",
        "model.hidden": "hidden_size",
        "model.heads": "num_attention_heads",
        "model.vocab": "vocab_size",
        "data.path": "dataset data_path train_file",
        "parallel.ranks": "gpus num_gpus nproc nproc_per_node num_processes num_processes_per_node world_size dp "
        "data_parallel_size",
        "train.log_every": "log_interval logging_steps",
        "zero.stage": "zero_stage",
        "parallel.tp": "tensor_parallel tensor_parallel_size",
        "checkpoint.keep": "save_total_limit",
        "optimizer.eps": "adam_epsilon",
        "train.patience": "early_stopping_patience",
        "data.validation": "eval_data eval_file validation_file validation_data",
        "data.system": "system_prompt",
    }.items()
    for name in names.split()
}
"""Name that other programs have for a key, without its section and with `_` for `-` -> our key."""
OTHER_SETTINGS = {
    "gradient_checkpointing": "activations.policy=recompute",
    "load_in_4bit": "lora.base=nf4",
    "load_in_8bit": "lora.base=int8",
    **dict.fromkeys(("qlora", "quantization", "quantization_bit", "bnb_4bit_quant_type"), "lora.base=nf4"),
}
"""The same for keys of another kind than ours: the key with its value."""
_WEIGHT = re.compile(r":[0-9.]+$")
"""What follows a path in PATH:WEIGHT."""
CODE = "model.code"
FOREIGN = ("model.folder", CODE, "model.vocab", "model.compile")
"""Keys of `model` that mean something beside the config.json that transformers builds from."""


def flag_of(key: str) -> str:
    """Return the flag of a key that has one."""
    return _FLAGS.get(key, "--" + short(key).replace("_", "-"))


def load(source: str, sets: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> Config:
    """Return the config that `source` names, overridden by `sets` (`section.key=value`) and then by `flags`.

    `flags` maps dotted keys to typed values; None is a flag that was not given. Raises ConfigError with every
    problem found. Nothing is imported or executed, not even a factory.
    """
    return _read(source, sets, flags).finish()


def given_keys(source: str, sets: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> frozenset[str]:
    """Return the keys that `source`, `sets` or `flags` give; the others have their defaults."""
    return frozenset(_read(source, sets, flags).places)


def _read(source: str, sets: Sequence[str], flags: Mapping[str, object] | None) -> "_Draft":
    if "=" in source and not os.path.exists(source):
        raise ConfigError([Problem(source, "is no config; keys are set with --set")], hint=set_hint([source]))
    return _combine(configfile.read(source), sets, flags, is_file=source.endswith((".toml", ".json", *YAML)))


def notes_of(source: str) -> list[str]:
    """Return what the log should say about reading `source`: keys that are not used."""
    try:
        return configfile.read(source).notes
    except ConfigError:  # reported by `load`
        return []


def set_hint(words: Sequence[str]) -> str:
    """Return `--set` for each `key=value` among words, with the section of a key that lacks it."""
    known = {short(key): key for key in reversed(FIELDS)}
    pairs = [word.partition("=") for word in words if "=" in word]
    return " ".join(f"--set {known.get(key.lstrip('+'), key.lstrip('+'))}={value}" for key, _, value in pairs)


def assemble(
    document: configfile.Document, sets: Sequence[str] = (), flags: Mapping[str, object] | None = None
) -> Config:
    """Return the config that a document describes, overridden by `sets` and `flags`; see `load`."""
    return _combine(document, sets, flags).finish()


def _combine(
    document: configfile.Document, sets: Sequence[str], flags: Mapping[str, object] | None, is_file: bool = False
) -> "_Draft":
    document = configfile.for_code(document, _asked_code(sets, flags))
    draft = _Draft(list(document.problems), document.hint)
    draft.add_document(document)
    if draft.values.get("model.factory") and is_file:
        fact = "a factory is code, and no code is run because a file says so: name it as CONFIG instead"
        draft.problems.append(Problem(draft.places["model.factory"], fact))
    draft.drop_other_ways(
        {text.partition("=")[0].strip() for text in sets}
        | {key for key, value in (flags or {}).items() if value is not None}
    )
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
            draft.add(key, value, f"{flag_of(key)} {value if isinstance(value, str) else quote(value)}")
    if document.positions:
        draft.bound_seq(document.positions)
    return draft


def _asked_code(sets: Sequence[str], flags: Mapping[str, object] | None) -> str:
    """Return `model.code` as it is asked for, before there is a config."""
    given = [text.partition("=")[2].strip().strip("\"'") for text in sets if text.partition("=")[0].strip() == CODE]
    return str((flags or {}).get(CODE) or (given or ["auto"])[-1])


_OTHER_WAYS = {"train.steps": "train.epochs", "train.accumulate": "train.global_batch"}
"""By key: another that says the same in another way, and that goes first if both are there."""


class _Draft:
    """A config under construction: typed values, the place each came from, and the problems so far."""

    def __init__(self, problems: list[Problem], hint: str = ""):
        self.problems, self.hint = problems, hint
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        self.bad: set[str] = set()  # keys with a reported problem: cross checks skip them

    def add_document(self, document: configfile.Document) -> None:
        self.values["name"] = re.sub(r"[^\w.-]+", "-", document.name).lstrip("-.") or "unnamed"
        for section, table in document.values.items():
            place = document.places.get(section, section)
            if section not in SECTIONS or not isinstance(table, Mapping):
                self.add(section, table, place)
                continue
            for key, value in table.items():
                self.add(f"{section}.{key}", value, document.places.get(f"{section}.{key}", f"{section}.{key}"))

    def drop_other_ways(self, given: set[str]) -> None:
        """Drop what a file says in another way than a command line does."""
        for key, other in _OTHER_WAYS.items():
            if key in given and other not in given:
                self.values.pop(other, None)
                self.places.pop(other, None)

    def add(self, key: str, value: object, place: str, raw: str | None = None) -> None:
        """Set `key` to `value`; `raw` is the value's text if it came from a command line."""
        if raw is not None and key.startswith("optimizer.options.") and key.count(".") == 2:
            options = self.values.get("optimizer.options", {})
            key, value = "optimizer.options", {**options, key.rpartition(".")[2]: value}
        if key not in FIELDS:
            self.problems.append(unknown(key, value, place))
            return
        if key == "data.path" and isinstance(value, (tuple, list)):
            return self._add_paths(value, place)
        if key == "lora.rank" and isinstance(value, str):
            return self._add_lora(value, place)
        field = FIELDS[key]
        try:
            self.values[key] = convert(field, value, raw)
            if key == "data.path":
                self.values.pop("data.mix", None)  # of what was set before
            self.places.pop(key, None)  # keep the most recently set key last
            self.places[key] = place
            if key == "preset":
                for preset_key, preset_value in PRESETS.get(str(value), {}).items():
                    self.add(preset_key, preset_value, place)
        except (ValueError, OverflowError) as error:
            self.problems.append(Problem(place, f"{short(key)} {error}"))
            self.bad.add(key)

    def _add_lora(self, text: str, place: str) -> None:
        """Set the keys that `--lora` gives: a rank, a rank and targets, or those of a folder of adapters."""
        try:
            for key, value in read_lora(text).items():
                self.add(key, value, place)
        except ValueError as error:
            self.problems.append(Problem(place, f"lora {error}"))
            self.bad.add("lora.rank")

    def _add_paths(self, paths: Sequence[object], place: str) -> None:
        """Set `data.path` to one path, or `data.mix` to several or to one with a weight."""
        first = paths[0] if paths else ""
        plain = not isinstance(first, str) or os.path.exists(first) or not _WEIGHT.search(first)
        self.add("data.path", first if plain else _WEIGHT.sub("", str(first)), place)
        if len(paths) > 1 or not plain:
            self.add("data.mix", paths, place)

    def bound_seq(self, positions: int) -> None:
        seq = self.values.get("train.seq")
        if seq is None:
            self.values["train.seq"] = min(positions, TrainConfig.seq)
        elif seq > positions and "model.positions" not in self.values:
            fact = f"seq {seq} is beyond the {positions} positions the model was made for"
            self.problems.append(Problem(self.places["train.seq"], fact, hint=f"--seq {positions}"))

    def finish(self) -> Config:
        config = build(self.values)
        if config.model.code == "transformers":
            self._refuse_shape(config)
        for keys, problem in violations(config):
            if not self.bad.intersection(keys):
                # The key that was set last is the most likely to be wrong.
                place = next((self.places[key] for key in reversed(self.places) if key in keys), problem.place)
                self.problems.append(dataclasses.replace(problem, place=place))
        if self.problems:
            raise ConfigError(self.problems, self.hint)
        return config

    def _refuse_shape(self, config: Config) -> None:
        """Add a problem for each key that the folder's config.json decides."""
        for key, place in self.places.items():
            if key.startswith("model.") and key not in FOREIGN and get(config, key) != get(Config(), key):
                fact = f"{short(key)}: transformers builds the model that {config.model.folder} describes"
                self.problems.append(Problem(place, fact))


def build(values: Mapping[str, Any]) -> Config:
    """Return a config from typed values by dotted key; other keys have their defaults."""
    sections: dict[str, Any] = {}
    for section, kind in SECTIONS.items():
        given = {k: v for k, v in values.items() if k.startswith(section + ".")}
        sections[section] = kind(**{FIELDS[key].name: value for key, value in given.items()})
    return Config(name=values.get("name", "unnamed"), preset=values.get("preset", ""), **sections)


def unknown(key: str, value: object, place: str) -> Problem:
    section, dot, name = key.partition(".")
    shown = quote(key, 80)[1:-1]
    if value and (name or section) in OTHER_SETTINGS:
        return Problem(place, f"there is no key {shown}", OTHER_SETTINGS[name or section])
    if (name or section) in OTHER_NAMES and not isinstance(value, Mapping):
        return Problem(place, f"there is no key {shown}", OTHER_NAMES[name or section])
    if not dot:
        if section in SECTIONS:
            return Problem(place, f"{section} is a section of keys, not {quote(value)}")
        if isinstance(value, Mapping):
            return Problem(place, f"there is no section {shown}", closest(section, SECTIONS))
        inside = [known for known in FIELDS if short(known) == section]
        meant = inside[0] if inside else closest(section, FIELDS)
        return Problem(place, f"there is no key {shown} outside a section", meant)
    if section not in SECTIONS:
        meant = closest(section, SECTIONS)
        if meant and f"{meant}.{name}" in FIELDS:
            meant = f"{meant}.{name}"
        return Problem(place, f"there is no section {quote(section)[1:-1]}", meant)
    siblings = [short(known) for known in FIELDS if known.startswith(section + ".")]
    elsewhere = [known for known in FIELDS if short(known) == name]
    meant = closest(name, siblings)
    meant = f"{section}.{meant}" if meant else elsewhere[0] if elsewhere else ""
    return Problem(place, f"there is no key {shown}", meant)


def to_dict(config: Config) -> dict[str, Any]:
    """Return the config as JSON-compatible values, with keys as in files; `from_dict` is the inverse."""
    made: dict[str, Any] = {"name": config.name, "preset": config.preset} | {section: {} for section in SECTIONS}
    for key in FIELDS:
        if "." in key:
            value = get(config, key)
            made[key.partition(".")[0]][short(key)] = _plain(value)
    return made


def _plain(value: Any) -> Any:
    """Return a key's value in its JSON form."""
    if isinstance(value, Placement):
        return str(value)
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value


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
