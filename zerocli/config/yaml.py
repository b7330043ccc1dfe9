"""YAML configs, read by PyYAML if it is installed; and what to type for one that another trainer reads.

Only plain values are made (as of `yaml.safe_load`): no tag of a file makes an object or runs code.
"""

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from zerocli.console import quoted
from zerocli.errors import ConfigError, Problem

SUFFIXES = (".yaml", ".yml")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")
"""Numbers such as 1e-4, which YAML 1.1 takes for text."""


def read_yaml(path: str, text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sections of a YAML config and the place of every key; ConfigError if it is no config of ours."""
    if foreign := other_trainer(text):
        trainer, command = foreign
        fact = f"is a config of {trainer}; zerocli takes the model's folder, the data and a few flags"
        raise ConfigError([Problem(path, fact)], hint=command)
    if importlib.util.find_spec("yaml") is None:
        raise ConfigError([Problem(path, "is YAML, and PyYAML is not installed")], hint=_INSTALL)
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """safe_load, and numbers with an exponent."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    try:
        aliased = [token for token in yaml.scan(text) if isinstance(token, yaml.AliasToken)]
        if aliased:  # a few of them within each other could stand for billions of values
            line = aliased[0].start_mark.line + 1
            raise ConfigError([Problem(f"{path}:{line}", f"*{aliased[0].value}: aliases are not read")], hint=_COPY)
        root = yaml.compose(text, Loader=Loader)
        values = yaml.load(text, Loader=Loader)  # noqa: S506, a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        fact = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise ConfigError([Problem(place, f"YAML syntax: {fact}")], hint=_COPY) from None
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError([Problem(path, f"cannot be read as YAML: {why}")], hint=_COPY) from None
    if values is None:
        return {}, {}
    if not isinstance(values, dict):
        raise ConfigError([Problem(path, "holds no sections with keys")], hint=_COPY)
    places: dict[str, str] = {}
    for key, line in _key_lines(root):
        if key in places:
            raise ConfigError([Problem(f"{path}:{line}", f"{key} is there twice; first at {places[key]}")], hint=_COPY)
        places[key] = f"{path}:{line}"
    return {str(key): value for key, value in values.items()}, places


_INSTALL = "pip install pyyaml, or a .toml in its place"
_COPY = "zerocli configs show tiny, which is a whole config in TOML; YAML has the same sections and keys"


def _key_lines(node: Any, before: str = "") -> Iterator[tuple[str, int]]:
    """Yield each dotted key of a composed document and its line, in order."""
    if isinstance(node.value, list) and node.id == "mapping":
        for key, value in node.value:
            name = f"{before}{key.value}"
            yield name, key.start_mark.line + 1
            yield from _key_lines(value, f"{name}.")


_TAKEN = (
    *("lora_r", "lora_rank", "learning_rate", "num_epochs", "num_train_epochs", "max_steps", "epochs"),
    *("max_steps_per_epoch", "batch_size", "micro_batch_size", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "sequence_len", "cutoff_len", "output_dir", "seed"),
)
"""Keys of axolotl, LLaMA-Factory or a Trainer that a flag says too, in the order of the flags."""
_OWN = {"epochs": "--epochs", "max_steps_per_epoch": "--steps", "output_dir": "--run-dir", "seed": "--seed"}
"""The flags of those that `draft.OTHER_NAMES` does not have."""
_TRAINERS = {
    "base_model": "axolotl",
    "model_name_or_path": "LLaMA-Factory",
    "distributed_type": "accelerate",
    "compute_environment": "accelerate",
}


def other_trainer(text: str) -> tuple[str, str] | None:
    """Return whose YAML config a text is and the command that trains the same, as far as flags say it; else None."""
    values = dict(re.findall(r"(?m)^(\w+): *([^\s#]+)", text))
    trainer = next((name for key, name in _TRAINERS.items() if key in values), "")
    if not trainer and "_component_: torchtune" in text:
        trainer = "torchtune"
    if not trainer:
        return None
    if trainer == "torchtune":  # one level down, in sections that name code
        inner = dict(re.findall(r"(?m)^ +(lr|checkpoint_dir|max_seq_len): *([^\s#]+)", text))
        found = {"learning_rate": "lr", "base_model": "checkpoint_dir", "sequence_len": "max_seq_len"}
        values |= {ours: inner[theirs] for ours, theirs in found.items() if inner.get(theirs, "null") != "null"}
    model = values.get("base_model") or values.get("model_name_or_path") or "FOLDER"
    from zerocli.config.draft import OTHER_NAMES, flag_of  # imports this module

    flags = {key: _OWN.get(key) or flag_of(OTHER_NAMES[key]) for key in _TAKEN if key in values}
    words = [word for key, flag in flags.items() for word in (flag, values[key].strip("'\""))]
    name = model.strip("'\"").rstrip("/").rpartition("/")[2]
    return trainer, " ".join(["zerocli train", quoted(f"./{name}"), "--data FILE", *map(quoted, words)])
