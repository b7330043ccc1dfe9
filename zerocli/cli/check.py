"""`zerocli check`: reads the flags, starts the ranks (again if a row ended them), and prints the results."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from offload.placement import Placement
from zerocli import config as configs
from zerocli import machine
from zerocli.check import table
from zerocli.check.rows import Checklist, choose_rows
from zerocli.cli.train import BASE_HELP, KEYS, arguments
from zerocli.config.schema import get
from zerocli.console import say, show, show_json
from zerocli.errors import DOES_NOT_FIT, FAILURE, OK, UserError
from zerocli.layout.sizes import format_bytes
from zerocli.plan.report.preflight import refuse_folders
from zerocli.ranks.worker import die_with_parent, worker_environment
from zerocli.run.processes import launch
from zerocli.run.processes.job import Job

STEPS = 3
LARGEST = {"train.batch": 2, "train.seq": 128}
"""Maximum sizes unless the user sets them: little data shows differences as well as much."""
CHECKLIST, RESULTS = "checklist.json", "results.jsonl"
FLAGS = ("nvme_path", "ranks", "tp", "shard_ranks", "batch", "seq", "precision", "data", "seed", "lora", "base")
"""Those of `train` that set the same config keys here."""


@click.command()
@click.argument("source", metavar="[MODEL]", default="tiny")
@click.option("--stage", type=click.IntRange(0, 3), multiple=True, help="Only this ZeRO stage; may be repeated.")
@click.option("--offload", multiple=True, metavar="PLACEMENT", help="Only this placement, or none; may be repeated.")
@click.option("--nvme-path", multiple=True, metavar="DIR", help="Folder on an NVMe disk; by default a temporary one.")
@click.option("--ranks", type=int, metavar="N", help="Processes; by default one per GPU, two without a GPU.")
@click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks among them.")
@click.option("--shard-ranks", type=int, metavar="N", help="Partition within groups of N ranks, which hold copies.")
@click.option("--steps", type=click.IntRange(1), default=STEPS, show_default=True, help="Optimizer steps to compare.")
@click.option(
    "--batch", type=int, metavar="N", help="Sequences per rank and micro-step; by default the config's, at most 2."
)
@click.option("--seq", type=int, metavar="N", help="Tokens per sequence; by default the config's, at most 128.")
@click.option("--precision", metavar="NAME", help="fp32, bf16, fp16 or auto.")
@click.option("--lora", metavar="RANK[:LAYERS]", help="Train adapters of this rank alone.")
@click.option("--base", metavar="NAME", help=BASE_HELP)
@click.option("--data", metavar="PATH", help="Text file or folder, .jsonl, .parquet, or tokens in .bin or .npy.")
@click.option("--seed", type=int, metavar="N", help="Seed of parameters and data order.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any key; may be repeated.")
@click.option(
    "--all", "everything", is_flag=True, help="More rows: each with compiled blocks too, and offloaded activations."
)
@click.option(
    "--loop",
    metavar="MODULE:FUNCTION",
    help="Your own training loop, called with an engine and the rank; MODEL is then module:factory.",
)
@click.option(
    "--optimizer",
    metavar="MODULE:FUNCTION",
    help="With --loop: your own optimizer, called with the parameters; by default the config's.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    source: str,
    sets: tuple[str, ...],
    stage: tuple[int, ...],
    offload: tuple[str, ...],
    **given: Any,
) -> int:
    """Say whether sharding changes the numbers of MODEL: exit code 0 if it does not, 1 if it does.

    Trains a few steps without sharding, in plain torch, and then under every stage and placement that this machine
    allows, without and with recomputation and compiled blocks. Losses, gradient norms, parameters and optimizer states
    must be equal up to rounding. MODEL is a bundled name, a .toml or .yaml, a Hugging Face config.json or
    module:factory.
    """
    if given["loop"] or given["optimizer"]:
        return _own_loop(ctx, source, sets, stage, offload, given)
    worker = worker_environment()
    flags = {KEYS[name]: given[name] for name in FLAGS}
    if worker:
        die_with_parent()
        flags["parallel.ranks"] = int(worker["WORLD_SIZE"])
    config = _smaller(configs.load(source, sets=sets, flags=flags), sets, flags)

    _refuse(config, offload)
    if worker:
        os.environ.update(worker)
    with _folder(worker is not None) as folder:
        if worker and "ZEROCLI_PARENT" in os.environ:
            return _be_rank(config, Checklist.from_dict(json.loads((folder / CHECKLIST).read_text())), folder, given)
        config, checklist, num_ranks = _choose(config, stage, offload, folder, given)
        if worker:
            return _be_rank(config, checklist, folder, given, alone=True)
        code = _launch(checklist, folder, num_ranks, [str(ctx.info_name), *arguments(ctx)], given["as_json"])
        return code if code is not None else _show(config, checklist, folder, given["as_json"])


def _own_loop(
    ctx: click.Context,
    source: str,
    sets: tuple[str, ...],
    stages: tuple[int, ...],
    offloads: tuple[str, ...],
    given: dict[str, Any],
) -> int:
    """Check a user's own loop; exit code 0 only if every row equals plain torch."""
    if not given["loop"]:
        raise UserError("--optimizer is that of a loop of your own", hint="--loop package.module:function")
    without = ("nvme_path", "tp", "shard_ranks", "steps", "batch", "seq", "precision", "data", "everything")
    for name in without:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = "all" if name == "everything" else name.replace("_", "-")
            raise UserError(f"--{flag} has no meaning with --loop: the loop says what is trained, and on which data")
    from zerocli.check.loop import check

    optimizer = configs.load(source, sets=sets, flags={}).optimizer
    asked: dict[str, Any] = {"optimizer": optimizer.name, "lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
    asked |= configs.arguments_of(optimizer)
    sys.path.insert(0, os.getcwd())
    if given["optimizer"]:
        asked = {"optimizer": _imported(given["optimizer"])}
    asked |= {"stages": stages or range(4), "seed": given["seed"] or 0, "ranks": given["ranks"] or 2}
    if offloads:
        asked["offload"] = offloads
    report = check(_imported(source), _imported(given["loop"]), **asked)
    _print(str(report), given["as_json"])
    if given["as_json"]:
        show_json({"schema": 1} | report.as_dict())
    return OK if report.ok else FAILURE


def _imported(name: str) -> Any:
    """Return what `package.module:function` names; UserError if it cannot be imported."""
    module, colon, path = name.partition(":")
    if not colon:
        hint = "zerocli check my.module:make_model --loop my.module:train"
        raise UserError(f"{name} is no package.module:function", hint=hint)
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UserError(f"cannot import {name}: {error}", hint="the folder that holds it, as PYTHONPATH") from error
    return found


def _smaller(config: configs.Config, sets: tuple[str, ...], flags: dict[str, Any]) -> configs.Config:
    """Return the config with less data per step, unless the user set the amount, and no choice of what is recomputed:
    each row says that itself.
    """

    said = {text.partition("=")[0].strip() for text in sets} | {
        key for key, value in flags.items() if value is not None
    }
    values = {key: min(get(config, key), most) for key, most in LARGEST.items() if key not in said}
    if "train.global_batch" not in said and config.train.global_batch:
        values |= {"train.global_batch": 0, "train.accumulate": 2}
    if config.activations.policy == configs.AUTO:
        values["activations.policy"] = "keep"
    return config.with_values(values)


def _refuse(config: configs.Config, offloads: tuple[str, ...]) -> None:
    """Raise UserError for placements that no stage allows, and for dropout masks that cannot be equal."""
    for text in offloads:
        configs.refuse_placement(text)
    if config.parallel.tp > 1 and config.model.dropout > 0:
        raise UserError(
            f"tp {config.parallel.tp} and dropout {config.model.dropout:g}: heads on other ranks draw other masks than "
            "in one process, so the numbers differ",
            hint="--set model.dropout=0",
        )


@contextlib.contextmanager
def _folder(worker: bool) -> Iterator[Path]:
    """Yield the check's folder: that of the process that started this rank, or a temporary one."""
    if worker and "ZEROCLI_PARENT" in os.environ:
        yield Path(os.environ["ZEROCLI_RUN_DIR"])
        return
    with tempfile.TemporaryDirectory(prefix="zerocli-check-", ignore_cleanup_errors=True) as name:
        Path(name, "logs").mkdir()
        yield Path(name)


# -- what to run -------------------------------------------------------------------------------------------------------


def _choose(
    config: configs.Config, stages: tuple[int, ...], offloads: tuple[str, ...], folder: Path, given: dict[str, Any]
) -> tuple[configs.Config, Checklist, int]:
    """Return the config, the rows that this machine allows, and the number of ranks; print each choice."""
    num_gpus = len(machine.gpus())
    num_ranks, reason = launch.choose_ranks(config.parallel.ranks, config.parallel.tp, num_gpus)
    first = os.environ.get("RANK", "0") == "0"
    tell = say if first else (lambda text: None)
    tell(f"ranks {num_ranks} ({reason})")
    numel = _refuse_large(config, num_gpus, num_ranks)
    config, nvme = _with_disk(config, folder, numel, tell)
    missing = machine.missing_compiler(on_gpu=num_gpus > 0)
    if missing:
        tell(f"no compiled rows: {missing}")
    configs.refuse_shard_ranks(config.parallel, num_ranks)
    shards = config.parallel.shard_ranks or num_ranks // config.parallel.tp
    rows = choose_rows(stages, offloads, numel, shards, nvme, not missing, given["everything"])
    return config, Checklist(rows, given["steps"]), num_ranks


def _refuse_large(config: configs.Config, num_gpus: int, num_ranks: int) -> int:
    """Return the number of the model's parameters; UserError, with exit code 3, if the unsharded run does not fit."""
    from zerocli.plan.blocks.factory import count_external
    from zerocli.plan.blocks.inputs import run_shape
    from zerocli.plan.report.preflight import plan_config

    if config.model.external:
        numel = count_external(config.model, config.train.seq)
        whole = 16 * numel  # parameters, gradients and Adam's two moments; activations are not known
    else:
        numel = run_shape(config).numel
        alone = {"parallel.ranks": 1, "parallel.tp": 1, "parallel.shard_ranks": 0, "zero.stage": 0}
        plan = plan_config(
            config.with_values({**alone, "offload.placement": Placement()}), "cuda" if num_gpus else "cpu"
        )
        assert plan is not None
        whole = plan.needed("hbm")
    # fp32 copies on the host: initial values, the unsharded run's parameters and moments, and each rank's of a row.
    copies = 4 * numel * (1 + 3 + 3 * num_ranks)
    needed = {"hbm": whole, "dram": copies} if num_gpus else {"hbm": 0, "dram": whole + copies}
    has = {"dram": machine.memory().available, "hbm": min((gpu.nbytes for gpu in machine.gpus()), default=0)}
    for tier, what in (("hbm", "GPU memory"), ("dram", "host memory")):
        if needed[tier] > has[tier]:
            raise UserError(
                f"{config.name} is too large to be trained without sharding here: {what}: {format_bytes(needed[tier])} "
                f"needed for the unsharded run and its copies, {format_bytes(has[tier])} free",
                hint="the same model with fewer or smaller layers: --set model.layers=2, --set model.hidden=..."
                if not config.model.external
                else "the same model with fewer or smaller layers",
                exit_code=DOES_NOT_FIT,
            )
    return numel


def _with_disk(config: configs.Config, folder: Path, numel: int, tell: Any) -> tuple[configs.Config, bool]:
    """Return the config with a folder for the nvme tier, and whether there is room in it."""
    paths = config.offload.nvme_path or (str(folder),)
    refuse_folders(paths)
    needed, free = 16 * numel + (256 << 20), min(machine.disk(path)[1] for path in paths)
    if free < needed:
        where = ", ".join(paths)
        tell(f"no nvme rows: {format_bytes(needed)} needed, {format_bytes(free)} free in {where} (--nvme-path)")
        return config, False
    return config.with_values({"offload.nvme_path": paths}), True


# -- running it --------------------------------------------------------------------------------------------------------


def _launch(checklist: Checklist, folder: Path, num_ranks: int, words: list[str], as_json: bool) -> int | None:
    """Run the ranks until each row has a result; return an exit code if they could not start, else None.

    A row that ends its ranks (a crash, or a failure of one rank) is an error; new ranks continue after it.
    """
    todo = checklist
    while todo.first < len(checklist.rows):
        (folder / CHECKLIST).write_text(json.dumps(dataclasses.asdict(todo)))
        before = len(_entries(folder))
        job = Job([sys.executable, "-m", "zerocli", *words], num_ranks, folder)
        code = job.run()
        entries = _entries(folder)
        if len(entries) == before:  # the unsharded run itself failed
            job.report()
            return code or FAILURE
        done = [entry["row"] for entry in entries if "row" in entry]
        first = max(done, default=-1) + 1
        if code != OK and first < len(checklist.rows):
            if job.signals:
                job.report()
                return code
            result = {"row": first, "verdict": "error", "message": job.failure()}
            _keep(folder, result)
            _print(table.row_line(checklist, checklist.rows[first], result), as_json)
            first += 1
        todo = dataclasses.replace(checklist, first=first)
    return None


def _be_rank(
    config: configs.Config, checklist: Checklist, folder: Path, given: dict[str, Any], alone: bool = False
) -> int:
    """Run as one rank; rank 0 prints each row as it ends, and with `alone` also the verdict."""
    from zerocli.check import ranks

    if not config.offload.nvme_path:
        config = config.with_values({"offload.nvme_path": (str(folder),)})

    def keep(entry: dict[str, Any]) -> None:
        _keep(folder, entry)
        if "row" in entry:
            _print(table.row_line(checklist, checklist.rows[entry["row"]], entry), given["as_json"])
        elif checklist.first == 0:
            _print("\n".join(table.heading(_name(config), checklist, entry, _tokens(config))), given["as_json"])

    ranks.work(config, checklist, keep)
    if not alone or os.environ.get("RANK") != "0":
        return OK
    missing = [row for index, row in enumerate(checklist.rows) if index not in _results(folder)]
    if missing:
        raise UserError(f"a rank failed alone; not run: {missing[0]} and what follows", exit_code=FAILURE)
    return _show(config, checklist, folder, given["as_json"])


def _name(config: configs.Config) -> str:
    return config.model.factory or config.name


def _tokens(config: configs.Config) -> str:
    train = config.train
    passes = f" x {train.accumulate} passes" if train.accumulate > 1 else ""
    return f"{train.batch} x {train.seq} tokens per rank{passes}"


def _show(config: configs.Config, checklist: Checklist, folder: Path, as_json: bool) -> int:
    """Print the verdict; return the exit code."""
    about = next(entry for entry in _entries(folder) if "row" not in entry)
    results = _results(folder)
    _print("\n".join(table.closing(checklist, about, results)), as_json)
    if as_json:
        show_json(table.document(_name(config), checklist, about, results))
    return OK if table.ok(results) else FAILURE


def _print(text: str, as_json: bool) -> None:
    say(text) if as_json else show(text)


def _keep(folder: Path, entry: dict[str, Any]) -> None:
    with (folder / RESULTS).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / RESULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _results(folder: Path) -> dict[int, dict[str, Any]]:
    return {entry["row"]: entry for entry in _entries(folder) if "row" in entry}
