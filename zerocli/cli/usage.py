"""What to say of words that click does not take: the flag or key that was probably meant, as a command to paste."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import click
from click.exceptions import NoSuchOption

from zerocli.config.schema import FIELDS, short
from zerocli.errors import USAGE, ConfigError, UserError, closest

_ADAPTERS = "without it all parameters are trained; zerocli fit MODEL --lora 16 plans adapters, which train has not yet"
_QUANTIZED = "weights are trained as they are, not in 4 or 8 bits; --auto and --offload cpu need less memory"
# Names that other programs use for the same thing -> ours.
_ELSEWHERE = {
    "batch-size": "--batch",
    "per-device-train-batch-size": "--batch",
    "micro-batch-size": "--batch",
    "bs": "--batch",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "fp32": "--precision fp32",
    "mixed-precision": "--precision",
    "dtype": "--precision",
    "checkpoint-every": "--save-every",
    "save-steps": "--save-every",
    "eval-steps": "--eval-every",
    "num-train-epochs": "--epochs",
    "checkpoint-dir": "--run-dir",
    "config": "CONFIG as a word of its own: zerocli train tiny",
    "config-file": "CONFIG as a word of its own: zerocli train my.toml",
    "model": "CONFIG as a word of its own: zerocli train tiny",
    "model-name-or-path": "CONFIG as a word of its own: zerocli train ./folder",
    "context-length": "--seq",
    "max-seq-len": "--seq",
    "max-seq-length": "--seq",
    "seq-len": "--seq",
    "seq-length": "--seq",
    "sequence-length": "--seq",
    "cpu-offload": "--offload cpu",
    "offload-optimizer": "--offload optimizer=cpu",
    "offload-param": "--offload params=cpu",
    "dataset": "--data",
    "data-path": "--data",
    "gpus": "--ranks",
    "num-gpus": "--ranks",
    "nproc": "--ranks",
    "nproc-per-node": "--ranks",
    "num-processes": "--ranks",
    "world-size": "--ranks",
    "gradient-accumulation-steps": "--accumulate",
    "gradient-checkpointing": "--set activations.policy=recompute",
    "grad-clip": "--set train.clip=",
    "max-grad-norm": "--set train.clip=",
    "learning-rate": "--lr",
    "max-length": "--seq",
    "max-len": "--seq",
    "cutoff-len": "--seq",
    "sequence-len": "--seq",
    "grad-accum": "--accumulate",
    "gradient-accumulation": "--accumulate",
    "optimizer": "--set optimizer.name=",
    "optim": "--set optimizer.name=",
    "num-epochs": "--epochs",
    "epoch": "--epochs",
    "warmup-ratio": "--set optimizer.warmup=",
    "lr-scheduler-type": "--set optimizer.schedule=",
    "lr-scheduler": "--set optimizer.schedule=",
    "val-set-size": "--set data.split=",
    "train-file": "--data",
    "lora": _ADAPTERS,
    "qlora": _ADAPTERS,
    "peft": _ADAPTERS,
    "adapter": _ADAPTERS,
    "lora-r": _ADAPTERS,
    "lora-rank": _ADAPTERS,
    "lora-alpha": _ADAPTERS,
    "load-in-4bit": _QUANTIZED,
    "load-in-8bit": _QUANTIZED,
    "quantization": _QUANTIZED,
    "warmup-steps": "--set optimizer.warmup=",
    "log-interval": "--set train.log_every=",
    "logging-steps": "--set train.log_every=",
    "max-steps": "--steps",
    "num-steps": "--steps",
    "output": "--run-dir",
    "output-dir": "--run-dir",
    "out": "--run-dir",
    "resume-from-checkpoint": "--resume --run-dir",
    "zero": "--stage",
    "zero-stage": "--stage",
    "tensor-parallel": "--tp",
    "tensor-parallel-size": "--tp",
    "compile": "--set model.compile=true",
    "vram": "--gpu-memory",
    "gpu-mem": "--gpu-memory",
    "ram": "--host-memory",
    "quiet": "2>/dev/null, which hides what goes to stderr",
    "verbose": "zerocli --debug, before the command, for tracebacks",
    "force": "another folder: nothing is overwritten",
}
_ASSIGNMENT = re.compile(r"(-{0,2})([a-z_]+\.)?([a-z_]+)=(.*)", re.DOTALL)


# Flag -> a value that is right, for an error that names none.
_EXAMPLES = {
    "--offload": "--offload cpu, or --offload params=cpu,optimizer=nvme",
    "--precision": "--precision bf16",
    "--stage": "--stage 3",
    "--tp": "--tp 2",
    "--ranks": "--ranks 2",
    "--gpu-memory": "--gpu-memory 80GiB",
    "--host-memory": "--host-memory 512GiB",
    "--nvme-space": "--nvme-space 4TiB",
    "--hardware": "--hardware h100, or --hardware h100,h200",
    "--tokens": "--tokens 1T",
    "--lora": "--lora 16, or --lora 16:q,v",
    "--file-size": "--file-size 5GB",
}
_PLACE = re.compile(r"(--[a-z-]+) ?")


def explain(error: click.UsageError, args: Sequence[str], commands: Iterable[str]) -> tuple[str, str]:
    """Return the message and the hint for words that a command does not take."""
    message = error.format_message()
    path = error.ctx.command_path if error.ctx else command_path(args, commands)
    found = ""
    if isinstance(error, NoSuchOption):
        found = _option(error, path)
        if found:
            message = f"No such option: {error.option_name}"
        elif path == "zerocli" and (meant := closest(error.option_name.lstrip("-"), commands)):
            found, message = f"zerocli {meant}", f"No such option: {error.option_name}"
    elif extra := re.search(r"unexpected extra arguments? \((.*)\)", message):
        found = _extra(extra[1].split(), path)
    elif message.startswith("there is no command help") and len(args) > 1:
        return message, f"zerocli {args[1]} --help"
    return message, f"{found}\n{path} --help" if found else f"{path} --help"


def command_path(args: Sequence[str], commands: Iterable[str]) -> str:
    """Return `zerocli` and the command among the words, if there is one."""
    return f"zerocli {args[0]}" if args and args[0] in set(commands) else "zerocli"


def way_on(error: UserError, args: Sequence[str], commands: Iterable[str]) -> str:
    """Return the hint of a user's error; if it has none, the nearest correct words, or the command's help."""
    if error.hint or error.exit_code != USAGE:
        return error.hint
    path = command_path(args, commands)
    if isinstance(error, ConfigError):
        hints = []
        for problem in error.problems:
            if problem.suggestion.startswith("tp "):
                ranks = re.search(r"tp (\d+) does not divide ranks (\d+)", problem.fact)
                more = f", or --ranks {-(-int(ranks[2]) // int(ranks[1])) * int(ranks[1])}" if ranks else ""
                hints.append(f"--{problem.suggestion}{more}")
                continue
            if problem.place.startswith("--set ") and "." in problem.suggestion:
                hints.append(f"--set {problem.suggestion}={problem.place.partition('=')[2] or '...'}")
            elif problem.place.startswith("--set "):
                hints.append("zerocli configs show tiny, which shows sections and keys")
            elif flag := _PLACE.match(problem.place):
                hints.append(_EXAMPLES.get(flag[1], f"{path} --help"))
            else:
                hints.append("zerocli configs show tiny, which is a whole config")
        return "\n".join(dict.fromkeys(hints))
    flag = _PLACE.match(str(error))
    return _EXAMPLES.get(flag[1], f"{path} --help") if flag else f"{path} --help"


def _option(error: NoSuchOption, path: str) -> str:
    """Return what an unknown option is called here; empty if nothing is known."""
    name = error.option_name.lstrip("-").partition("=")[0].lower().replace("_", "-")
    there = _flags(error.ctx)
    if f"--{name}" in there:
        return f"{path} --{name}"
    ours = _ELSEWHERE.get(name, "")
    if ours.startswith("--set") and "--set" in there:
        return f"{path} {ours}{'...' if ours.endswith('=') else ''}"
    if ours and (not ours.startswith("--") or ours.split()[0] in there):
        return f"{path} {ours}" if ours.startswith("--") else ours
    keys = _keys(name.replace("-", "_"))
    exact = any(short(key) == name.replace("-", "_") for key in keys)
    if keys and "--set" in there and (exact or not error.possibilities):
        return f"{path} --set {keys[0]}=..."
    return ""


def _flags(ctx: click.Context | None) -> set[str]:
    return {name for param in ctx.command.params for name in param.opts} if ctx else set()


def _keys(name: str) -> list[str]:
    """Return the config keys of this name, or the nearest one."""
    if name in FIELDS:
        return [name]
    exact = [key for key in FIELDS if "." in key and short(key) == name]
    if exact:
        return exact
    near = closest(name, [short(key) for key in FIELDS if "." in key])
    return [key for key in FIELDS if "." in key and short(key) == near][:1] if near else []


def _extra(words: list[str], path: str) -> str:
    """Return the command for a further word: `key=value` belongs after --set, data after --data."""
    for word in words:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            _, section, name, value = found.groups()
            keys = [f"{section}{name}"] if section else _keys(name)
            if keys:
                return f"{path} --set {keys[0]}={value}"
        if word.endswith((".txt", ".jsonl", ".parquet", ".bin", ".npy")):
            return f"{path} --data {word}"
    return f"{path} {words[0]}" if path.endswith((" train", " check", " fit")) and words else ""
