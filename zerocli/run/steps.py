"""The steps of a run: batches through the engine, one line of metrics per step, saves when they are due."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from zerocli.checkpoint.best import Best
from zerocli.config import Config, to_dict
from zerocli.config.options import RunOptions
from zerocli.console import quoted, say
from zerocli.engine.engine import Engine
from zerocli.errors import FAILURE, UserError
from zerocli.profile.lines import Line
from zerocli.run import report
from zerocli.run.between import Between
from zerocli.run.data import Batch, Batches, Prefetcher
from zerocli.run.launch import saves
from zerocli.run.metrics import MetricsFile, Recorder
from zerocli.run.preempt import Preemption
from zerocli.run.watchdog import Watchdog
from zerocli.run.writers import Writers

if TYPE_CHECKING:
    from zerocli.checkpoint.saver import Saver


@contextlib.contextmanager
def long_lived() -> Iterator[None]:
    """Exclude all existing objects (the model, all of torch) from garbage collection while the body runs.

    A full collection takes a tenth of a second or more. Each rank runs it at a different time, and all others wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def micro_step(engine: Engine, batch: Batch, seeds: tuple[int, ...], weight: float | None = None) -> torch.Tensor:
    """Run one forward and backward with this micro-step's own random state; return its loss.

    `batch` is (tokens, targets), or (tokens, targets, positions) where attention must not cross documents. A `weight`
    multiplies the loss: see [Note: weights] in `data.py`.
    """
    torch.manual_seed(hash(seeds) & (2**63 - 1))
    loss: torch.Tensor = engine(*batch)
    if weight is not None:
        loss = loss * weight
    engine.backward(loss)
    return loss.detach()


def run_steps(
    config: Config,
    options: RunOptions,
    engine: Engine,
    batches: Batches,
    rank: int,
    first: int,
    lines: list[Line],
    watchdog: Watchdog,
    between: Between,
) -> str:
    """Train from step `first` on, adding one line per step; return why the run stopped early, if it did.

    Ranks that split a layer between them see the same data and random numbers.
    """
    train, checkpoint = config.train, config.checkpoint
    replica, replicas = engine.collectives.rank, engine.collectives.world
    steps = min(train.steps, options.check) if options.check else train.steps
    stopped, ended = "", between.evaluations.exhausted(train.patience)
    if ended:  # by the evaluations before the step that is resumed
        steps = first - 1
        tell(rank, ended)
    with contextlib.ExitStack() as stack:
        stack.enter_context(long_lived())
        metrics = MetricsFile(Path(options.run_dir) / "metrics.jsonl", say) if rank == 0 else None
        best = Best(options.run_dir) if checkpoint.best else None
        if best is not None and rank == 0:
            best.resume(first - 1, [asdict(row) for row in between.evaluations.rows])
        saver = make_saver(config, options, engine, rank, best) if saves(config) else None
        if metrics is not None and train.log_to:
            about = (options.run_dir, first, metrics.last_step, to_dict(config))
            between.writers = stack.enter_context(Writers.open(train.log_to, *about))
        if saver is not None:
            watchdog.watch(saver.progress)
        loader = stack.enter_context(Prefetcher(batches, first, replica, replicas, engine.device, steps))
        progress = stack.enter_context(report.Progress(steps, train.log_every, active=rank == 0))
        preemption = Preemption(checkpoint.time_limit, lambda: saver.longest_seconds if saver else 0.0)
        if saver is not None:
            stack.enter_context(preemption)
        tokens_per_step = train.batch * train.accumulate * replicas * train.seq
        asks = preemption.wants_stop if saver is not None else (lambda: False)
        recorder = Recorder(engine, tokens_per_step, lambda: loader.waited_seconds, asks)

        def keep(line: Line | None) -> None:
            if line is not None:
                lines.append(line)
                if metrics is not None:
                    metrics.write(line)
                    between.writers.step(line)
                progress.show(line)
                stop_if_broken(config, line, saver)

        def save(step: int) -> None:
            assert saver is not None
            if saver.asked == step:
                return
            keep(recorder.flush())
            if metrics is not None:
                metrics.sync()
            about = {"samples": batches.seen(step, replicas), "windows": batches.num_windows}
            saver.save(step, {"config": to_dict(config), **about})

        for step in range(first, steps + 1):
            total = torch.zeros((), device=engine.device)
            for micro in range(train.accumulate):
                weight = batches.weight(step, micro, replica, replicas)
                total += micro_step(engine, next(loader), (train.seed, step, micro, replica), weight)
            keep(recorder.record(engine.step(), total / train.accumulate))
            if step == first and rank == 0:
                for note in (*engine.hooks.blocks.notes, *engine.activations.notes):
                    say(note)
            if between.due(step, steps):
                keep(recorder.flush())
                with recorder.leaving_out():
                    improved = between.run(step, steps)
                if best is not None and improved is not None:
                    best.expect(asdict(improved))
                    save(step)
                ended = between.evaluations.exhausted(train.patience) if step < steps else ""
            if ended:
                if saver is not None:
                    save(step)
                tell(rank, f"{ended}{'; it is saved' if saver is not None else ''}")
                break
            if saver is not None and (step == steps or (checkpoint.every and step % checkpoint.every == 0)):
                save(step)
            if saver is not None and recorder.stopping and step < steps:
                save(step)
                stopped = f"stopped after step {step} ({preemption.reason}), which is saved"
                break
        keep(recorder.flush())
        if saver is not None:
            finish_saving(saver, engine, options)
        if metrics is not None:
            metrics.close()
    return stopped


def tell(rank: int, text: str) -> None:
    if rank == 0:
        say(text)


def make_saver(config: Config, options: RunOptions, engine: Engine, rank: int, best: Best | None = None) -> Saver:
    """Return what saves the run. Collective."""
    from zerocli.checkpoint.saver import Saver  # imports torch's checkpoints, which takes a second

    checkpoint = config.checkpoint
    return Saver(
        engine,
        Path(options.run_dir) / "checkpoints",
        asynchronous=checkpoint.async_,
        buffer_nbytes=checkpoint.buffer,
        keep=checkpoint.keep,
        keep_every=checkpoint.keep_every,
        best=best,
        say=say if rank == 0 else (lambda text: None),
    )


def finish_saving(saver: Saver, engine: Engine, options: RunOptions) -> None:
    """Wait for the last save; raise UserError if it failed, so that nobody relies on it."""
    saver.close()
    engine.verify()
    if saver.lost is not None:
        raise saver.lost
    if saver.failure is not None:
        hint = f"room on the disk, then --resume --run-dir {quoted(options.run_dir)}"
        raise UserError(saver.failure, hint=hint, exit_code=FAILURE)


class Diverged(UserError):
    """A loss that is not finite; all ranks have the same metrics, so all raise it after the same step."""


def stop_if_broken(config: Config, line: Line, saver: Saver | None = None) -> None:
    """End the run at a loss that is not finite, or at such gradients except in fp16, which lowers its scale."""
    broken = not math.isfinite(line.loss) or (line.skipped and config.train.precision != "fp16")
    if broken and config.train.on_nan == "stop":
        what = f"loss is {line.loss}" if not math.isfinite(line.loss) else "the gradients are not finite"
        if saver is not None:
            saver.wait()
        saved = f"step {saver.saved} is saved" if saver is not None and saver.saved else "no checkpoint was written"
        raise Diverged(
            f"{what} at step {line.step} (lr {line.lr:.3g}); the step was not applied; {saved}",
            hint="a lower --lr, or --set train.on_nan=continue",
            exit_code=FAILURE,
        )
