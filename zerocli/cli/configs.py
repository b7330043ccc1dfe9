"""`zerocli configs`: list, show and copy the bundled configs."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from zerocli import config as configs
from zerocli.console import quoted, say
from zerocli.errors import UserError, closest


@click.group()
def command() -> None:
    """List, show and copy the bundled configs."""


@command.command()
def ls() -> None:
    """List the bundled configs."""
    rows = [(name, sentence) for name, sentence, _ in configs.bundled()]
    width = max((len(name) for name, _ in rows), default=0)
    for name, sentence in rows:
        click.echo(f"{name:<{width}}  {sentence}".rstrip())


@command.command()
@click.argument("name")
def show(name: str) -> None:
    """Print the config NAME."""
    click.echo(find(name).read_text(), nl=False)


@command.command()
@click.argument("name")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite a file that is there already.")
def cp(name: str, folder: Path, force: bool) -> None:
    """Copy the config NAME into DIR, to change it there."""
    source = find(name)
    target = folder / source.name
    if target.exists() and not force:
        raise UserError(
            f"{target} is there already",
            hint=f"zerocli configs cp {name} {quoted(folder)} --force, which overwrites it, or another DIR",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}", hint="another DIR") from error
    say(f"{target}: train it with zerocli train {quoted(target)}")


def find(name: str) -> Path:
    """Return the file of the bundled config `name`."""
    paths = {each: Path(path) for each, _, path in configs.bundled()}
    if name not in paths:
        meant = closest(name, paths)
        question = f"; did you mean {meant}?" if meant else ""
        raise UserError(f"no bundled config is called {name}{question}", hint="zerocli configs ls")
    return paths[name]
