"""`zerocli completion SHELL`, and the values that a shell completes: configs, placements, hardware, config keys.

Nothing here imports torch: a shell waits for each answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ZshComplete, add_completion_class

from zerocli.config.file import bundled
from zerocli.config.schema import FIELDS
from zerocli.plan.time.hardware import ALIASES, PRESETS

FILES = {"data", "html", "trace_file", "snapshot", "compare", "deepspeed", "eval_data"}
FOLDERS = {"run_dir", "init_from", "nvme_path", "run", "out", "folder", "other"}
PRECISIONS = ("auto", "bf16", "fp16", "fp32")
PLACEMENTS = (
    ("none", "everything in GPU memory"),
    ("cpu", "parameters, gradients and optimizer states in host memory"),
    ("optimizer=cpu", "optimizer states in host memory"),
    ("optimizer=nvme", "optimizer states on disk"),
    ("params=cpu,optimizer=cpu", "parameters and optimizer states in host memory"),
    ("params=cpu,optimizer=nvme", "parameters in host memory, optimizer states on disk"),
    ("params=nvme,optimizer=nvme", "parameters and optimizer states on disk"),
    ("optimizer=hbm:20GiB+cpu", "20 GiB of optimizer states in GPU memory, the rest in host memory"),
    ("activations=cpu", "checkpoints of blocks in host memory"),
)
BOOLEANS = (True, False)


class Values(click.types.StringParamType):
    """A type that converts nothing and completes from a function."""

    def __init__(self, complete: Callable[[str], Iterable[CompletionItem]]) -> None:
        self._complete = complete

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return list(self._complete(incomplete))


def attach(command: click.Command) -> click.Command:
    """Give the parameters of a command what completes their values, by their names; only for completion."""
    for param in command.params:
        complete = COMPLETE.get(str(param.name))
        if complete is not None:
            param.type = Values(complete)
        elif param.name in FILES:
            param.type = click.Path()
        elif param.name in FOLDERS:
            param.type = click.Path(file_okay=False)
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            attach(inner)
    return command


def _plain(words: Iterable[tuple[str, str]], incomplete: str) -> Iterator[CompletionItem]:
    for word, about in words:
        if word.startswith(incomplete):
            yield CompletionItem(word, help=about or None)


def configs(incomplete: str) -> Iterator[CompletionItem]:
    """Yield bundled configs, then files and folders."""
    yield from _plain(((name, sentence) for name, sentence, _ in bundled()), incomplete)
    yield CompletionItem(incomplete, type="file")


def names(incomplete: str) -> Iterator[CompletionItem]:
    """Yield the names of bundled configs alone."""
    yield from _plain(((name, sentence) for name, sentence, _ in bundled()), incomplete)


def hardware(incomplete: str) -> Iterator[CompletionItem]:
    """Yield names of machines; after a comma, another one."""
    before, comma, last = incomplete.rpartition(",")
    for name in (*PRESETS, *ALIASES):
        if name.startswith(last.lower()):
            yield CompletionItem(f"{before}{comma}{name}")


def keys(incomplete: str) -> Iterator[CompletionItem]:
    """Yield config keys with their `=`, and after it the values that a key takes."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        yield from (CompletionItem(f"{each}=") for each in FIELDS if "." in each and each.startswith(incomplete))
        return
    field = FIELDS.get(key)
    if field is not None:
        yield from (CompletionItem(f"{key}={each}") for each in values_of(key, field) if each.startswith(value))


def values_of(key: str, field: Any) -> tuple[str, ...]:
    """Return the values of a config key, if they are few."""
    if key == "offload.placement":
        return tuple(word for word, _ in PLACEMENTS)
    choices = field.metadata.get("choices", BOOLEANS if field.type in (bool, "bool") else ())
    return tuple(str(each).lower() if isinstance(each, bool) else str(each) for each in choices)


COMPLETE: dict[str, Callable[[str], Iterable[CompletionItem]]] = {
    "source": configs,
    "model": configs,
    "name": names,
    "offload": lambda text: _plain(PLACEMENTS, text),
    "precision": lambda text: _plain(((name, "") for name in PRECISIONS), text),
    "stage": lambda text: _plain(
        (("0", "nothing split"), ("1", "optimizer states"), ("2", "+ gradients"), ("3", "+ parameters")), text
    ),
    "hardware": hardware,
    "sets": keys,
}
"""Parameter's name -> what completes it."""


class Bash(BashComplete):
    """Bash cuts words at `=` and `:`; the function joins them again and answers with what is left of a value."""

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' line words cword cur part response completion type value
    line="${COMP_LINE:0:COMP_POINT}"
    IFS=$' \\t\\n' read -ra words <<< "$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    cword=$((${#words[@]} - 1))
    cur="${words[cword]}"
    part="${COMP_WORDS[COMP_CWORD]}"
    [[ "$part" == "=" || "$part" == ":" ]] && part=""
    response=$(env COMP_WORDS="$line" COMP_CWORD="$cword" %(complete_var)s=bash_complete $1)
    COMPREPLY=()
    for completion in $response; do
        IFS=',' read -r type value <<< "$completion"
        if [[ $type == 'dir' ]]; then
            compopt -o dirnames
        elif [[ $type == 'file' ]]; then
            compopt -o default
        elif [[ $type == 'plain' ]]; then
            [[ "$value" == *= ]] && compopt -o nospace
            COMPREPLY+=("${value#"${cur%%"$part"}"}")
        fi
    done
    return 0
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class Zsh(ZshComplete):
    """No space follows a key, as its value does."""

    source_template = ZshComplete.source_template.replace(
        "compadd -U -V unsorted -a completions", "compadd -S '' -U -V unsorted -a completions"
    )


SHELLS = {"bash": Bash, "zsh": Zsh, "fish": FishComplete}
for _name, _kind in SHELLS.items():
    add_completion_class(_kind, _name)


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)), required=False)
def command(shell: str | None) -> int:
    """Print the script with which SHELL completes commands, flags and their values; by default that of $SHELL.

    \b
    bash   echo 'eval "$(zerocli completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(zerocli completion zsh)"' >> ~/.zshrc
    fish   zerocli completion fish > ~/.config/fish/completions/zerocli.fish
    """
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise click.UsageError(f"SHELL is one of {', '.join(SHELLS)}, not {name or 'empty'}")
    from zerocli.cli.main import group

    made: Any = SHELLS[name](group, {}, "zerocli", "_ZEROCLI_COMPLETE")
    click.echo(made.source_template % made.source_vars())
    return 0
