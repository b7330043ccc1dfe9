"""`zerocli profile`: the memory and time of a run, predicted and measured."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from zerocli import config as configs
from zerocli.cli.train import arguments, asked, be_rank, config_options, dry_run, folder_of_run, run_options
from zerocli.config.draft import set_hint
from zerocli.config.hub import is_model
from zerocli.config.options import RunOptions
from zerocli.console import quoted, say, show, show_json
from zerocli.errors import OK, UserError
from zerocli.run.processes import launch

STEPS = 6
"""Default number of steps: memory is followed in two, the others are timed."""


DEFAULTS = {"steps": str(STEPS), "batch": "8", "seq": "128", "accumulate": "1", "lr": "3e-4"}
DEFAULTS |= {"eval_every": "0", "save_every": "never"}

UNEVALUATED = {"train.eval_every": 0, "train.patience": 0, "checkpoint.best": False, "train.sample_every": 0}
"""What a configuration says of them has no effect unless a flag does too: what is done between steps is no part of the
step that is profiled."""


@click.command()
@functools.partial(config_options, shown=DEFAULTS)
@click.argument("other", metavar="[RUN]", required=False)
@click.option("--run-dir", metavar="DIR", help="Folder of this run; by default runs/<config>-<time>.")
@click.option("--init-from", metavar="DIR", help="Start from the weights in DIR (safetensors), such as an export.")
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint of --run-dir, or of the newest run.")
@click.option("--check", type=click.IntRange(0), default=0, metavar="N", help="As in train; profiles those N steps.")
@click.option("--dry-run", is_flag=True, help="Show what is predicted, and whether it fits; run nothing.")
@click.option("--html", metavar="FILE", help="Write one page to look at in a browser; needs no network.")
@click.option("--compare", metavar="RUN", help="Compare with another run: its folder, or what --json wrote of it.")
@click.option("--trace-file", metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
@click.option("--snapshot", metavar="FILE", help="Write CUDA's memory snapshot, for torch's own viewer.")
@click.option("--json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def command(
    ctx: click.Context, /, source: str, other: str | None, sets: tuple[str, ...], run_dir: str | None, **given: Any
) -> int:
    """Run a few steps of CONFIG and show what holds the memory of each tier and where the step's time goes.

    Given the folder of a run instead, show what it recorded; given two, compare them. `--html` writes a page of one
    run, or of two side by side.
    """
    for name in ("html", "trace_file", "snapshot"):
        if given[name]:
            _check_writable(given[name], f"--{name.replace('_', '-')}")
    if other is not None and "=" in other and not os.path.exists(other):
        raise UserError(f"{other} is no run; keys are set with --set", hint=set_hint([other]))
    if other is not None and given["compare"]:
        raise UserError(
            f"--compare {given['compare']}: {source} and {other} are compared already",
            hint=f"zerocli profile {quoted(source)} --compare {quoted(given['compare'])}",
        )
    if other is not None or (os.path.isdir(source) and not is_model(source)):
        _refuse_changes(ctx, source)
        before = [given["compare"]] if given["compare"] else []
        return _show_runs([*before, source, *([other] if other is not None else [])], given)
    return _profile(ctx, source, sets, run_dir, given)


def _check_writable(path: str, flag: str) -> None:
    folder = Path(path).absolute().parent
    where = path if os.path.exists(path) else folder
    if Path(path).is_dir() or not folder.is_dir() or not os.access(where, os.W_OK):
        raise UserError(
            f"{flag} {path}: no file can be written there", hint=f"{flag} with a file in a folder that exists"
        )


def _refuse_changes(ctx: click.Context, run: str) -> None:
    """Refuse flags that would change a finished run: they would have no effect."""
    shown = {"source", "other", "compare", "html", "trace_file", "snapshot", "json"}
    given = [name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    names = [name if name != "sets" else "set" for name in given if name not in shown]
    flags = " ".join(f"--{name.replace('_', '-')}" for name in names)
    if flags:
        raise UserError(
            f"{flags}: {run} is a run, and is shown as it was",
            hint=f"zerocli profile {quoted(run)}, or zerocli profile CONFIG {flags} ...",
        )


def _read(path: str) -> dict[str, Any]:
    """Return the profile of a run folder, or of a file that `--json` wrote."""
    from zerocli.profile import runs

    return runs.read(path) if not path.endswith(".json") or os.path.isdir(path) else runs.read_file(path)


def _show_runs(paths: list[str], given: dict[str, Any]) -> int:
    from zerocli.profile import page, table

    found = [_read(path) for path in paths]
    for path, document in zip(paths, found, strict=True):
        for note in document.pop("warnings", []):
            say(f"{path}: {note}")
    if given["snapshot"]:
        raise UserError("--snapshot is of a live run: CUDA's allocator keeps none", hint="zerocli profile CONFIG")
    if given["trace_file"]:
        from zerocli.profile import trace

        if len(found) > 1:
            raise UserError(
                "--trace-file is of one run, and two are given",
                hint=f"zerocli profile {quoted(paths[0])} --trace-file ...",
            )
        trace.write(given["trace_file"], found[0])
        say(f"trace: {given['trace_file']} ({trace.VIEWERS})")
    if given["html"]:
        page.write(given["html"], list(zip(paths, found, strict=True)))
        say(f"page: {given['html']}")
    if given["json"]:
        shown = [{key: value for key, value in each.items() if key != "timeline"} for each in found]
        document = shown[0] if len(shown) == 1 else {"schema": 1, "runs": dict(zip(paths, shown, strict=True))}
        show_json(document)
    else:
        show(table.render(found[0]) if len(found) == 1 else table.compare(found[0], found[1], (paths[0], paths[1])))
    return OK


def _profile(ctx: click.Context, source: str, sets: tuple[str, ...], run_dir: str | None, given: dict[str, Any]) -> int:
    source, flags, worker = asked(ctx, source, run_dir)
    said = {text.partition("=")[0].strip() for text in sets} | {key for key, each in flags.items() if each is not None}
    if not said & {"train.steps", "train.epochs"} and not given["resume"]:
        flags |= {"train.steps": STEPS, "train.epochs": 0.0}
    if not given["resume"] and not said & UNEVALUATED.keys():  # a resumed run goes on as it was
        flags |= UNEVALUATED
    config = configs.load(source, sets=sets, flags=flags)
    configs.refuse_placement(config.offload.placement, config.zero.stage)
    options = run_options(ctx, folder_of_run(ctx, run_dir, config.name, worker), given["resume"], flags)
    if options.dry_run:
        if config.model.external:
            fact = "a model of other code than zerocli's own has no plan before it is built"
            raise UserError(fact, hint="zerocli profile without --dry-run")
        return dry_run(config, options, worker, profiled=True)
    before = (given["compare"], _read(given["compare"])) if given["compare"] else None  # refused before ranks start
    if not worker:
        fresh = run_dir is None and not given["resume"]
        return launch.launch(config, options, [str(ctx.info_name), *arguments(ctx)], fresh=fresh)

    def work(config: configs.Config, options: RunOptions) -> int:
        from zerocli.profile.profiler import Profiler
        from zerocli.profile.reporter import Reporter, recording
        from zerocli.run import trainer

        reporter = Reporter(given["html"] or "", given["trace_file"] or "", before)
        with recording(given["snapshot"] or ""):
            return trainer.work(config, options, Profiler(reporter, follow=config.model.compile is not True))

    return be_rank(config, options, worker, work)
