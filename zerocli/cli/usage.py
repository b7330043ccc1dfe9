"""What to say of words that click does not take: the flag or key that was probably meant, as a command to paste."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import click
from click.exceptions import NoSuchOption

from offload.placement import Placement
from zerocli.cli import other_programs
from zerocli.config.schema import FIELDS, short
from zerocli.console import quoted
from zerocli.errors import USAGE, ConfigError, Problem, UserError, closest

_ASSIGNMENT = re.compile(r"(-{0,2})([a-z_]+\.)?([a-z_]+)=(.*)", re.DOTALL)
_LINE = re.compile(r"(.+?):(\d+): ")
"""FILE:LINE before a fact."""
_UNIT = re.compile(r"[KMGT]i?B|[KMBT]")
_VALUE = re.compile(r" is (not (?!one of \d+ layers)|below |above |beyond 64)")
"""In a fact about one value, not about a relation between two keys."""
_WHOLE = "zerocli configs show tiny, which is a whole config: its sections and keys"
# Flag -> a value that is right, where the default of its key is none.
_EXAMPLES = {
    "--offload": "cpu, or --offload params=cpu,optimizer=nvme",
    "--precision": "bf16",
    "--stage": "3",
    **dict.fromkeys(("--tp", "--shard-ranks", "--ranks"), "2"),
    "--epochs": "1",
    "--save-every": "100, or 0.25 of the run, or never",
    "--eval-every": "100, or 0.1 of the run",
    "--check": "10",
    "--top-k": "40",
    "--top-p": "0.9",
    "--temperature": "0.7",
    "--price": "2.5",
    "--gpu-memory": "80GiB",
    "--host-memory": "512GiB",
    "--nvme-space": "4TiB",
    "--hardware": "h100, or --hardware h100,h200",
    "--tokens": "1T",
    "--lora": "16, or --lora 16:q_proj,v_proj",
    "--base": "nf4",
    "--file-size": "5GB",
    "--set": "SECTION.KEY=VALUE",
    **dict.fromkeys(("--data", "--html"), "FILE"),
    **dict.fromkeys(("--run-dir", "--init-from", "--nvme-path"), "DIR"),
}
_SHARES = {"data.split": "0.05", "optimizer.warmup": "0.03", "train.eval_every": "0.1", "checkpoint.every": "0.25"}
_PLACE = re.compile(r"(--[a-z-]+) ?")


def explain(error: click.UsageError, args: Sequence[str], commands: Iterable[str]) -> tuple[str, str]:
    """Return the message and the hint for words that a command does not take."""
    message = error.format_message()
    path = error.ctx.command_path if error.ctx else command_path(args, commands)
    found = ""
    if isinstance(error, NoSuchOption):
        message = f"No such option: {error.option_name}"
        found = _option(error, args, path) if path != "zerocli" else _first_option(error.option_name, args, commands)
    elif isinstance(error, click.MissingParameter) and error.ctx is not None:
        words = [each.make_metavar(error.ctx) for each in error.ctx.command.params if isinstance(each, click.Argument)]
        found = f"{path} {' '.join(words)}"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        found = _right_value(error.param, path)
    elif isinstance(error, click.BadOptionUsage) and (example := _example(error.option_name)):
        found = f"{path} {error.option_name} {example}"
    elif extra := re.search(r"unexpected extra arguments? \((.*)\)", message):
        found = _extra(extra[1].split(), args, path)
    elif message.startswith("there is no command help") and len(args) > 1:
        return message, f"zerocli {args[1]} --help"
    elif message.startswith("there is no command") and "did you mean" not in message:
        found = _command(args)
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
        return "\n".join(dict.fromkeys(_after(problem) or f"{path} --help" for problem in error.problems))
    if (flag := _PLACE.match(str(error))) and (example := _example(flag[1])):
        return f"{flag[1]} {example}"
    if (found := _LINE.match(str(error))) and os.path.isfile(found[1]):
        return f"sed -n {found[2]}p {quoted(found[1])}, which shows the line; docs/data.md has the formats"
    return f"{path} --help"


def _after(problem: Problem) -> str:
    """Return what to try after one problem of a config; empty if nothing is known."""
    if problem.hint or problem.suggestion.startswith("--"):
        return problem.hint or problem.suggestion
    key, equals, value = problem.place.removeprefix("--set ").partition("=")
    given = problem.place.startswith("--set ")
    if given and "." in problem.suggestion:
        return f"--set {problem.suggestion}" + ("" if "=" in problem.suggestion else f"={value or '...'}")
    if given and not equals:
        name, _, rest = key.replace(":", " ").partition(" ")
        keys = _keys(name)
        return f"--set {keys[0]}={rest or as_text(FIELDS[keys[0]])}" if keys else _WHOLE
    if given and key not in FIELDS:
        return _WHOLE
    if given:
        choices = [
            each for each in FIELDS[key].metadata.get("choices", ()) if str(each) and value.startswith(str(each))
        ]
        text = problem.suggestion or (str(choices[0]) if choices else _SHARES.get(key) or as_text(FIELDS[key]))
        return f"--set {key}={text}" if _VALUE.search(problem.fact) else f"the same without {problem.place}"
    if flag := _PLACE.match(problem.place):
        return f"{flag[1]} {problem.suggestion or _example(flag[1])}" if _example(flag[1]) else ""
    named = [field for key, field in FIELDS.items() if short(key) == problem.fact.split()[0]]
    if _VALUE.search(problem.fact) and len(named) == 1:
        return f"{problem.fact.split()[0]} = {json.dumps(_plain(named[0]))}, such as in zerocli configs show tiny"
    return _WHOLE


def _first_option(name: str, args: Sequence[str], commands: Iterable[str]) -> str:
    """Return the command that takes an option which stands before any command."""
    meant = closest(name.lstrip("-"), commands)
    return f"zerocli {meant}" if meant else f"zerocli train {shlex.join(args)}" if name.startswith("--") else ""


def _command(args: Sequence[str]) -> str:
    """Return our command for another program's; of a model or a config, the command that trains it."""
    word = args[0]
    if ours := other_programs.COMMANDS.get(word.lower()):
        rest = shlex.join(args[1:]) if ours == "train" and args[1:2] not in (["run"], ["train"]) else ""
        return f"zerocli {ours} {rest}".rstrip()
    return f"zerocli train {shlex.join(args)}" if os.path.exists(word) or args[1:2] == ["--data"] else ""


def _right_value(param: click.Parameter, path: str) -> str:
    """Return the command with a value that an option or argument takes."""
    default = param.type.choices[0] if isinstance(param.type, click.Choice) else param.default
    usual = str(default) if isinstance(default, int | float | str) else ""
    example = _EXAMPLES.get(param.opts[0]) or usual or _example(param.opts[0])
    name = f"{param.opts[0]} " if isinstance(param, click.Option) else ""
    return f"{path} {name}{example}" if example else ""


def _example(flag: str) -> str:
    """Return a value that a flag takes; empty if none is known."""
    from zerocli.cli.train import KEYS

    if flag in _EXAMPLES:
        return _EXAMPLES[flag]
    key = KEYS.get(flag.lstrip("-").replace("-", "_"), "")
    return as_text(FIELDS[key]) if key and not isinstance(FIELDS[key].default, str | tuple) else ""


def _plain(field: dataclasses.Field[Any]) -> Any:
    value = field.default if field.default is not dataclasses.MISSING else {}
    return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Placement) else value


def as_text(field: dataclasses.Field[Any]) -> str:
    """Return a value that a key takes, as `--set` takes it: its default, or what a text may be."""
    choices = [each for each in field.metadata.get("choices", field.metadata.get("each", ())) if each != ""]
    value = _plain(field)
    if not value and isinstance(value, str | list) and choices:
        value = choices[0]
    if "example" in field.metadata and (not value or isinstance(value, str)):
        value = value or field.metadata["example"]
    if isinstance(value, list):
        return ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


def _option(error: NoSuchOption, args: Sequence[str], path: str) -> str:
    """Return what an unknown option is called here, with the value that was given; empty if nothing is known."""
    from zerocli.cli.train import KEYS

    name, equals, value = error.option_name.lstrip("-").lower().partition("=")
    name = name.replace("_", "-")
    at = next((n for n, word in enumerate(args) if word.partition("=")[0] == error.option_name), len(args))
    after = args[at].partition("=")[2] if at < len(args) else ""
    if not after and at + 1 < len(args) and not args[at + 1].startswith("-"):
        after = args[at + 1]
    there = {name for param in error.ctx.command.params for name in param.opts} if error.ctx else set()
    if name.isdigit():  # a negative number or count
        return f"{path} {next((word.lstrip('-') for word in args if word.startswith(error.option_name)), name)}"
    if f"--{name}" in there:
        return f"{path} --{name} {after}".rstrip()
    ours = other_programs.ours(name)
    if not ours and "--set" in there:
        same = KEYS.get(name.replace("-", "_")) or (_keys(name.replace("-", "_"), 0.8) or [""])[0]
        ours = f"--set {same}=" if same else ""
    near = difflib.get_close_matches(f"--{name}", there, n=1, cutoff=0.75)
    if near and not ours.startswith("--set"):
        ours = ours or near[0]
    ours = ours or other_programs.without_counterpart(name)
    if ours.startswith("--") and ours.split()[0].rstrip(",") in there:
        return f"{path} {_with_value(ours, after)}"
    return "" if ours.startswith("--") else ours


def _with_value(ours: str, value: str) -> str:
    """Return a flag with the value that was given to another program's, where it takes one."""
    if ours.endswith("="):
        field = FIELDS[ours.removeprefix("--set ").rstrip("=")]
        return f"{ours}{value or ('true' if field.type is bool else as_text(field))}"
    return f"{ours} {quoted(value)}" if value and (" " not in ours or ours.endswith("--run-dir")) else ours


def _keys(name: str, cutoff: float = 0.6) -> list[str]:
    """Return the config keys of this name, or the nearest one."""
    if name in FIELDS:
        return [name]
    exact = [key for key in FIELDS if "." in key and short(key) == name]
    if exact:
        return exact
    near = difflib.get_close_matches(name, [short(key) for key in FIELDS if "." in key], n=1, cutoff=cutoff)
    return [key for key in FIELDS if "." in key and short(key) == near[0]][:1] if near else []


def _extra(words: list[str], args: Sequence[str], path: str) -> str:
    """Return the command for a further word: `key=value` goes after --set, data after --data, a unit to its number."""
    before = args[args.index(words[0]) - 1] if words[0] in args[1:] else ""
    if _UNIT.fullmatch(words[0]) and before[:1].isdigit():
        flag = args[args.index(words[0]) - 2]
        return f"{path} {flag + ' ' if flag.startswith('--') else ''}{before}{words[0]}"
    if before and args[args.index(before) - 1] == "--set" and "=" not in before and (keys := _keys(before.lstrip("-"))):
        return f"{path} --set {keys[0]}={words[0]}"
    for word in words:
        found = _ASSIGNMENT.fullmatch(word)
        if found:
            _, section, name, value = found.groups()
            keys = [f"{section}{name}"] if section else _keys(name)
            if keys:
                return f"{path} --set {keys[0]}={value}"
        if word.endswith((".txt", ".jsonl", ".parquet", ".bin", ".npy")):
            return f"{path} --data {word}"
    if path.endswith(" generate"):
        return f'{path} RUN "{before} {" ".join(words)}", as one word in quotes'
    if path.endswith(" profile"):
        return f"{path} RUN_A RUN_B: at most two runs are compared"
    return f"{path} {words[0]}" if path.endswith((" train", " check", " fit")) and words else path
