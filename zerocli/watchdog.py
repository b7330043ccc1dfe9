"""The watchdog: ends a run in which a collective, a transfer or a save is stuck, and says which, and who is missing.

All ranks begin the same collectives of an axis in one order and tell each other how many they have begun. So when one
has been open for too long, the ranks whose count is below its number have not arrived, and those that have stopped
telling altogether do not run, or cannot be reached. A rank that has not arrived but moves (its update waits for a
slow disk, which a save is writing to) is waited for: it has a watchdog of its own.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from tiers.transfer import WAITED_FOR
from zerocli.beats import Beat, Beats, lost_ranks, no_store
from zerocli.checkpoint.progress import Progress
from zerocli.comm import Issued, Severed
from zerocli.console import say
from zerocli.engine import Engine
from zerocli.job import EXIT_FAILURE
from zerocli.lost import PATIENCE_SECONDS, standing, within
from zerocli.worker import record_failure


class Shared(Protocol):
    """What ranks go through together, in one order: an axis' collectives, or the stages of saves."""

    issued: int
    open: deque[Issued]
    moved: float


@dataclass(frozen=True)
class Axis:
    """Ranks that go through something together, by their global numbers."""

    name: str
    shared: Shared
    ranks: tuple[int, ...]

    def absent(self, said: dict[int, Beat], silent: set[int], number: int, waited: float) -> str:
        """Say which ranks have not come to the `number`-th; nothing if whoever holds it up is on its way.

        `waited` is for how long this rank has: who moved in the second half of that is only slow.
        """
        speaking = {rank: beat for rank, beat in said.items() if rank not in silent}
        gone = [f"rank {rank} does not answer" for rank in sorted(silent)]
        if not gone and any(beat.alone and beat.idle < waited / 2 for beat in speaking.values()):
            return ""  # a save goes on, which updates wait for, and other ranks for these
        saves = isinstance(self.shared, Progress)  # who came, and does its part alone (the commit), holds it up too
        late = {
            rank: beat
            for rank, beat in speaking.items()
            if rank in self.ranks and (beat.counts.get(self.name, 0) < number or (saves and beat.alone))
        }
        stuck = [
            f"rank {rank} had not arrived ({beat.doing})" for rank, beat in late.items() if beat.idle >= waited / 2
        ]
        if gone or stuck:
            return "; ".join([*gone, *stuck])
        return "" if late else "all ranks had arrived: the link between them is stuck"


class Watchdog(threading.Thread):
    """Looks at an engine's collectives, transfers and saves until it is closed; `limit` in seconds, 0 is never."""

    def __init__(self, engine: Engine, limit: float, end: Callable[[str], None] | None = None) -> None:
        super().__init__(name="zerocli-watchdog", daemon=True)
        self._limit, self._end = limit, end or end_process
        self._interval = min(1.0, limit / 20)
        # Asking around takes this long at most; it begins before the limit so that the answer is there in time.
        self._lead = 2 * PATIENCE_SECONDS + 3 * self._interval
        self._closed = threading.Event()
        self._axes = [
            Axis(name, axis, tuple(dist.get_process_group_ranks(axis.group or dist.group.WORLD)))
            for name, axis in (("data", engine.collectives), ("tensor", engine.tensor_parallel))
            if axis.world > 1
        ]
        self._saves: Progress | None = None
        self._last_words: tuple[str, bool] = ("", False)
        self._beats = Beats(dist.get_rank(), engine.ranks) if self._axes and limit else None

    def watch(self, saves: Progress) -> None:
        """Look at a run's saves as well."""
        self._saves = saves
        if self._beats is not None:
            self._axes = [*self._axes, Axis("saves", saves, self._beats.ranks)]

    def __enter__(self) -> Watchdog:
        if self._limit:
            self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._beats is not None:
            self._say_why(str(error).partition("\n")[0], isinstance(error, Severed))
            if isinstance(error, Severed):
                error.missing = self._who_is_gone(self._beats)
        self._closed.set()
        if self._limit:
            self.join(PATIENCE_SECONDS)

    def run(self) -> None:
        publisher = threading.Thread(target=self._publish, name="zerocli-heartbeat", daemon=True)
        publisher.start()
        while not self._closed.wait(self._interval):
            text = self._stuck_transfer() or self._stuck_save() or self._stuck_axis()
            if text and not self._closed.is_set():
                self._say_why(text, by_loss=False)
                self._end(text)
                return
        publisher.join(self._interval + PATIENCE_SECONDS)

    # -- what is stuck ---------------------------------------------------------------------------------------------

    def _stuck_transfer(self) -> str:
        for transfer, since in list(WAITED_FOR.values()):
            seconds = time.monotonic() - since
            if seconds > self._limit:
                what = transfer.what or "states"
                size = f"{transfer.nbytes} bytes, {transfer.tier}"
                return f"a transfer of {what} ({size}) has been stuck for {seconds:.0f} s"
        return ""

    def _stuck_save(self) -> str:
        """Say what this rank's save is stuck in by itself: nothing came through, however little, for the limit."""
        saves = self._saves
        what, seconds = (saves.alone, time.monotonic() - saves.moved) if saves is not None else ("", 0.0)
        where = f" on rank {self._beats.rank}" if self._beats is not None else ""
        return f"{what}, has been stuck for {seconds:.0f} s{where}" if what and seconds > self._limit else ""

    def _stuck_axis(self) -> str:
        for axis in self._axes:
            itself = self._saves is not None and axis.shared is self._saves and self._saves.alone
            if not itself and (text := self._stuck_together(axis)):
                return text
        return ""

    def _stuck_together(self, axis: Axis) -> str:
        entry = oldest_open(axis.shared)
        since = entry.since if entry is not None else math.inf
        waited = time.monotonic() - since
        if entry is None or waited <= max(self._limit / 4, self._limit - self._lead):
            return ""
        assert self._beats is not None
        heard = self._beats.ask_twice(self._pause)
        absent = axis.absent(*heard, entry.number, waited) if heard is not None else no_store(self._beats)
        if not absent:  # on its way: it is asked again, but not at once, by every rank of a large job
            self._closed.wait(self._limit / 20)
            return ""
        self._closed.wait(max(0.0, since + self._limit - time.monotonic()))
        if entry.over or entry.since > since or self._closed.is_set():
            return ""  # it came, or its host left it, while we asked around
        seconds = time.monotonic() - since
        if not entry.kind:  # a stage of a save
            return f"{entry}, has been stuck for {seconds:.0f} s: {absent}"
        return f"{entry} has been stuck for {seconds:.0f} s (collective {entry.number} of this run): {absent}"

    # -- what the others hear --------------------------------------------------------------------------------------

    def _publish(self) -> None:
        while self._beats is not None and not self._beats.gone and not self._closed.wait(self._interval):
            self._beats.say(self._beat())

    def _beat(self) -> Beat:
        shared, moment = [axis.shared for axis in self._axes], time.monotonic()
        entries = [entry for each in shared if (entry := oldest_open(each)) is not None]
        waiting = [f"waiting for a transfer of {t.what or 'states'}" for t, _ in list(WAITED_FOR.values())]
        alone = self._saves.alone if self._saves is not None else ""
        inside = [f"in {entry}" for entry in sorted(entries, key=lambda entry: entry.since)]
        after = f"after collective {max(each.issued for each in shared)}"
        return Beat(
            time=moment,
            idle=moment - max(each.moved for each in shared),
            counts={axis.name: axis.shared.issued for axis in self._axes},
            doing=next(iter([*waiting, *inside, *([f"in {alone}"] if alone else [])]), after),
            alone=alone,
            ended=self._last_words[0],
            by_loss=self._last_words[1],
        )

    def _say_why(self, text: str, by_loss: bool) -> None:
        self._last_words = (text[:200], by_loss)
        beats = self._beats
        if beats is not None:
            within(PATIENCE_SECONDS, lambda: beats.say(self._beat()))

    def _who_is_gone(self, beats: Beats) -> str:
        """Return who is gone; nothing if a launcher, who knows, wants this rank to end before it has found out."""
        hurry = threading.Event()
        here = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, lambda *_: hurry.set()) if here else None
        try:
            found = lost_ranks(beats, lambda: hurry.wait(3 * self._interval))
        finally:
            if here:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        return "" if hurry.is_set() else found

    def _pause(self) -> None:
        self._closed.wait(3 * self._interval)


def oldest_open(shared: Shared) -> Issued | None:
    """Return the collective that has held this rank up the longest; its own thread goes on adding to them meanwhile."""
    while True:
        try:
            waited_for = [entry for entry in shared.open if not entry.over and entry.since < math.inf]
            return min(waited_for, key=lambda entry: entry.since, default=None)
        except RuntimeError:  # changed while we looked
            continue


def end_process(text: str, run_dir: str = "") -> None:
    """Tell the launcher and the log why, and what is saved, and end this rank: its main thread will not come back."""
    fact, hint = standing(run_dir) if run_dir else ("", "")
    lines = [f"error: {'; '.join(filter(None, (text, fact)))}", *([f"try: {hint}"] if hint else [])]
    lines.append("try: --set train.watchdog=SECONDS for a longer limit, if it was only slow")

    def tell() -> None:
        if not record_failure("\n".join(lines), EXIT_FAILURE):
            say("\n".join(lines))

    within(PATIENCE_SECONDS, tell)  # the run folder's own disk may be what is stuck
    os._exit(EXIT_FAILURE)
