"""Choose the number of ranks for this machine, start them and wait for them; no process is left behind."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from zerocli import machine
from zerocli.config import Config, hub, refuse_shard_ranks
from zerocli.config.options import RunOptions
from zerocli.console import say
from zerocli.errors import DOES_NOT_FIT, INTERRUPTED, PREEMPTED, USAGE, UserError
from zerocli.layout.sizes import count_of
from zerocli.plan.report import preflight
from zerocli.run import automatic
from zerocli.run.folders.folder import run_folder
from zerocli.run.folders.run_lock import lock_run_folder
from zerocli.run.processes.job import Job

DEFAULTS = "ZEROCLI_DEFAULTS"
"""In the environment of ranks that are started here: the values that were chosen, as texts for `--set`."""
MIN_RANKS, RANKS_PER_CORE = 16, 4
"""Without a GPU, as many ranks may be asked for: the first number, or the second for each core."""
JOB_FILE = "job"
"""In the run folder: the name of the elastic job that wrote its checkpoints."""


def launch(
    config: Any,
    options: RunOptions,
    arguments: Sequence[str] = ("train",),
    *,
    fresh: bool = False,
    defaults: Sequence[str] = (),
    worker: Sequence[str] | None = None,
) -> int:
    """Run one process per rank on this machine until all have ended; return the exit code of the run.

    `arguments` are zerocli's own (the command first); `fresh` asks for a run folder that no other run has taken;
    `defaults` are chosen values, as texts for `--set`; `worker` is the command of a rank, for tests.
    """
    gpus = machine.gpus()
    num_ranks, reason = choose_ranks(config.parallel.ranks or 0, config.parallel.tp or 1, len(gpus))
    machine.allow_open_files(open_files(num_ranks))
    if isinstance(config, Config):
        refuse_missing(config.train.log_to)
        preflight.refuse_disks(config, options.auto)
        config = automatic.choose_here(with_ranks(_with_own_files(config, options.run_dir), num_ranks), options).config
        preflight.refuse(config, gpus)
        from zerocli.data.preview import refuse_data  # imports numpy, which --help does not need

        refuse_data(config)
    with run_folder(options.run_dir, fresh) as folder:
        say(f"ranks {num_ranks} ({reason})")
        say(f"equivalent torchrun command: {torchrun_line(num_ranks, arguments)}")
        say(f"run folder: {folder.path}")
        command = list(worker or [sys.executable, "-m", "zerocli", *arguments])
        with lock_run_folder(folder.path):
            job = Job(command, num_ranks, folder.path, saves=saves(config), environ={DEFAULTS: json.dumps(defaults)})
            code = job.run()
        job.report()
        if code in (USAGE, DOES_NOT_FIT, INTERRUPTED, PREEMPTED):  # other failures are explained by the logs
            folder.discard()
    return code


def _with_own_files(config: Config, run_dir: str) -> Config:
    """Return a config whose model's folder is gone with the run's own copy of its small files."""
    if not config.model.folder or os.path.isfile(hub.config_path(config.model.folder)):
        return config
    from zerocli.checkpoint.source_files import with_kept  # imports torch

    return config.with_values({"model.folder": with_kept(config, run_dir)})


def fits(config: Config, gpus: Sequence[machine.Gpu]) -> bool:
    """Return whether the plan of a config finds room on this machine; nothing is known of an external model."""
    try:
        return config.model.external or preflight.preflight(config, gpus).fits
    except UserError:  # launch reports it
        return True


def with_ranks(config: Config, num_ranks: int) -> Config:
    """Return the config with its number of ranks filled in; UserError if that is no multiple of its groups."""
    refuse_shard_ranks(config.parallel, num_ranks)
    return config.with_values({"parallel.ranks": num_ranks})


def with_refusal(config: Config, options: RunOptions, worker: Mapping[str, str]) -> RunOptions:
    """Compare the plan with this node, on its first rank, unless the launcher has done so; return the options.

    Raise UserError if the run does not fit; of several nodes the options then have the error, which rank 0 shows.
    """
    if "ZEROCLI_PARENT" in os.environ or worker.get("LOCAL_RANK") != "0":
        return options
    try:
        _refuse_worker(config, options, worker)
    except UserError as error:
        if worker["WORLD_SIZE"] == worker.get("LOCAL_WORLD_SIZE"):
            raise
        return dataclasses.replace(options, refused=error)
    return options


def _refuse_worker(config: Config, options: RunOptions, worker: Mapping[str, str]) -> None:
    """Under SLURM a task may see only its own part of the host's memory, so that is not compared."""
    refuse_missing(config.train.log_to)
    preflight.refuse_disks(config, options.auto)
    local = math.gcd(int(worker["WORLD_SIZE"]), int(worker.get("LOCAL_WORLD_SIZE", worker["WORLD_SIZE"])))
    if not options.auto:  # else the ranks choose what fits, together
        preflight.refuse(config, machine.gpus(), local, host="SLURM_PROCID" not in os.environ)


def refuse_missing(names: Sequence[str]) -> None:
    """Raise UserError if a package for `train.log_to` is not installed; `wandb-online` is of wandb."""
    packages = dict.fromkeys(each.partition("-")[0] for each in names)
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(
            f"train.log_to={','.join(names)}: {' and '.join(missing)} {verb} not installed",
            hint=f"pip install {' '.join(missing)}",
        )


def open_files(num_ranks: int) -> int:
    """Return how many files a process of a run may open: twice the observed number, plus connections to each rank."""
    return 128 + 8 * num_ranks


def saves(config: Any) -> bool:
    """Return whether a run saves checkpoints; if so, it also saves when told to stop, and needs time for that."""
    checkpoint = getattr(config, "checkpoint", None)
    return checkpoint is not None and (checkpoint.every > 0 or checkpoint.time_limit > 0 or checkpoint.best)


def choose_ranks(asked: int, tp: int, num_gpus: int) -> tuple[int, str]:
    """Return (number of ranks, the reason); refuse more ranks than GPUs unless ZEROCLI_SHARE_GPU=1."""
    if asked and num_gpus and asked > num_gpus:
        if os.environ.get("ZEROCLI_SHARE_GPU") != "1":
            raise UserError(
                f"{asked} ranks, but {num_gpus} GPU{'s' if num_gpus > 1 else ''} on this machine",
                hint=f"--ranks {num_gpus}, or several machines with torchrun\n"
                "ZEROCLI_SHARE_GPU=1 lets ranks share a GPU over gloo (slow, for tests)\n"
                "CUDA_VISIBLE_DEVICES= trains on the CPU",
            )
        return asked, f"as asked; they share {num_gpus} GPU{'s' if num_gpus > 1 else ''} over gloo"
    most = max(MIN_RANKS, RANKS_PER_CORE * machine.cores())
    if asked > most:
        raise UserError(
            f"{asked} ranks on {count_of(machine.cores(), 'core')}: each is a process that computes; at most {most} "
            "are started here",
            hint=f"--ranks {max(2, machine.cores())}, or several machines with torchrun",
        )
    if asked:
        return asked, "as asked"
    if num_gpus % tp:
        raise UserError(
            f"tp {tp} does not divide the {num_gpus} GPUs of this machine", hint=f"--ranks {num_gpus // tp * tp or tp}"
        )
    if num_gpus:
        return num_gpus, "one process per GPU"
    return tp * math.ceil(2 / tp), "no GPU: two processes so that partitioning is real" if tp <= 2 else "no GPU: --tp"


def torchrun_line(num_ranks: int, arguments: Sequence[str]) -> str:
    """Return the torchrun command that starts the same ranks, ready for pasting into a shell."""
    return shlex.join(["torchrun", "--standalone", "--nproc-per-node", str(num_ranks), "-m", "zerocli", *arguments])
