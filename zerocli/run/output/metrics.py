"""A run's metrics: one JSON line per step, never a partial one; values are read back from the device one step late."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from zerocli.engine.engine import Engine
from zerocli.engine.optimizer.step import StepResult
from zerocli.engine.streams import Readback, TimedEvent, WaitReading
from zerocli.errors import FAILURE, UserError
from zerocli.files import pwrite_all
from zerocli.profile.lines import Line, device_peak, fragmentation
from zerocli.regular_files import open_regular
from zerocli.run.output.stragglers import Stragglers

_Issued = tuple[StepResult, Readback, Readback, int, dict[str, dict[str, int]], WaitReading]
"""A step that was issued: its result, the values of all ranks together, those of each rank, how many of these are of
stragglers, bytes moved, waits."""


class Recorder:
    """Collects each step's values without stalling the device; a step's line is returned once the next is issued."""

    def __init__(
        self,
        engine: Engine,
        tokens_per_step: int,
        waited_for_data: Callable[[], float],
        asks_to_stop: Callable[[], bool],
        stragglers: Stragglers,
        shares: Callable[[], Sequence[float]],
    ) -> None:
        self._engine, self._tokens, self._stragglers = engine, tokens_per_step, stragglers
        self._num_ranks = engine.collectives.world * engine.tensor_parallel.world
        self._asks_to_stop, self._shares = asks_to_stop, shares
        self.shared: list[list[float]] = []
        """What each rank's `shares` returned in the step of the last line; the same on all ranks."""
        self.stopping = False
        """Whether any rank has asked to stop; becomes true at the same step on all ranks."""
        self._waited_for_data = waited_for_data
        self._axes = {"comm": engine.inside, "comm_across": engine.across, "comm_tp": engine.tensor_parallel}
        self._pending: _Issued | None = None
        self._num_lines = 0
        engine.waits.take()  # waits before the first step belong to no step
        engine.events.begin()
        self._since = TimedEvent(engine.device)

    def record(self, result: StepResult, loss: torch.Tensor) -> Line | None:
        """Record the step that was just issued; return the line of the previous one. Collective.

        Ranks add and compare what every step needs, in as many bytes for any number of them. Sums of fp32 losses are
        exact in fp64. They gather what is compared rank by rank: every few steps, or where a plan follows the machine.
        """
        engine, own = self._engine, self._stragglers.take()
        facts = [float(self._asks_to_stop()), *device_peak(engine).values(), fragmentation(engine)]
        sums, most = loss.double().reshape(1), torch.tensor(facts, dtype=torch.float64).to(loss.device)
        each = torch.tensor([*own, *self._shares()], dtype=torch.float64).to(loss.device)
        with engine.waits.waiting("collectives"):
            engine.reduce_control(sums, most)
            each = engine.gather_control(each) if each.numel() else each.view(0, 0)
        engine.waits.add("data", self._waited_for_data())
        of_step = torch.stack([result.grad_norm.double(), result.skipped.double()])
        together = Readback(torch.cat([sums, of_step, most]))
        now = (result, together, Readback(each), len(own), self._take_moved(), engine.waits.take())
        before, self._pending = self._pending, now
        return self._line(before) if before else None

    def _take_moved(self) -> dict[str, dict[str, int]]:
        return {name: axis.take_nbytes() for name, axis in self._axes.items()}

    def flush(self) -> Line | None:
        """Return the line of the last step. Collective."""
        if self._pending is not None:
            self._engine.verify()  # parts of its update may not have been issued yet
        before, self._pending = self._pending, None
        return self._line(before) if before else None

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Leave bytes, waits and seconds of what the body does out of the next step's line; call `flush` before."""
        assert self._pending is None
        engine = self._engine
        engine.synchronize()  # deferred parts of the last update are the next step's
        moved = self._take_moved()
        try:
            yield
        finally:
            self._take_moved()
            for name, axis in self._axes.items():
                axis.nbytes.update(moved[name])
            engine.waits.take()
            self._since = TimedEvent(engine.device)

    def _line(self, issued: _Issued) -> Line:
        result, together, readback, end, moved, waiting = issued
        losses, grad_norm, skipped, stops, *most = together.values().tolist()
        rows = readback.values()
        seconds, self._since = readback.reached.since(self._since), readback.reached
        self.stopping = self.stopping or bool(stops)
        *peaks, unused = map(int, most)
        slowest = self._stragglers.compare(rows[:, :end])
        self.shared = rows[:, end:].tolist()
        waits = waiting.seconds()
        if self._num_lines > 0:  # the first step of a start also compiles, and makes its buffers
            self._stragglers.add(result.step, seconds, waits)
        self._num_lines += 1
        return Line(
            step=result.step,
            loss=losses / self._num_ranks,
            grad_norm=grad_norm,
            lr=result.lr,
            tokens=self._tokens,
            seconds=seconds,
            tokens_per_second=self._tokens / seconds,
            peak=dict(zip(("hbm", "dram", "nvme"), peaks, strict=True)),
            fragmentation=unused,
            comm=moved["comm"],
            comm_across=moved["comm_across"],
            comm_tp=moved["comm_tp"],
            wait=waits,
            skipped=bool(skipped),
            slowest=slowest,
        )


class MetricsFile:
    """Appends whole lines to RUN/metrics.jsonl; removes a partial last line left by a killed run.

    A full disk does not end training: lines are buffered and written once there is room.
    """

    def __init__(self, path: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._path, self._say = path, say
        self._fd = open_regular(path, os.O_RDWR | os.O_CREAT)
        self._end = os.fstat(self._fd).st_size
        self._waiting = b""
        """Lines that are not in the file yet."""
        self._failed = False
        whole = _whole_nbytes(self._fd, self._end)
        if whole < self._end:
            self._end = whole
            os.ftruncate(self._fd, self._end)
        self.last_step = _last_step(self._fd, self._end)
        """The step of the last line that the file had when it was opened; 0 if there was none."""

    def write(self, line: Line) -> None:
        self._waiting += (json.dumps(line.as_dict()) + "\n").encode()
        self._try(self._append)
        self._failed = self._failed and bool(self._waiting)

    def sync(self) -> None:
        """Flush the written lines to disk, so that no checkpoint is ahead of its run's lines."""
        self._try(lambda: os.fsync(self._fd))
        self._refuse_if_gone()

    def close(self) -> None:
        """Write the buffered lines; raise OSError if that fails, UserError if the file is gone."""
        try:
            self._append()
            self._refuse_if_gone()
        finally:
            os.close(self._fd)

    def _refuse_if_gone(self) -> None:
        """Raise UserError if the path no longer names our open file: the run folder was removed."""
        try:
            there = os.lstat(self._path)
        except FileNotFoundError:
            there = None
        except OSError:  # a disk that fails now may recover later
            return
        if there is None or not os.path.samestat(there, os.fstat(self._fd)):
            raise UserError(
                f"{self._path.parent} was removed or replaced while the run was writing there: its metrics, and "
                "whatever it had saved, are gone",
                hint="the same command again, with another --run-dir",
                exit_code=FAILURE,
            )

    def _append(self) -> None:
        try:
            pwrite_all(self._fd, memoryview(self._waiting), self._end)
        except OSError:
            os.ftruncate(self._fd, self._end)  # the next line would be appended to the partial one
            raise
        self._end += len(self._waiting)
        self._waiting = b""

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError as error:
            if not self._failed:
                self._say(f"{self._path}: cannot write metrics ({error.strerror}); buffering and retrying")
            self._failed = True


def _whole_nbytes(fd: int, nbytes: int) -> int:
    """Return where the last whole line of a file ends, read backwards from its end as the file may be of any size."""
    end = nbytes
    while end:
        start = max(0, end - _TAIL_NBYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _last_step(fd: int, nbytes: int) -> int:
    start = _whole_nbytes(fd, max(0, nbytes - 1))
    try:
        return int(json.loads(os.pread(fd, min(nbytes - start, _TAIL_NBYTES), start))["step"])
    except (ValueError, TypeError, KeyError):
        return 0


_TAIL_NBYTES = 1 << 20
