"""The steps of a run: batches through the engine, one line of metrics per step, saves when they are due."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zerocli.checkpoint.best import Best
from zerocli.checkpoint.saver import Saver
from zerocli.config import Config, to_dict
from zerocli.config.options import RunOptions
from zerocli.console import quoted, say
from zerocli.data.batches import Batch, Batches, Prefetcher
from zerocli.engine.engine import Engine
from zerocli.errors import FAILURE, UserError
from zerocli.garbage import long_lived
from zerocli.models.lora import idle_note
from zerocli.profile.lines import History, Line
from zerocli.run.between_steps import BetweenSteps
from zerocli.run.output import report
from zerocli.run.output.metrics import MetricsFile, Recorder
from zerocli.run.output.stragglers import Stragglers
from zerocli.run.output.writers import Writers
from zerocli.run.processes.launch import saves
from zerocli.run.processes.preempt import Preemption, outlive_failures
from zerocli.run.processes.watchdog import Watchdog

if TYPE_CHECKING:
    from zerocli.run.adapting import PlacementAdapter


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


def micro_steps(
    engine: Any, batches: Batches, config: Config, step: int, replicas: range, num_replicas: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Run the micro-steps that some of all data-parallel ranks have in a step, one after the other; yield each loss."""
    for micro in range(config.train.accumulate):
        for replica in replicas:
            batch = batches.batch(step, micro, replica, num_replicas)
            weight = batches.weight(step, micro, replica, num_replicas)
            seeds = (config.train.seed, step, micro, replica)
            yield micro_step(engine, tuple(part.to(device) for part in batch), seeds, weight)


@dataclass
class Run:
    """One rank's part of a run, opened: its state is that before step `first`."""

    config: Config
    options: RunOptions
    engine: Engine
    batches: Batches
    rank: int
    first: int
    between: BetweenSteps
    watchdog: Watchdog
    hosts: tuple[str, ...] = ()
    """The node of each rank, on rank 0, if that is known."""
    lines: History = field(default_factory=History)
    """One per step that is done, of which the newest are kept."""
    adapter: PlacementAdapter | None = None
    """What changes the placement where steps measure other than what was planned."""

    @property
    def last(self) -> int:
        steps, check = self.config.train.steps, self.options.check
        return min(steps, check) if check else steps

    def tell(self, text: str) -> None:
        if self.rank == 0:
            say(text)


def run_steps(run: Run) -> str:
    """Train all steps, adding a line for each; return why the run was stopped, if it was.

    Ranks that split a layer between them see the same data and random numbers.
    """
    last = run.last
    ended = run.between.evaluations.exhausted(run.config.train.patience)
    if ended:  # by the evaluations before the step that is resumed
        last = run.first - 1
        run.tell(ended)
    with long_lived(), contextlib.ExitStack() as stack:
        loop = Loop(run, last, stack)
        for step in range(run.first, last + 1):
            loop.train(step)
            if loop.finish_step(step):
                break
        loop.finish()
    return loop.stopped


class Loop:
    """Trains step by step. After each: its line, then what is due of evaluations, samples and saves."""

    def __init__(self, run: Run, last: int, stack: contextlib.ExitStack) -> None:
        """Open files, the saver, the data's thread and the progress bar; `stack` closes what needs it."""
        self.stopped = ""
        """Why the run stops before its last step and can be resumed, if it does."""
        self._run, self._last = run, last
        config, engine, first = run.config, run.engine, run.first
        replicas = engine.collectives.world
        self._metrics = MetricsFile(Path(run.options.run_dir) / "metrics.jsonl", say) if run.rank == 0 else None
        self._best = Best(run.options.run_dir) if config.checkpoint.best else None
        if self._best is not None and run.rank == 0:
            self._best.resume(first - 1, [asdict(row) for row in run.between.evaluations.rows])
        self._saver = self._open_saver() if saves(config) else None
        if self._metrics is not None and config.train.log_to:
            about = (run.options.run_dir, first, self._metrics.last_step, to_dict(config))
            run.between.writers = stack.enter_context(Writers.open(config.train.log_to, *about))
        loader = Prefetcher(run.batches, first, engine.collectives.rank, replicas, engine.device, last)
        self._loader = stack.enter_context(loader)
        self._progress = stack.enter_context(report.Progress(last, config.train.log_every, active=run.rank == 0))
        saver = self._saver
        self._preemption = Preemption(config.checkpoint.time_limit, lambda: saver.longest_seconds if saver else 0.0)
        if saver is not None:
            run.watchdog.watch(saver.progress)
            outlive_failures()
        asks = self._preemption.wants_stop if saver is not None else (lambda: False)
        tokens = config.train.batch * config.train.accumulate * replicas * config.train.seq
        adapter, stragglers = run.adapter, Stragglers(run.hosts, run.tell)
        shares = tuple if adapter is None else adapter.shares
        if adapter is not None and saver is not None:
            adapter.is_saving = lambda: saver.busy
        self._recorder = Recorder(engine, tokens, lambda: loader.waited_seconds, asks, stragglers, shares)

    def _open_saver(self) -> Saver:
        """Return what saves the run. Collective."""
        checkpoint = self._run.config.checkpoint
        return Saver(
            self._run.engine,
            Path(self._run.options.run_dir) / "checkpoints",
            asynchronous=checkpoint.async_,
            buffer_nbytes=checkpoint.buffer,
            keep=checkpoint.keep,
            keep_every=checkpoint.keep_every,
            best=self._best,
            say=self._run.tell,
        )

    def train(self, step: int) -> None:
        """Run the micro-steps of a step, and its update."""
        engine, accumulate, adapter = self._run.engine, self._run.config.train.accumulate, self._run.adapter
        batches = itertools.islice(self._loader, accumulate)
        if adapter is not None and adapter.retries(step):
            held = list(batches)
            total = adapter.attempt(step, lambda: self._micro_steps(step, held))
        else:
            total = self._micro_steps(step, batches)
        self._keep(self._recorder.record(engine.step(), total / accumulate))
        if step == self._run.first:
            idle = idle_note(engine.model)
            for note in (*engine.hooks.blocks.notes, *engine.activations.notes, *([idle] if idle else [])):
                self._run.tell(note)

    def _micro_steps(self, step: int, batches: Iterable[Batch]) -> torch.Tensor:
        """Run the forwards and backwards of a step; return the sum of their losses."""
        engine, seed, data = self._run.engine, self._run.config.train.seed, self._run.batches
        replica, replicas = engine.collectives.rank, engine.collectives.world
        total = torch.zeros((), device=engine.device)
        for micro, batch in enumerate(batches):
            weight = data.weight(step, micro, replica, replicas)
            total += micro_step(engine, batch, (seed, step, micro, replica), weight)
        return total

    def finish_step(self, step: int) -> bool:
        """Do what is due after a step; return whether the run ends with it."""
        if self._run.adapter is not None and step < self._last:
            self._adapt(self._run.adapter, step)
        ended = self._evaluate(step)
        checkpoint, saver = self._run.config.checkpoint, self._saver
        if ended:
            if saver is not None:
                self._save(step)
            self._run.tell(f"{ended}{'; it is saved' if saver is not None else ''}")
            return True
        if saver is None:
            return False
        if step == self._last or (checkpoint.every and step % checkpoint.every == 0):
            self._save(step)
        if self._recorder.stopping and step < self._last:
            self._save(step)
            self.stopped = f"stopped after step {step} ({self._preemption.reason}), which is saved"
        return bool(self.stopped)

    def finish(self) -> None:
        """Write what is left, and wait for the last save; raise UserError if it failed, so that nobody relies on it."""
        self._keep(self._recorder.flush())
        if (saver := self._saver) is not None:
            saver.close()
            self._run.engine.verify()
            if saver.lost is not None:
                raise saver.lost
            if saver.failure is not None:
                hint = f"room on the disk, then --resume --run-dir {quoted(self._run.options.run_dir)}"
                raise UserError(saver.failure, hint=hint, exit_code=FAILURE)
        if self._metrics is not None:
            self._metrics.close()

    def _evaluate(self, step: int) -> str:
        """Evaluate and sample if that is due; return why the run ends, if evaluations have stopped improving."""
        between = self._run.between
        if not between.due(step, self._last):
            return ""
        self._keep(self._recorder.flush())
        with self._recorder.leaving_out():
            improved = between.run(step, self._last)
        if self._run.adapter is not None:
            self._run.adapter.disturbed = True
        if self._best is not None and improved is not None:
            self._best.expect(asdict(improved))
            self._save(step)
        return between.evaluations.exhausted(self._run.config.train.patience) if step < self._last else ""

    def _adapt(self, adapter: PlacementAdapter, step: int) -> None:
        """Plan again if steps have measured other than what was planned, and move the states if that pays."""
        reason = adapter.observe(step, self._recorder.shared)
        change = adapter.plan_again(step, self._last - step, reason) if reason else None
        if change is None:
            return
        self._keep(self._recorder.flush())
        if self._saver is not None:
            self._saver.wait()
        with self._recorder.leaving_out():
            adapter.change(step, change)

    def _keep(self, line: Line | None) -> None:
        """Write a step's line, once its numbers have arrived."""
        if line is None:
            return
        if self._run.adapter is not None:
            line = replace(line, adapted=self._run.adapter.before.pop(line.step, ""))
        self._run.lines.append(line)
        if self._metrics is not None:
            self._metrics.write(line)
            self._run.between.writers.step(line)
        self._progress.show(line)
        stop_if_broken(self._run.config, line, self._saver)

    def _save(self, step: int) -> None:
        """Start saving a step, unless that has been done; all lines up to it are on the disk before."""
        saver, batches = self._saver, self._run.batches
        assert saver is not None
        if saver.asked == step:
            return
        self._keep(self._recorder.flush())
        if self._metrics is not None:
            self._metrics.sync()
        samples = batches.seen(step, self._run.engine.collectives.world)
        about = {"samples": samples, "windows": batches.num_windows, "kind": batches.kind}
        saver.save(step, {"config": to_dict(self._run.config), **about})


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
        hint = "a lower --lr, or --set train.on_nan=continue"
        if line.step == 1 and config.train.init_from and not math.isfinite(line.loss):
            hint = (
                f"another copy of the weights in {quoted(config.train.init_from)}: nothing was trained before this loss"
            )
        raise Diverged(
            f"{what} at step {line.step} (lr {line.lr:.3g}); the step was not applied; {saved}",
            hint=hint,
            exit_code=FAILURE,
        )
