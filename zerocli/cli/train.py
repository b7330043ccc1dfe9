"""`zerocli train`: reads the flags, decides whether this process starts the ranks or is one, and runs it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from zerocli import config as configs
from zerocli import machine
from zerocli.checkpoint.folder import Folder
from zerocli.cli.run_dirs import RUNS, refuse_no_run, restarted
from zerocli.cli.types import Steps
from zerocli.config.hub import weight_files
from zerocli.config.options import RunOptions, automatic_keys
from zerocli.console import say
from zerocli.errors import OK, UserError
from zerocli.garbage import paused
from zerocli.ranks.worker import die_with_parent, job_name, worker_environment
from zerocli.regular_files import read_regular
from zerocli.run.folders.folder import run_folder
from zerocli.run.processes import launch, preempt

# Parameter of the command -> the config key that it sets.
KEYS = {
    "stage": "zero.stage",
    "offload": "offload.placement",
    "nvme_path": "offload.nvme_path",
    **{name: f"parallel.{name}" for name in ("ranks", "tp", "shard_ranks")},
    **{name: f"train.{name}" for name in ("steps", "epochs", "batch", "seq", "precision")},
    "data": "data.path",
    **{name: f"train.{name}" for name in ("seed", "init_from")},
    "lr": "optimizer.lr",
    "accumulate": "train.accumulate",
    "save_every": "checkpoint.every",
    "eval_every": "train.eval_every",
    "lora": "lora.rank",
    "base": "lora.base",
}

BASE_HELP = "With --lora: what the frozen base is stored in: bf16, int8 or nf4."
LORA_HELP = "Train adapters of this rank alone: 16, 16:q_proj,v_proj, or a folder of adapters to go on from."
DATA_HELP = "Text, documents (.jsonl, .json, .csv, .parquet) or tokens (.bin, .npy); documents may be repeated."


DEFAULTS = {
    "steps": "100; of a folder --epochs 1",
    "batch": "8; of a folder what fits",
    "seq": "128; of a folder by its data",
    "accumulate": "1; of a folder as 64 sequences a step need",
    "lr": "3e-4; of a folder by its size, 2e-5 for 7B",
    "eval_every": "0; of a folder 0.1",
    "save_every": "1000; of a folder 0.25",
}
"""Defaults of `train`, as its help shows them; other commands have others."""


def config_options(function: Callable[..., Any], shown: Mapping[str, str] = DEFAULTS) -> Callable[..., Any]:
    """Add CONFIG, the flags that set config keys, and `--set` to a command; its help has the defaults `shown`."""
    whole, number = functools.partial(click.option, type=int, metavar="N"), functools.partial(click.option, metavar="N")
    named = functools.partial(click.option, metavar="NAME")
    stages = "ZeRO: 1 optimizer states, 2 + gradients, 3 + parameters.  [default: 2]"
    groups = "Partition within groups of N data-parallel ranks, which hold copies.  [default: all]"
    batch = f"Sequences per data-parallel rank and micro-step.  [default: {shown['batch']}]"
    evaluations = (
        f"Steps between evaluations on held-out data, or a share of the run.  [default: {shown['eval_every']}]"
    )
    saves = "Steps between checkpoints, a share of the run, or never; the last step is saved.  "
    saves += f"[default: {shown['save_every']}]"
    auto = "Choose stage, placement and recomputation: the fastest run that fits."
    decorators = [
        click.argument("source", metavar="[CONFIG]", default="tiny"),
        click.option("--stage", type=int, metavar="0..3", help=stages),
        click.option("--offload", metavar="PLACEMENT", help="Where states live: cpu, or params=cpu,optimizer=nvme."),
        click.option("--auto", is_flag=True, help=auto),
        click.option("--nvme-path", multiple=True, metavar="DIR", help="Folder on an NVMe disk; may be repeated."),
        whole("--ranks", help="Processes; by default one per GPU, two without a GPU."),
        whole("--tp", help="Tensor-parallel ranks among them.  [default: 1]"),
        whole("--shard-ranks", help=groups),
        whole("--steps", help=f"Optimizer steps.  [default: {shown['steps']}]"),
        number("--epochs", type=float, help="Passes over the data, instead of --steps."),
        whole("--batch", help=batch),
        whole("--seq", help=f"Tokens per sequence.  [default: {shown['seq']}]"),
        whole("--accumulate", help=f"Micro-steps per optimizer step.  [default: {shown['accumulate']}]"),
        click.option("--lr", type=float, metavar="RATE", help=f"Highest learning rate.  [default: {shown['lr']}]"),
        named("--precision", help="fp32, bf16, fp16 or auto.  [default: auto]"),
        click.option("--lora", metavar="RANK[:LAYERS]|DIR", help=LORA_HELP),
        named("--base", help=BASE_HELP),
        click.option("--data", multiple=True, metavar="PATH[:WEIGHT]", help=DATA_HELP),
        number("--eval-every", type=Steps(), help=evaluations),
        number("--save-every", type=Steps(), help=saves),
        whole("--seed", help="Seed of parameters and data order.  [default: 1234]"),
        click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any key; may be repeated."),
    ]
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


@click.command()
@config_options
@click.option("--run-dir", metavar="DIR", help="Folder of this run; by default runs/<config>-<time>.")
@click.option("--init-from", metavar="DIR", help="Start from the weights in DIR (safetensors), such as an export.")
@click.option("--deepspeed", metavar="FILE", help="DeepSpeed JSON config to translate; flags and --set come first.")
@click.option("--resume", is_flag=True, help="Resume from the newest checkpoint of --run-dir, or of the newest run.")
@click.option(
    "--check", type=click.IntRange(0), default=0, metavar="N", help="Compare N steps with unsharded training."
)
@click.option("--dry-run", is_flag=True, help="Show the config and what each rank would hold; train nothing.")
@click.option("--json", is_flag=True, help="One JSON document on stdout.")
@click.pass_context
def command(ctx: click.Context, /, source: str, sets: tuple[str, ...], run_dir: str | None, **given: Any) -> int:
    """Train CONFIG: a bundled name (zerocli configs ls), a .toml or .yaml, a Hugging Face config.json, module:factory.

    Or a folder of weights from the Hugging Face hub, with --data: that is fine-tuned, and its settings are printed with
    their reasons. Defaults are those of a config that does not say otherwise.

    Without CONFIG it trains `tiny`. Under torchrun or srun this process is one rank; otherwise it starts the ranks.
    """
    source, flags, worker = asked(ctx, source, run_dir)
    if given["deepspeed"]:
        sets = (*from_deepspeed(given["deepspeed"], flags, quiet=worker is not None), *sets)
    config, chosen = with_defaults(ctx, source, sets, flags, worker)
    configs.refuse_placement(config.offload.placement, config.zero.stage)
    folder = folder_of_run(ctx, run_dir, config.name, worker)
    resume = given["resume"] or was_restarted(folder)
    options = run_options(ctx, folder, resume, flags)
    if options.dry_run:
        return dry_run(config, options, worker)
    if worker:
        return be_rank(config, options, worker, _train)
    words, fresh = [str(ctx.info_name), *arguments(ctx)], run_dir is None and not resume
    return launch.launch(config, options, words, fresh=fresh, defaults=chosen)


def _train(config: configs.Config, options: RunOptions) -> int:
    with paused():
        from zerocli.run import trainer

    return trainer.work(config, options)


def asked(ctx: click.Context, source: str, run_dir: str | None) -> tuple[str, dict[str, Any], Mapping[str, str] | None]:
    """Return the config's name, the config keys that flags set, and what makes this process a rank (None: nothing).

    To resume without CONFIG takes the run's own.
    """
    worker = worker_environment()
    flags = {key: ctx.params[name] for name, key in KEYS.items()}
    if worker:
        die_with_parent()
        flags["parallel.ranks"] = int(worker["WORLD_SIZE"])
    if ctx.params["resume"] and run_dir and ctx.get_parameter_source("source") is ParameterSource.DEFAULT:
        source = ctx.params["source"] = own_config(run_dir, source)  # passed to the ranks instead of the default
    return source, flags, worker


def folder_of_run(ctx: click.Context, run_dir: str | None, name: str, worker: Mapping[str, str] | None) -> str:
    """Return the run folder: that of our launcher, the one given, or by default a new one or that of the newest run."""
    resume = ctx.params["resume"]
    if resume and run_dir:
        refuse_no_run(ctx, run_dir, arguments(ctx), worker)
    if worker and "ZEROCLI_PARENT" in os.environ:
        return os.environ["ZEROCLI_RUN_DIR"]
    return run_dir or (newest_run(name) if resume else default_run_dir(name))


def be_rank(
    config: configs.Config,
    options: RunOptions,
    worker: Mapping[str, str],
    work: Callable[[configs.Config, RunOptions], int],
) -> int:
    """Do the `work` of a rank; return its exit code."""
    os.environ.update(worker)
    preempt.note_signals(launch.saves(config))
    options = launch.with_refusal(config, options, worker)
    with run_folder(options.run_dir):
        code = work(config, options)
    preempt.ignore_signals()
    return code


def _may_read_ahead(ctx: click.Context, config: configs.Config, worker: Mapping[str, str] | None) -> bool:
    """Whether all of a folder's weights are read soon, and by this node alone: each of several reads only a part."""
    one_node = worker is None or (worker["RANK"] == "0" and worker["LOCAL_WORLD_SIZE"] == worker["WORLD_SIZE"])
    measures = ctx.params["auto"] and config.offload.nvme_path  # a disk that is busy would seem slow
    later = ctx.params["resume"] or ctx.params["dry_run"] or measures
    return bool(config.train.init_from) and one_node and not later


def with_defaults(
    ctx: click.Context, source: str, sets: tuple[str, ...], flags: Mapping[str, Any], worker: Mapping[str, str] | None
) -> tuple[configs.Config, list[str]]:
    """Return the config with what `recipe` chooses for keys that nobody gave, and those as texts for `--set`.

    The ranks that our launcher starts take its choices; under torchrun and SLURM every rank makes them, alike.
    """
    from zerocli.run import recipe

    if worker is None:
        recipe.refuse_both(flags, ctx.params["sets"])
    if launch.DEFAULTS in os.environ and worker:
        sets = (*json.loads(os.environ[launch.DEFAULTS]), *sets)
        return configs.load(source, sets=sets, flags=flags), []
    config, given = configs.load(source, sets=sets, flags=flags), configs.given_keys(source, sets, flags)
    if not ctx.params["resume"]:
        recipe.refuse_incomplete(config)
    if _may_read_ahead(ctx, config, worker):
        with contextlib.suppress(OSError):  # who reads the files says what is wrong with them
            machine.read_ahead(weight_files(config.train.init_from))  # while the recipe is chosen and the ranks start
    gpus = machine.gpus()
    ranks = config.parallel.ranks or launch.choose_ranks(0, config.parallel.tp, len(gpus))[0]

    def fits(asked: configs.Config) -> bool:
        return worker is not None or launch.fits(launch.with_ranks(asked, ranks), gpus)

    plan = recipe.Plan(ranks, bool(ctx.params["check"]), ctx.params["auto"], fits, writes=not ctx.params["dry_run"])
    chosen = recipe.choose(config, given, plan)
    config = recipe.with_values(config, chosen)
    if (ctx.params["dry_run"] or recipe.is_fine_tuning(config)) and (not worker or worker["RANK"] == "0"):
        say(recipe.table(config, chosen, given))
    if not worker or worker["RANK"] == "0":
        for note in recipe.notes(config, given):
            say(f"note: {note}")
    return config, [each.text for each in chosen]


def run_options(ctx: click.Context, run_dir: str, resume: bool, flags: Mapping[str, Any]) -> RunOptions:
    """Return the options of a run from the flags of `train` and `profile`."""
    given = ctx.params
    auto = automatic_keys(given["sets"], flags) if given["auto"] else frozenset()
    ranks = ["--ranks", str(flags["parallel.ranks"])] if flags["parallel.ranks"] else []
    command = shlex.join(["zerocli", str(ctx.info_name), *arguments(ctx), *ranks])
    fixed = (resume, given["check"], given["dry_run"], given["json"], given["source"], auto)
    return RunOptions(run_dir, *fixed, command=command)


def from_deepspeed(path: str, given: Mapping[str, Any], quiet: bool = False) -> list[str]:
    """Return a DeepSpeed config as texts for `--set`; say which flags give the same, and what has no counterpart.

    `given` are the flags by key, which come first.
    """
    from zerocli.config.deepspeed import translate

    made = translate(path)
    if given.get("train.accumulate") is not None:
        made.sets.pop("train.global_batch", None)  # else `accumulate` would follow from it
    flags = {key: f"--{name.replace('_', '-')}" for name, key in KEYS.items()}
    words = [
        word
        for key, value in made.sets.items()
        for word in ([flags[key], value] if key in flags else ["--set", f"{key}={value}"])
    ]
    if not quiet:
        say(f"{path}: the same as {shlex.join(words)}")
        for note in made.notes:
            say(f"note: {note}")
        if made.without:
            say(f"without a counterpart: {'; '.join(made.without)}")
    return [f"{key}={value}" for key, value in made.sets.items()]


def dry_run(
    config: configs.Config, options: RunOptions, worker: Mapping[str, str] | None, profiled: bool = False
) -> int:
    """Print what a run, or with `profiled` a profile, would hold; return the exit code."""
    if worker and worker["RANK"] != "0":
        return OK
    if not config.parallel.ranks:
        num_ranks, reason = launch.choose_ranks(0, config.parallel.tp, len(machine.gpus()))
        say(f"ranks {num_ranks} ({reason})")
        config = launch.with_ranks(config, num_ranks)
    from zerocli.run import dry_run

    return dry_run.dry_run(config, options, profiled)


def arguments(ctx: click.Context) -> list[str]:
    """Return the resolved command line without `--ranks`: each launcher sets the number of ranks itself."""
    given = [ctx.params.get(str(param.name)) for param in ctx.command.params if isinstance(param, click.Argument)]
    return [*(str(value) for value in given if value is not None), *option_words(ctx)]


def option_words(ctx: click.Context) -> list[str]:
    """Return the options that were given, without `--ranks`."""
    words: list[str] = []
    for param in ctx.command.params:
        value = ctx.params.get(str(param.name))
        if isinstance(param, click.Argument):
            continue
        if param.name == "ranks" or ctx.get_parameter_source(str(param.name)) is not ParameterSource.COMMANDLINE:
            continue
        if isinstance(param, click.Option) and param.is_flag:
            words.append(param.opts[0])
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [param.opts[0], str(each)]
    return words


def default_run_dir(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return runs/<name>-<id>, the same on all ranks of a node: the job's id if there is one, else the time.

    Under torchrun that is the time at which it was started; ranks start at different times.
    """
    job = environ.get("SLURM_JOB_ID") if "SLURM_PROCID" in environ else None
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    if run != "none":
        # `torchrun --standalone` makes a UUID: its first group is enough to distinguish runs.
        uuid = re.fullmatch(r"([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}", run)
        mark = f"run{uuid[1] if uuid else re.sub(r'[^A-Za-z0-9_]+', '_', run)}"
    elif job:
        mark = f"job{job}"
    else:
        began = machine.started(os.getppid()) if "TORCHELASTIC_RUN_ID" in environ else None
        mark = time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
    return f"{RUNS}/{name}-{mark}"


def own_config(run_dir: str, default: str) -> str:
    """Return the config that the run in a folder was started with, for a `--resume` without CONFIG.

    If its file is missing, it is restored from a checkpoint, unless it names code.
    """
    path = Path(run_dir, "config.json").absolute()
    found = [] if path.is_file() else Folder(Path(run_dir, "checkpoints")).committed()
    if found:
        from zerocli.checkpoint.manifest import Damaged, Unreadable, read  # imports torch
        from zerocli.regular_files import write_text

        for each in found:
            with contextlib.suppress(Damaged, Unreadable, OSError, TypeError, ValueError):
                config = read(each.path).values.get("config")
                if isinstance(config, dict) and not dict(config.get("model") or {}).get("factory"):
                    write_text(path, json.dumps(config, indent=2) + "\n")
                    say(f"{path} is missing: restored from the checkpoint of step {each.step}")
                    break
    return str(path) if path.is_file() else default


def newest_run(name: str) -> str:
    """Return the folder of the newest run of `name` with a checkpoint, for a `--resume` without a folder."""
    pattern = re.compile(re.escape(name) + r"-(\d{8}-\d{6}(-\d+)?|job\w+|run\w+)")
    folders = [each for each in Path(RUNS).glob("*") if pattern.fullmatch(each.name) and has_checkpoint(each)]
    if not folders:
        raise UserError(
            f"nothing to resume: no run of {name} with a checkpoint in {Path(RUNS).absolute()}",
            hint="--run-dir with the folder of the run, or no --resume",
        )
    return str(max(folders, key=lambda folder: folder.stat().st_mtime))


def was_restarted(run_dir: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or SLURM restarted this run and there is a checkpoint to resume from.

    torchrun counts restarts after a failure, but not after a node joins: those are recognised by the job's name.
    """
    job, before = job_name(environ), Path(run_dir, launch.JOB_FILE)
    same = bool(job) and before.is_file() and read_regular(before, 1 << 16).decode(errors="replace") == job
    return (same or restarted(environ)) and has_checkpoint(run_dir)


def has_checkpoint(run_dir: str | os.PathLike[str]) -> bool:
    """Return whether anything was saved in `run_dir`, whole or not."""
    return bool(Folder(Path(run_dir, "checkpoints")).committed())
