"""YAML files, which are no configs here: what the same is as TOML, or as flags if another trainer reads the file."""

import json
import re
import tomllib

from zerocli.console import quoted
from zerocli.errors import ConfigError, Problem


def yaml_error(path: str, text: str) -> ConfigError:
    """Return the error for a YAML file, with its keys as TOML if it is as simple as a config of ours."""
    if foreign := other_trainer(text):
        trainer, command = foreign
        fact = f"is a config of {trainer}; zerocli takes the model's folder, the data and a few flags"
        return ConfigError([Problem(path, fact)], hint=command)
    target = f"{path.rpartition('.')[0]}.toml"
    lines = [f"  {line}" for line in as_toml(text)]
    fact = f"is YAML, and configs are TOML; as {target} it is:" if lines else "is YAML, and configs are TOML"
    hint = (
        f"zerocli train {target}, once that file is there" if lines else "zerocli configs cp tiny . is one to copy from"
    )
    return ConfigError([Problem(path, "\n".join([fact, *lines]))], hint=hint)


# Key of axolotl, LLaMA-Factory or a Trainer -> the flag that says the same.
_FLAGS = {
    "learning_rate": "--lr",
    "num_epochs": "--epochs",
    "num_train_epochs": "--epochs",
    "max_steps": "--steps",
    "micro_batch_size": "--batch",
    "per_device_train_batch_size": "--batch",
    "gradient_accumulation_steps": "--accumulate",
    "sequence_len": "--seq",
    "cutoff_len": "--seq",
    "output_dir": "--run-dir",
    "seed": "--seed",
}
_TRAINERS = {"base_model": "axolotl", "model_name_or_path": "LLaMA-Factory"}


def other_trainer(text: str) -> tuple[str, str] | None:
    """Return whose YAML config a text is and the command that trains the same, as far as flags say it; else None."""
    values = dict(re.findall(r"(?m)^(\w+): *([^\s#]+)", text))
    trainer = next((name for key, name in _TRAINERS.items() if key in values), "")
    if not trainer and "_component_: torchtune" in text:
        trainer = "torchtune"
    if not trainer:
        return None
    model = values.get("base_model") or values.get("model_name_or_path") or "FOLDER"
    words = [word for key, flag in _FLAGS.items() if key in values for word in (flag, values[key].strip("'\""))]
    name = model.strip("'\"").rstrip("/").rpartition("/")[2]
    return trainer, " ".join(["zerocli train", quoted(f"./{name}"), "--data FILE", *map(quoted, words)])


_YAML_LINE = re.compile(r"( *)([\w-]+) *:(?: +(.*?))? *")


def as_toml(text: str) -> list[str]:
    """Return YAML of sections with plain keys as lines of TOML; nothing if it holds anything else."""
    made: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line or line == "---":
            continue
        found = _YAML_LINE.fullmatch(line)
        if found is None:
            return []
        indent, key, value = found.groups()
        if value is None and not indent:
            made.append(f"[{key}]")
        elif value is None:
            return []
        else:
            try:
                tomllib.loads(f"value = {value}")
            except ValueError:
                value = json.dumps(value.strip("'"))
            made.append(f"{key} = {value}")
    return made
