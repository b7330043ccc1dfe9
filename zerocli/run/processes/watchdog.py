"""The watchdog: ends a run whose start, collective, transfer or save is stuck, and reports which ranks are missing.

All ranks begin the same collectives of an axis in one order and publish how many they have begun. So when a collective
has been open for too long, the ranks whose count is below its number have not arrived, and ranks whose heartbeats have
stopped are dead or unreachable. A rank that has not arrived but makes progress (its update waits for a slow disk that
a save is writing to) is waited for: its own watchdog monitors it.

A rank of this host that is gone needs no limit: its process can be seen, and who waits for it ends. So does a rank that
was told to stop in its start and waits for one that does not answer.

It runs from the moment all ranks have come to their store: a run's start, like a save, is a sequence of stages, in each
of which a rank works by itself or waits for the others.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist

from tiers.transfer import WAITED_FOR
from zerocli.console import say
from zerocli.engine.engine import Engine
from zerocli.errors import FAILURE
from zerocli.ranks.issued import Issued
from zerocli.ranks.loss import Severed, severed
from zerocli.ranks.startup import STARTUP, Progress
from zerocli.ranks.store import cloned
from zerocli.ranks.words import said_of
from zerocli.ranks.worker import record_failure, within
from zerocli.run.folders.folder import standing
from zerocli.run.processes.heartbeats import (
    PATIENCE_SECONDS,
    Heartbeat,
    Heartbeats,
    lost_here,
    lost_ranks,
    no_store,
    silent_words,
)
from zerocli.run.processes.preempt import was_told

START_SECONDS = 30.0
"""Minimum wait for a rank that has sent no heartbeat yet: processes do not all start at once."""


LOST_SECONDS = 1.0
"""How long a rank waits for one that is gone: what that one has sent may be on its way, and be all that is awaited."""
MIN_PAUSE_SECONDS = 0.5
RANKS_PER_SECOND = 4096
"""Heartbeats per second at most: those of one host are one message to the store."""


class Shared(Protocol):
    """A sequence that ranks go through together, in one order: an axis' collectives, or the stages of saves."""

    issued: int
    open: deque[Issued]
    moved: float


@dataclass(frozen=True)
class Axis:
    """Ranks that go through a shared sequence, by their global numbers."""

    name: str
    shared: Shared
    ranks: tuple[int, ...]

    def absent(
        self,
        said: dict[int, Heartbeat],
        silent: set[int],
        number: int,
        waited: float,
        places: Callable[[Sequence[int]], str] = lambda ranks: "",
    ) -> str:
        """Return, in words, which ranks have not reached entry `number`; nothing if the late ranks still make progress.

        This rank has waited for `waited` seconds; a rank that made progress in the second half of that is only slow.
        `places` says on which nodes ranks are.
        """
        speaking = {rank: beat for rank, beat in said.items() if rank not in silent}
        gone = silent_words({rank: said.get(rank) for rank in sorted(silent)})
        if not gone and any(beat.alone and beat.idle < waited / 2 for beat in speaking.values()):
            return ""  # a save makes progress; updates may wait for it, and ranks for those
        staged = isinstance(self.shared, Progress)  # a rank that arrived may still work alone (the commit)
        late = {
            rank: beat
            for rank, beat in speaking.items()
            if rank in self.ranks and (beat.counts.get(self.name, 0) < number or (staged and beat.alone))
        }
        stuck = {rank: f"had not arrived ({beat.doing})" for rank, beat in late.items() if beat.idle >= waited / 2}
        if gone or stuck:
            return "; ".join(filter(None, (gone, said_of(stuck)))) + places(sorted({*silent, *stuck}))
        just_came = any(beat.idle < waited / 2 for rank, beat in speaking.items() if rank in self.ranks)
        return "" if late or just_came else "all ranks had arrived: the link between them is stuck"


class Watchdog(threading.Thread):
    """Monitors a run's start, collectives, transfers and saves until it is closed; `limit` in seconds, 0 is never.

    It begins with the start: `connect` gives it the ranks' store, and `attach` the engine. `run_dir` is the run's.
    """

    def __init__(self, limit: float, run_dir: str = "", end: Callable[[str], None] | None = None) -> None:
        super().__init__(name="zerocli-watchdog", daemon=True)
        self._limit, self._run_dir, self._end = limit, run_dir, end or self._end_process
        self._interval = interval_of(limit, 1)
        self._closed = threading.Event()
        self._axes: list[Axis] = []
        self._engine_axes: list[Axis] = []
        self._saves: Progress | None = None
        self._last_words: tuple[str, bool] = ("", False)
        self._heartbeats: Heartbeats | None = None
        self._ending = False
        self._awaited: tuple[Issued | None, float, float] = (None, 0.0, 0.0)
        self.missing = ""
        """The ranks that were gone when this rank failed because it had lost another."""
        self.reports = True
        """Whether this rank shows what all have found: one of them does."""

    def connect(self, rank: int, world: int, store: dist.Store | None = None) -> None:
        """Also monitor the run's start, and exchange heartbeats through `store` or the process group's store."""
        if world > 1 and self._limit and self._heartbeats is None:
            self._axes = [*self._axes, Axis("start", STARTUP, tuple(range(world)))]
            self._interval = interval_of(self._limit, world)
            # torch has no public accessor for the default store.
            own = cloned(dist.distributed_c10d._get_default_store() if store is None else store)
            self._heartbeats = Heartbeats(rank, range(world), own, self._interval)
            STARTUP.restart_wait()  # so far this rank waited only for the store
            self._heartbeats.say(self._heartbeat())

    @property
    def _pause_seconds(self) -> float:
        """How long a rank may say nothing before it counts as silent; a busy machine runs no thread in time."""
        return max(MIN_PAUSE_SECONDS, 3 * self._interval)

    def attach(self, engine: Engine) -> None:
        """Also monitor an engine's collectives; only its axes need to be open. A second call adds those made since."""
        others = [axis for axis in self._axes if axis not in self._engine_axes]
        self._engine_axes = [
            Axis(name, axis, tuple(dist.get_process_group_ranks(axis.group or dist.group.WORLD)))
            for name, axis in engine.axes.items()
            if axis.world > 1
        ]
        self._axes = [*others, *self._engine_axes]

    def watch(self, saves: Progress) -> None:
        """Also monitor a run's saves."""
        self._saves = saves
        if self._heartbeats is not None:
            self._axes = [*self._axes, Axis("saves", saves, self._heartbeats.ranks)]

    def __enter__(self) -> Watchdog:
        if self._limit:
            self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Stop monitoring; publish the error that this rank ends with. Further calls do nothing."""
        if self._closed.is_set():
            return
        self._ending = True
        if self._heartbeats is not None and error is None:
            self._heartbeats.leave()
        elif error is not None and self._heartbeats is not None:
            gone = severed(error)
            self._say_why(str(error).partition("\n")[0], gone is not None)
            if gone is not None:
                self.missing = self._who_is_gone(self._heartbeats)
                self.reports = self._claim_report()
            if isinstance(error, Severed):
                error.missing = self.missing
        self._closed.set()
        if self.is_alive():
            self.join(PATIENCE_SECONDS)

    def run(self) -> None:
        publisher = threading.Thread(target=self._publish, name="zerocli-heartbeat", daemon=True)
        publisher.start()
        while not self._closed.wait(self._interval):
            alone = self._stuck_transfer() or self._stuck_alone()
            lost = "" if alone else self._lost_here() or self._lost_in_start()
            text = alone or lost or next(filter(None, map(self._stuck_together, self._together())), "")
            if text and not self._ending:
                self._may_be_slow = not lost
                self._say_why(text, by_loss=False)
                self.reports = self._claim_report() or bool(alone)
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

    def _stuck_alone(self) -> str:
        """Return what this rank is stuck in by itself, without any progress for the limit."""
        where = f" on rank {self._heartbeats.rank}" if self._heartbeats is not None else ""
        for what, moved in self._alone():
            seconds = time.monotonic() - moved
            if seconds > self._limit:
                return f"{staged(what)} has been stuck for {seconds:.0f} s{where}"
        return ""

    def _alone(self) -> list[tuple[str, float]]:
        """Return the work that this rank does by itself, and when it last made progress."""
        found = [(self._saves.alone, self._saves.moved)] if self._saves is not None and self._saves.alone else []
        # During its start a rank may be in an engine's collective, where it is not alone, or wait for a transfer.
        inside = any(oldest_open(axis.shared) is not None for axis in self._engine_axes)
        if STARTUP.alone and not inside:
            others = [axis.shared.moved for axis in self._engine_axes]
            found.append(
                (STARTUP.alone, max([STARTUP.moved, *others, *(since for _, since in list(WAITED_FOR.values()))]))
            )
        return found

    def _lost_here(self) -> str:
        """Return which ranks of this host are gone, if this rank has waited for one of them for a while."""
        beats, now = self._heartbeats, time.monotonic()
        gone = beats.gone_here() if beats is not None else {}
        waits = [oldest_open(axis.shared) for axis in self._together() if gone.keys() & set(axis.ranks)]
        entry = next(filter(None, waits), None)
        if entry is None or beats is None or self._ending:
            self._awaited = (None, 0.0, 0.0)
            return ""
        if self._awaited[:2] != (entry, entry.since):
            self._awaited = (entry, entry.since, now)
        if now - self._awaited[2] < LOST_SECONDS or entry.over:
            return ""
        return f"another rank was lost during {staged(str(entry))}: {lost_here(beats, by_loss=True)}"

    def _lost_in_start(self) -> str:
        """Return which ranks do not answer, if this one was told to stop and waits for the others in its start."""
        entry, beats = oldest_open(STARTUP), self._heartbeats
        waits = entry is not None and time.monotonic() - entry.since > 2 * self._pause_seconds
        if not was_told() or entry is None or beats is None or STARTUP.alone or not waits:
            return ""
        since, heard = entry.since, beats.ask_twice(self._pause)
        who = no_store() if heard is None else silent_words({rank: heard[0].get(rank) for rank in heard[1]})
        if not who or entry.over or entry.since > since:
            return ""
        return f"another rank was lost during {staged(str(entry))}: {who}"

    def _together(self) -> list[Axis]:
        """Return the axes in which this rank may wait for others."""
        return [axis for axis in self._axes if not (isinstance(axis.shared, Progress) and axis.shared.alone)]

    def _stuck_together(self, axis: Axis) -> str:
        entry = oldest_open(axis.shared)
        since = entry.since if entry is not None else math.inf
        waited = time.monotonic() - since
        lead = 3 * PATIENCE_SECONDS + 2 * self._pause_seconds  # querying the others takes at most this long
        if entry is None or waited <= max(self._limit / 4, self._limit - lead):
            return ""
        assert self._heartbeats is not None
        heard = self._heartbeats.ask_twice(self._pause)
        if heard is not None and waited < START_SECONDS and len(heard[0]) + 1 < len(self._heartbeats.ranks):
            return ""  # a rank has sent no heartbeat: it may still be starting
        if heard is None:
            absent = no_store()
        else:
            absent = axis.absent(*heard, entry.number, waited, self._heartbeats.places)
        if not absent:  # late ranks make progress: ask again later, to spare the store in a large job
            self._closed.wait(self._limit / 20)
            return ""
        self._closed.wait(max(0.0, since + self._limit - time.monotonic()))
        if entry.over or entry.since > since or self._closed.is_set():
            return ""  # it completed, or its host stopped waiting, during the query
        seconds = time.monotonic() - since
        if not entry.kind:  # a stage of a save, or of the start
            return f"{staged(str(entry))} has been stuck for {seconds:.0f} s: {absent}"
        return f"{entry} has been stuck for {seconds:.0f} s (collective {entry.number} of this run): {absent}"

    # -- what the others hear --------------------------------------------------------------------------------------

    def _publish(self) -> None:
        while not self._closed.wait(self._interval):
            if self._heartbeats is not None and not self._heartbeats.gone:
                self._heartbeats.say(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        shared, moment = [axis.shared for axis in self._axes], time.monotonic()
        together = [each for each in shared if not (isinstance(each, Progress) and each.alone)]
        entries = [entry for each in together if (entry := oldest_open(each)) is not None]
        waiting = [f"waiting for a transfer of {t.what or 'states'}" for t, _ in list(WAITED_FOR.values())]
        alone = next((what for what, _ in self._alone()), "")
        inside = [f"in {entry}" for entry in sorted(entries, key=lambda entry: entry.since)]
        count = max((axis.shared.issued for axis in self._engine_axes), default=0)
        after = f"after collective {count}" if count else "between two stages of its start"
        return Heartbeat(
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
        beats = self._heartbeats
        if beats is not None:
            within(PATIENCE_SECONDS, lambda: beats.say(self._heartbeat()))

    def _who_is_gone(self, beats: Heartbeats) -> str:
        """Return which ranks are gone; nothing if our launcher, which knows, ends this rank first.

        torchrun and SLURM end ranks too, and do not say what is saved: this rank goes on until it has said it.
        """
        hurry = threading.Event()

        def note(*_: object) -> None:
            if "ZEROCLI_PARENT" in os.environ:
                hurry.set()

        here = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, note) if here else None
        try:
            found = lost_ranks(beats, lambda: hurry.wait(self._pause_seconds))
        finally:
            if here:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        return "" if hurry.is_set() else found

    def _claim_report(self) -> bool:
        """Return whether this rank reports what all have found; our own launcher shows one report in any case."""
        return "ZEROCLI_PARENT" in os.environ or self._heartbeats is None or self._heartbeats.claim_report()

    def _pause(self) -> None:
        self._closed.wait(self._pause_seconds)

    def _end_process(self, text: str) -> None:
        """Report the reason and what is saved to the launcher or the log, and end this rank: its main thread is stuck.

        Another rank may show it instead.
        """
        fact, hint = standing(self._run_dir) if self._run_dir else ("", "")
        lines = [f"error: {'; '.join(filter(None, (text, fact)))}", *([f"try: {hint}"] if hint else [])]
        if self._may_be_slow:
            lines.append("try: --set train.watchdog=SECONDS for a longer limit, if it was only slow")

        def tell() -> None:
            if not record_failure("\n".join(lines), FAILURE) and self.reports:
                say("\n".join(lines))

        within(PATIENCE_SECONDS, tell)  # the disk of the run folder may be what is stuck
        os._exit(FAILURE)


def interval_of(limit: float, ranks: int) -> float:
    """Return the seconds between two heartbeats of a rank; longer for many ranks, whose hosts share one store."""
    return min(limit / 20, max(1.0, ranks / RANKS_PER_SECOND))


def oldest_open(shared: Shared) -> Issued | None:
    """Return the open entry that this rank has waited for the longest; the main thread may add entries meanwhile."""
    while True:
        try:
            waited_for = [entry for entry in shared.open if not entry.over and entry.since < math.inf]
            return min(waited_for, key=lambda entry: entry.since, default=None)
        except RuntimeError:  # the deque changed during iteration
            continue


def staged(stage: str) -> str:
    """Return a stage's words as the subject of a sentence; those that contain a comma get a closing one."""
    return f"{stage}," if "," in stage else stage
