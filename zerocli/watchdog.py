"""The watchdog: ends a run in which a collective or a transfer is stuck, and says which, and who had not arrived.

Every rank tells the others, through the store that opened the process group, how many collectives it has begun. All
ranks begin the same ones in one order. So when one has been open for too long, the ranks whose count is below its
number have not arrived, and those that have stopped counting altogether do not run, or cannot be reached.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from tiers.transfer import WAITED_FOR
from zerocli.comm import Collectives, Issued
from zerocli.engine import Engine
from zerocli.launch import EXIT_FAILURE, record_failure

PATIENCE_SECONDS = 2.0
"""How long the store may take to answer when a rank asks for the others."""


@dataclass(frozen=True)
class Beat:
    """What a rank last said of itself."""

    time: float
    """By its own clock: only whether it moves on means something."""
    issued: int
    doing: str


class Axis:
    """One axis of ranks: its collectives, and what its ranks tell each other of them."""

    def __init__(self, collectives: Collectives, store: Any) -> None:
        self.collectives = collectives
        self.members = dist.get_process_group_ranks(collectives.group or dist.group.WORLD)
        self._store = dist.PrefixStore("zerocli-beats/" + "-".join(map(str, self.members)), store)

    def publish(self) -> None:
        """Tell the others how far this rank has come."""
        entry, issued = oldest_open(self.collectives), self.collectives.issued
        waiting = next((f"waiting for a transfer of {t.what}" for t, _ in list(WAITED_FOR.values())), "")
        doing = waiting or (f"in {entry}" if entry is not None else f"after collective {issued}")
        self._store.set(f"{self.collectives.rank}", f"{time.monotonic()} {issued} {doing}")

    def beats(self) -> dict[int, Beat] | None:
        """Return what each rank last said, None if the store does not answer."""
        found: dict[int, Beat] = {}
        answered = threading.Event()

        def ask() -> None:
            with contextlib.suppress(Exception):
                for rank in range(self.collectives.world):
                    if self._store.check([f"{rank}"]):
                        when, issued, doing = self._store.get(f"{rank}").decode().split(" ", 2)
                        found[rank] = Beat(float(when), int(issued), doing)
                answered.set()

        threading.Thread(target=ask, daemon=True).start()
        return dict(found) if answered.wait(PATIENCE_SECONDS) else None

    def absent(self, entry: Issued, pause: Callable[[], object]) -> str:
        """Say who has not come to a collective that is stuck."""
        before = self.beats()
        pause()
        now = self.beats()
        if before is None or now is None:
            return "the other ranks cannot be asked: rank 0, which keeps the store, does not answer"
        lines = []
        for rank, member in enumerate(self.members):
            beat, last = now.get(rank), before.get(rank)
            if rank == self.collectives.rank:
                continue
            if beat is None or (last is not None and beat.time == last.time):
                lines.append(f"rank {member} does not answer")
            elif beat.issued < entry.number:
                lines.append(f"rank {member} had not arrived ({beat.doing})")
        return "; ".join(lines) or "all ranks had arrived: the link between them is stuck"


class Watchdog(threading.Thread):
    """Looks at an engine's collectives and transfers until it is closed; `limit` in seconds, 0 is never."""

    def __init__(self, engine: Engine, limit: float, end: Callable[[str], None] | None = None) -> None:
        super().__init__(name="zerocli-watchdog", daemon=True)
        self._limit, self._end = limit, end or end_process
        self._interval = min(1.0, limit / 20)
        # Asking around takes this long at most; it begins before the limit so that the answer is there in time.
        self._lead = 2 * PATIENCE_SECONDS + 3 * self._interval
        self._closed = threading.Event()
        axes = (engine.collectives, engine.tensor_parallel)
        self._axes = [Axis(axis, _store()) for axis in axes if axis.world > 1]
        name_pieces(engine)

    def __enter__(self) -> Watchdog:
        if self._limit:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._limit:
            self.join(PATIENCE_SECONDS)

    def run(self) -> None:
        publisher = threading.Thread(target=self._publish, name="zerocli-heartbeat", daemon=True)
        publisher.start()
        while not self._closed.wait(self._interval):
            text = self._stuck_transfer() or next(filter(None, map(self._stuck_collective, self._axes)), "")
            if text and not self._closed.is_set():
                self._end(text)
                return
        publisher.join(self._interval + PATIENCE_SECONDS)

    def _publish(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone: others see that we no longer answer
            while not self._closed.wait(self._interval):
                for axis in self._axes:
                    axis.publish()

    def _stuck_transfer(self) -> str:
        for transfer, since in list(WAITED_FOR.values()):
            seconds = time.monotonic() - since
            if seconds > self._limit:
                what = transfer.what or "states"
                size = f"{transfer.nbytes} bytes, {transfer.tier}"
                return f"a transfer of {what} ({size}) has been stuck for {seconds:.0f} s"
        return ""

    def _stuck_collective(self, axis: Axis) -> str:
        entry = oldest_open(axis.collectives)
        since = entry.since if entry is not None else math.inf
        if entry is None or time.monotonic() - since <= max(self._limit / 4, self._limit - self._lead):
            return ""
        absent = axis.absent(entry, lambda: self._closed.wait(3 * self._interval))
        self._closed.wait(max(0.0, since + self._limit - time.monotonic()))
        if entry.over or entry.since > since or self._closed.is_set():
            return ""  # it came, or its host left it, while we asked around
        seconds = time.monotonic() - since
        return f"{entry} has been stuck for {seconds:.0f} s (collective {entry.number} of this run): {absent}"


def oldest_open(collectives: Collectives) -> Issued | None:
    """Return the collective that has held this rank up the longest; its own thread goes on adding to them meanwhile."""
    while True:
        try:
            waited_for = [entry for entry in collectives.open if not entry.over and entry.since < math.inf]
            return min(waited_for, key=lambda entry: entry.since, default=None)
        except RuntimeError:  # changed while we looked
            continue


def name_pieces(engine: Engine) -> None:
    """Give what lies on other tiers the name that people know it by: its kind and its unit."""
    for flat in engine.flats():
        record = flat.record.store if flat.record is not None else None
        for store, kind in ((flat.param_store, "parameters"), (flat.grad_store, "gradients"), (record, "optimizer")):
            if store is not None:
                words = "optimizer states" if kind == "optimizer" else kind
                store.what = f"the {words} of {flat.unit.title}"


def _store() -> Any:
    """Return the process group's store."""
    # torch has no public way to the store that it was given.
    store: Any = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(Exception):
        return store.clone()  # a connection of its own: a blocked one elsewhere must not block us
    return store


def end_process(text: str) -> None:
    """Tell the launcher and the log why, and end this rank at once: its main thread will not come back."""
    text = f"error: {text}\ntry: --set train.watchdog=SECONDS for a longer limit, if it was only slow"
    if not record_failure(text, EXIT_FAILURE):
        print(text, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILURE)
