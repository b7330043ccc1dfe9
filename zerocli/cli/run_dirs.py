"""Run folders on the command line: refuse one in which no run was, and name the one that was probably meant."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from zerocli.checkpoint.folder import Folder
from zerocli.config.hub import is_model
from zerocli.console import quoted
from zerocli.errors import UserError

RUNS = "runs"
TRACES = ("config.json", "metrics.jsonl")
"""Files of a run that has started: with one of them, a run that saved nothing yet starts again."""


def refuse_no_run(ctx: click.Context, run_dir: str, words: Sequence[str], worker: Mapping[str, str] | None) -> None:
    """Raise UserError if there is no run to resume in `run_dir`; `words` is the command line, CONFIG first.

    Ranks that torchrun or SLURM restarted may find nothing, as those do whose folder is on another node.
    """
    if worker and (worker["RANK"] != "0" or "ZEROCLI_PARENT" in os.environ or restarted()):
        return
    if has_run(run_dir):
        return
    folder = Path(run_dir)
    fact = "there is no such folder" if not folder.exists() else "it holds no checkpoint and no config.json of a run"
    meant = nearest_run(run_dir)
    if ctx.get_parameter_source("source") is ParameterSource.DEFAULT:
        words = words[1:]  # a resumed run has its own config
    words = [str(ctx.info_name), *words]
    if meant:
        hint = f"zerocli {shlex.join(meant if word == run_dir else word for word in words)}"
    else:
        fresh = shlex.join(word for word in words if word != "--resume")
        hint = f"zerocli {fresh}, which starts a run in {quoted(run_dir)}"
    raise UserError(f"nothing to resume in {run_dir}: {fact}", hint=hint)


def has_run(run_dir: str | os.PathLike[str]) -> bool:
    """Return whether a run has started in this folder, or left a checkpoint there."""
    folder = Path(run_dir)
    started = any((folder / name).exists() for name in TRACES) and not is_model(os.fspath(run_dir))
    return started or bool(Folder(folder / "checkpoints").newest_first())


def restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or SLURM says that it has restarted this rank."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(environ.get(name, "0") != "0" for name in names)


def nearest_run(run_dir: str) -> str:
    """Return the run folder with a checkpoint whose name is nearest to `run_dir`, else the newest; empty if none is.

    Folders beside `run_dir` and those in `runs` are considered.
    """
    above = [each for each in Path(run_dir).parents if Folder(each / "checkpoints").committed()]
    if above:  # RUN/checkpoints, or a checkpoint itself
        return str(above[0])
    inside: list[Path] = []
    for parent in (Path(run_dir).parent, Path(RUNS)):
        with contextlib.suppress(OSError):
            inside += sorted(parent.iterdir())[:10_000]
    found = [each for each in inside if Folder(each / "checkpoints").committed()]
    by_name = {path.name: path for path in found}
    if near := difflib.get_close_matches(Path(run_dir).name, by_name, n=1, cutoff=0.6):
        return str(by_name[near[0]])
    return str(max(found, key=lambda path: path.stat().st_mtime)) if found else ""


def refuse_no_export(run: str) -> None:
    """Raise UserError if RUN of `zerocli export` is no folder, or one of weights that need no export."""
    path = Path(run)
    if not path.is_dir():
        meant = nearest_run(run)
        fact = "is a file, not a run folder" if path.exists() else "there is no such folder"
        hint = f"zerocli export {quoted(meant)} OUT" if meant else "zerocli train --set checkpoint.every=100, first"
        raise UserError(f"{run}: {fact}", hint=hint)
    if path.name == "checkpoints" and (meant := nearest_run(run)):
        raise UserError(f"{run}: is inside a run, which is named as RUN", hint=f"zerocli export {quoted(meant)} OUT")
    weights = ("model.safetensors", "model.safetensors.index.json")
    if any((path / name).exists() for name in weights) and not (path / "checkpoints").exists():
        raise UserError(
            f"{run}: holds weights in safetensors already, and no checkpoint of a run",
            hint=f"zerocli train CONFIG --init-from {quoted(run)}",
        )
