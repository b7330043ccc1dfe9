"""The training run behind `zerocli train`: reads top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offload.verify import Corrupted
from tiers.errors import TierError
from zerocli import machine
from zerocli.checkpoint import source_files
from zerocli.checkpoint.folder import Folder
from zerocli.config import AUTO, Config, notes_of, to_dict
from zerocli.config.options import RunOptions
from zerocli.console import say, show_json
from zerocli.data.held_out import describe, open_held_out
from zerocli.data.sources import epochs_line, open_batches, refuse_without_positions, with_epochs, with_packing
from zerocli.engine.api import open_process_group
from zerocli.errors import FAILURE, OK, PREEMPTED, ShownElsewhere, UserError
from zerocli.layout.recompute import Recompute
from zerocli.plan.models.traced import Traced
from zerocli.profile.observer import Observer
from zerocli.ranks.attempts import ToldToStop, never
from zerocli.ranks.loss import severed
from zerocli.ranks.startup import STARTUP
from zerocli.ranks.store import CONNECT_SECONDS
from zerocli.ranks.worker import job_name
from zerocli.regular_files import own_folder, sync_folder, write_text
from zerocli.run.adapting import PlacementAdapter
from zerocli.run.automatic import Chosen, adapts, choose_together, with_open_batch
from zerocli.run.between_steps import BetweenSteps
from zerocli.run.engines import cap_device, make_engine, resolve
from zerocli.run.folders import resume
from zerocli.run.folders.folder import standing
from zerocli.run.folders.run_lock import lock_run_folder
from zerocli.run.output import report
from zerocli.run.processes.launch import JOB_FILE, open_files, saves
from zerocli.run.processes.nodes import Nodes
from zerocli.run.processes.preempt import noting_signals, told
from zerocli.run.processes.watchdog import START_SECONDS, Watchdog
from zerocli.run.recompute import (
    NOT_TRACED,
    choose_blocks,
    device_room,
    gather_values,
    ranks_here,
    run_setup,
    trace_factory,
)
from zerocli.run.schedule import with_whole_steps
from zerocli.run.steps import Diverged, Run, micro_steps, run_steps


def work(config: Config, options: RunOptions, observer: Observer | None = None) -> int:
    """Run one rank of a training run, watched by `observer`; return the exit code."""
    refuse_check_of_masks(config, options)
    if config.model.folder:
        config = config.with_values({"model.folder": source_files.with_kept(config, options.run_dir)})
    if "RANK" in os.environ and threading.current_thread() is threading.main_thread():
        # KeyboardInterrupt could be raised anywhere, even in torch's callbacks; end the process at once instead.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    machine.allow_open_files(open_files(int(os.environ.get("WORLD_SIZE", "1"))))
    config = with_open_batch(config, options, ranks_here()[0])
    traced = trace_factory(config, options.auto or ("offload.placement",) * (config.train.adapt is True))
    opened_before = dist.is_initialized()
    watchdog = Watchdog(config.train.watchdog, options.run_dir)
    try:
        with noting_signals(saves(config)), watchdog, STARTUP.reporting_to(options.events):
            hosts = join_ranks(config, options, watchdog, shared=saves(config) or options.resume)
            # Our own launcher has locked the folder already; under torchrun or SLURM, rank 0 locks it.
            first = "ZEROCLI_PARENT" not in os.environ and (not dist.is_initialized() or dist.get_rank() == 0)
            with lock_run_folder(options.run_dir) if first else contextlib.nullcontext():
                return train_rank(config, options, observer or Observer(), watchdog, traced, hosts)
    except ToldToStop as stop:
        if os.environ.get("LOCAL_RANK") == "0":
            say(str(stop))
        return PREEMPTED
    except Corrupted as error:
        fact, hint = standing(options.run_dir)
        raise UserError(f"{error}; nothing of this step is saved; {fact}", hint=hint, exit_code=FAILURE) from error
    except TierError as error:
        raise UserError(str(error), hint=error.hint or "", exit_code=FAILURE) from error
    except RuntimeError as error:
        gone = severed(error)
        if gone is None:
            raise
        fact, hint = standing(options.run_dir)
        who = gone.missing or watchdog.missing or "which one is not known"
        kind = UserError if watchdog.reports else ShownElsewhere
        lost = f"another rank was lost during {gone.what}: {who} ({gone.reason}); {fact}"
        raise kind(lost, hint=hint, exit_code=FAILURE) from error
    except OSError as error:
        if not error.strerror:
            raise
        where = f"{error.filename}: " if error.filename else ""
        fact, hint = standing(options.run_dir)
        raise UserError(f"{where}{error.strerror}; {fact}", hint=hint, exit_code=FAILURE) from error
    finally:
        if dist.is_initialized() and not opened_before and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def join_ranks(config: Config, options: RunOptions, watchdog: Watchdog, shared: bool) -> tuple[str, ...]:
    """Compare the nodes and open the process group; return each rank's host, on rank 0.

    `shared` says whether all ranks use the run folder. The watchdog runs from the moment that all ranks are there.
    """
    limit = config.train.watchdog
    patience = max(limit, START_SECONDS) if limit else CONNECT_SECONDS
    hosts: tuple[str, ...] = ()
    met = False

    def meet(store: dist.Store) -> None:
        nonlocal hosts, met
        met = True
        nodes = Nodes(store, config, options, shared)
        watchdog.connect(nodes.rank, nodes.world, store)
        hosts = nodes.compare(options.refused)
        STARTUP.report("opening the process group")

    try:
        with STARTUP.waiting("opening the process group"):
            open_process_group(connect_seconds=patience, met=meet, told=told if saves(config) else never)
    except UserError:
        if options.refused is None or met:
            raise
        raise options.refused from None  # rank 0, which would show it, has not come
    told()  # where the caller had opened the group
    if dist.is_initialized():  # opened by the caller before
        watchdog.connect(dist.get_rank(), dist.get_world_size())
    return hosts


def train_rank(
    config: Config,
    options: RunOptions,
    observer: Observer,
    watchdog: Watchdog,
    traced: Traced | str = NOT_TRACED,
    hosts: tuple[str, ...] = (),
) -> int:
    """Open a run, train its steps and say how it ended; return the exit code. Collective."""
    run = dataclasses.replace(open_run(config, options, observer, watchdog, traced), hosts=hosts)
    # The reference starts from the same values: copy them before the first update.
    start = run.engine.state_dict() if options.check else None
    try:
        stopped = run_steps(run)
    except Diverged as error:
        watchdog.close(error)
        observer.report(run.config, options, run.engine, run.lines)
        raise
    watchdog.close()
    if run.lines:
        observer.report(run.config, options, run.engine, run.lines)  # before the reference allocates memory
    if stopped or not run.lines:
        end_early(run, stopped, reported=bool(run.lines and observer.reports))
        return PREEMPTED if stopped else OK
    checked = compare(run, start) if start else None
    summarise(run, checked, observer)
    run.engine.close()
    return FAILURE if checked is not None and not checked["equal"] else OK


# -- opening a run -----------------------------------------------------------------------------------------------------


def open_run(config: Config, options: RunOptions, observer: Observer, watchdog: Watchdog, traced: Traced | str) -> Run:
    """Open the data, choose what is left open, build the model, load its values, write the run folder. Collective."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    config = resolve(config, world)
    config, packing = with_packing(config)
    with STARTUP.by_itself("opening the data"):
        batches = open_batches(config, check=rank == 0)
    config = with_whole_steps(with_epochs(config, batches, world))
    cap_device(config)
    chosen = choose_run(config, options, traced)
    config = chosen.config.with_values({"train.adapt": adapts(config, options)})
    batches.sequences, batches.accumulate = config.train.batch, config.train.accumulate
    with STARTUP.by_itself("opening the held-out data"):
        held_out = open_held_out(config, batches, open_batches, check=rank == 0)
    recompute, reason = choose_blocks(config, traced)
    with STARTUP.by_itself("building the model"):
        refuse_overwriting(options)
        changes: dict[str, Any] = {"recompute": recompute, "events": options.events, "watch": watchdog.attach}
        changes["empty"] = bool(config.train.init_from)  # or a checkpoint's values: either way all are loaded
        engine = observer.build(lambda: make_engine(config, **changes))
    refuse_without_positions(config, batches.positions or (held_out is not None and held_out.positions), engine.model)
    if config.model.compile == "auto":  # so that a resumed run, even a longer one, keeps the choice
        config = config.with_values({"model.compile": engine.hooks.blocks.on})
    with STARTUP.by_itself("preparing the run folder"):
        if rank == 0:
            folder = Path(options.run_dir)
            own_folder(folder / "checkpoints")
            for each in (folder, folder.absolute().parent):  # so that not even a power failure loses it
                sync_folder(each)
            told = [*notes_of(options.source), *chosen.lines, report.opening(config, engine, reason)]
            for line in told if held_out is None else [*told, describe(config, held_out)]:
                say(line)
    with STARTUP.by_itself("loading"):
        loads = options.resume or config.train.init_from or config.lora.rank
        tell = say if rank == 0 else (lambda text: None)
        first = resume.begin(config, options, engine, batches, tell) if loads else 1
        planned = config.train.steps
        config = with_epochs(config, batches, world)  # a resumed run may have had another global batch
    if rank == 0:
        if config.train.steps != planned:
            say(f"note: {config.train.steps} steps, as earlier ones had another batch; the schedule is of {planned}")
        for line in (*batches.lines, *([packing] if packing else []), epochs_line(config, batches, world)):
            say(line)
    with STARTUP.by_itself("writing the run folder"):
        if rank == 0:
            write_folder(config, options.run_dir, engine.model)
            chosen.save(Path(options.run_dir))
    between = BetweenSteps(config, options, engine, held_out, rank, first)
    run = Run(config, options, engine, batches, rank, first, between, watchdog)
    if config.train.adapt:
        run.adapter = open_adapter(run, chosen, recompute)
    return run


def open_adapter(run: Run, chosen: Chosen, recompute: Recompute) -> PlacementAdapter | None:
    """Return what changes the placement of a run; None where nothing could be changed without changing a number."""
    engine, config = run.engine, run.config
    if chosen.model is None or (engine.device.type == "cuda" and engine.updater.on_cpu):
        return None  # states on the device would be updated there, where sums are rounded in another way
    compiled = engine.hooks.blocks.on
    setup = dataclasses.replace(run_setup(config), recompute=recompute, compiled=compiled, checkpoints=0)
    try:
        return PlacementAdapter(run, chosen, setup, recompute=chosen.recomputes and not compiled)
    except UserError as error:
        run.tell(f"note: the placement stays, as there is no plan to compare the run with: {error}")
        return None


def write_folder(config: Config, run_dir: str, model: nn.Module) -> None:
    """Write what the run is, so that it can be resumed and exported without its sources."""
    folder = Path(run_dir)
    Folder(folder / "checkpoints").sweep()
    write_text(folder / "config.json", json.dumps(to_dict(config), indent=2) + "\n")
    write_text(folder / JOB_FILE, job_name())
    source_files.keep(config, model, folder)


def choose_run(config: Config, options: RunOptions, traced: Traced | str) -> Chosen:
    """Return the config with what `--auto` chooses, the same on all ranks. Collective."""
    if not options.auto and not adapts(config, options):
        return Chosen(config)
    if config.model.external and isinstance(traced, str):
        asked, instead = "--auto", "--stage and --offload instead of --auto"
        if not options.auto:
            asked, instead = "train.adapt", "--set train.adapt=false"
        raise UserError(f"{asked}: {config.model.source}: {traced}", hint=instead)
    setup = run_setup(config)
    gathered = functools.partial(gather_values, stage="agreeing on the machine")
    model = None if isinstance(traced, str) else traced
    return choose_together(config, options, setup, device_room(config.train.gpu_memory, setup), gathered, model)


def refuse_check_of_masks(config: Config, options: RunOptions) -> None:
    """Raise if the check cannot hold: with tensor parallelism, heads on different ranks draw different dropout."""
    if options.check and config.parallel.tp > 1 and config.model.dropout > 0:
        raise UserError(
            f"--check with tp {config.parallel.tp} and dropout {config.model.dropout:g}: heads on other ranks draw "
            "other masks than in one process, so the losses differ",
            hint="--set model.dropout=0",
        )


def refuse_overwriting(options: RunOptions) -> None:
    """Raise if a new run would use a folder that holds another run's checkpoints."""
    saved = Folder(Path(options.run_dir) / "checkpoints").committed()
    if saved and not options.resume:
        raise UserError(
            f"{options.run_dir} holds the checkpoint of step {saved[0].step}: a new run there would replace it",
            hint="--resume goes on from it; or another --run-dir",
        )


# -- ending a run ------------------------------------------------------------------------------------------------------


def end_early(run: Run, stopped: str, reported: bool) -> None:
    """Close a run that was stopped, or had nothing left to train; say so, unless its JSON document is `reported`."""
    if not run.lines and dist.is_initialized():
        dist.barrier()  # no steps: another rank may still be opening a group, which needs this rank
    run.engine.close()
    if run.rank == 0:
        say(stopped or f"nothing is left to train: step {run.first - 1} of {run.config.train.steps} was saved")
        if run.options.json and not reported:
            steps = run.lines.num_steps
            show_json({"schema": 1, "run_dir": run.options.run_dir, "steps": steps, "stopped": stopped})


def summarise(run: Run, checked: dict[str, Any] | None, observer: Observer) -> None:
    """Say how a run ended and what its memory was, unless the observer has; its check's result in any case."""
    held = report.gather_memory(run.engine)
    if run.rank == 0 and not observer.reports:
        summary = report.summary(run.config, run.options, run.engine, run.lines, held, checked, observer.written)
        summary |= {"evaluation": run.between.evaluations.summary(), "notes": run.batches.notes}
        say(report.closing(summary))
        if run.options.json:
            show_json(summary)
    elif run.rank == 0 and checked is not None:
        say(report.check_line(checked))


def compare(run: Run, start: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Train the same steps from `start` in one process without sharding, on rank 0, and compare the losses."""
    config, batches, lines, replicas = run.config, run.batches, run.lines, run.engine.collectives.world
    alone = dist.new_group([0]) if dist.is_initialized() else None
    result = [0.0, 0.0]
    if run.rank == 0:
        passes = config.train.accumulate * replicas
        changes: dict[str, Any] = {"stage": 0, "accumulate": passes, "tp": 1, "shard_ranks": 0, "offload": ""}
        if config.activations.policy == AUTO:
            changes["recompute"] = True  # an unsharded model needs more memory than the choice was made for
        engine = make_engine(config, group=alone, **changes)
        engine.load_state_dict(start)
        for line in lines:
            total = torch.zeros((), dtype=torch.float64, device=engine.device)
            for loss in micro_steps(engine, batches, config, line.step, range(replicas), replicas, engine.device):
                total += loss

            engine.step()
            difference = abs(total.item() / passes - line.loss)
            result = [max(result[0], difference), max(result[1], difference / (abs(line.loss) or 1.0))]
    if dist.is_initialized():
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        shared = torch.tensor(result, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        result = shared.tolist()
    tolerance = 1e-4 if run.engine.precision.name == "fp32" else 2e-2
    return {
        "steps": len(lines),
        "largest_difference": result[0],
        "largest_relative_difference": result[1],
        "tolerance": tolerance,
        "equal": result[1] <= tolerance,
    }
