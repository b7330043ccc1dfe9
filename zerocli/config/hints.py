"""What to say of a CONFIG or MODEL that cannot be read: what it probably is, and the next command."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence

from zerocli.console import quoted
from zerocli.errors import ConfigError, Problem, UserError, closest
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular

LIST = "zerocli configs ls"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")


_GGUF = "is GGUF: weights in few bits for inference, which are not trained"
_ADAPTER = "holds an adapter (adapter_config.json), which is no model without its base"
DOWNLOAD = "hf download OWNER/NAME --local-dir NAME, of the model in safetensors; then zerocli train ./NAME --data FILE"


def with_base(folder: str, command: str = "zerocli train {base} --lora {folder} --data FILE") -> str:
    """Return a command that takes an adapter and its base, as far as it says which; by default, one that goes on."""
    base = "BASE"
    with contextlib.suppress(OSError, ValueError, UserError):
        values = json.loads(read_regular(os.path.join(folder, "adapter_config.json"), MAX_CONFIG_NBYTES))
        found = values.get("base_model_name_or_path") if isinstance(values, dict) else None
        base = found if isinstance(found, str) and os.path.isdir(found) else base
    return command.format(base=quoted(base), folder=quoted(folder))


def unknown_source(source: str, names: Sequence[str]) -> ConfigError:
    """Return the error for a source that is no bundled name (`names`), no .toml, no .json and no factory."""
    if os.path.isdir(source):
        fact, meant, hint = _folder(source)
    elif os.path.isfile(source):
        fact, meant, hint = _file(source)
    elif os.path.exists(source):
        fact, meant, hint = "is neither a file nor a folder", "", LIST  # a device, a pipe, a socket
    elif os.path.islink(source):
        fact, meant, hint = f"is a link to {os.readlink(source)}, which does not exist", "", LIST
    else:
        fact, meant, hint = _nowhere(source, names)
    return ConfigError([Problem(source or '""', fact, meant)], hint=hint)


def other_json(path: str, values: Mapping[str, object]) -> ConfigError | None:
    """Return the error for a JSON object that is a tokenizer's or DeepSpeed's; None if it may be a config."""
    if os.path.basename(path) in _TOKENIZER or "added_tokens" in values:
        tokenizer = f"zerocli train CONFIG --set data.tokenizer={quoted(path)}"
        return ConfigError([Problem(path, "is a tokenizer, not a config")], hint=tokenizer)
    if "zero_optimization" in values or "train_micro_batch_size_per_gpu" in values:
        hint = f"zerocli train CONFIG --deepspeed {quoted(path)}"
        return ConfigError([Problem(path, "is a config of DeepSpeed, which names no model")], hint=hint)
    return None


def _folder(source: str) -> tuple[str, str, str]:
    inside = set(os.listdir(source)) if os.access(source, os.R_OK) else set()
    if "adapter_config.json" in inside:
        return _ADAPTER, "", with_base(source)
    if any(name.lower().endswith(".gguf") for name in inside):
        return _GGUF, "", DOWNLOAD
    inner = os.path.join(source, "config.json")
    if os.path.isfile(inner):
        return "is a folder, not a config file", inner, LIST
    tokenizer = next((name for name in _TOKENIZER if name in inside), "")
    if tokenizer == "tokenizer.json":
        path = quoted(os.path.join(source, tokenizer))
        return (
            "is a tokenizer's folder: it has no config.json, so it is no model",
            "",
            f"zerocli train CONFIG --set data.tokenizer={path}",
        )
    if tokenizer:
        return f"has {tokenizer} and no config.json, so it is no model", "", LIST
    if any(name.endswith(_WEIGHTS) for name in inside):
        return (
            "holds weights and no config.json, so the model's shape is not known",
            "",
            f"copy the model's config.json to {quoted(source)}; or zerocli train CONFIG --init-from {quoted(source)}",
        )
    return "is a folder without a config.json, so it is no model", "", LIST


def _file(source: str) -> tuple[str, str, str]:
    lowered = source.lower()
    if lowered.endswith(".gguf"):
        return _GGUF, "", DOWNLOAD
    if lowered.endswith(_WEIGHTS):
        folder = quoted(os.path.dirname(source) or ".")
        return "holds weights; a model is named by its config", "", f"zerocli train CONFIG --init-from {folder}"
    if lowered.endswith((".txt", ".jsonl", ".parquet", ".csv", ".npy")):
        return "is data, not a config", "", f"zerocli train tiny --data {quoted(source)}"
    if lowered.endswith(".py"):
        module = os.path.splitext(source)[0].strip("./").replace("/", ".")
        return "is Python code; a model in it is named as module:function", "", f"zerocli train {module}:FUNCTION"
    return "is neither a .toml, .yaml nor .json file", "", LIST


def _nowhere(source: str, names: Sequence[str]) -> tuple[str, str, str]:
    meant = closest(source, names)
    if source.lower().endswith((".yaml", ".yml")):
        return "no such file", _beside(source), LIST
    if "=" in source:
        return "is key=value, which belongs after --set", "", f"--set {quoted(source)}, after a CONFIG or none (tiny)"
    if "://" in source:
        return "is an address, and zerocli downloads nothing", "", f"hf download OWNER/NAME --local-dir NAME\n{LIST}"
    if _HUB_ID.fullmatch(source) and not source.startswith((".", "runs/")):
        name = source.rpartition("/")[2]
        return (
            "no such folder; zerocli does not download models from the Hugging Face hub",
            "",
            f"hf download {source} --local-dir {name}, then the same command with ./{name}",
        )
    if re.fullmatch(r"[\d.]+[KMBT]", source):
        return "is a number of parameters; a model to train needs a shape", "", f"zerocli fit {source}\n{LIST}"
    if ":" in source:
        return "is no factory: write package.module:function", "", "zerocli train package.module:function"
    if source.startswith((".", "/", "~")) or source.endswith("/"):
        return "there is no such file or folder", _beside(source), LIST
    return f"no bundled config has this name; there are {', '.join(names) or 'none'}", meant, LIST


def _beside(source: str) -> str:
    """Return the name beside `source` that was probably meant, with its path."""
    folder, name = os.path.split(source.rstrip("/"))
    try:
        found = closest(name, os.listdir(folder or "."))
    except OSError:
        return ""
    return os.path.join(folder, found) if found else ""
