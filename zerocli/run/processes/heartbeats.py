"""Heartbeats: the status that ranks of a run publish to each other through the process group's store.

A rank that is stuck, or has lost another, reads the others' heartbeats: a rank whose heartbeats continue is alive, one
that has begun fewer collectives has not arrived, and one that exited cleanly has published the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from zerocli.ranks.worker import within
from zerocli.run.processes.rank_loss import PATIENCE_SECONDS

T = TypeVar("T")


@dataclass(frozen=True)
class Heartbeat:
    """The last status that a rank published."""

    time: float
    """The rank's own clock; others only check whether it advances."""
    idle: float
    """Seconds since it last began or finished anything that others could wait for."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of collectives that it has begun, by axis."""
    doing: str = ""
    alone: str = ""
    """Work that it does without other ranks, and that its own watchdog monitors."""
    ended: str = ""
    """Why it ended; set in its last heartbeat."""
    by_loss: bool = False
    """Whether it ended because it had lost another rank."""


class Heartbeats:
    """The heartbeats of all ranks that hold a part of one model; `ranks` are global."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Any | None = None) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self._store = dist.PrefixStore("zerocli-beats", _job_store() if store is None else store)
        self.gone = False
        """Whether the store is gone; it is not queried again, as torch logs long warnings each time."""

    @property
    def keeper(self) -> str:
        """The process that hosts the store, in words."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "torchrun on the host of rank 0" if agents else "rank 0"

    def say(self, beat: Heartbeat) -> None:
        """Publish a heartbeat, however long the store takes; do nothing if the store is gone."""
        with contextlib.suppress(Exception):
            self._reach(lambda: self._store.set(str(self.rank), json.dumps(asdict(beat))))

    def ask(self) -> dict[int, Heartbeat] | None:
        """Return each rank's last heartbeat, None if the store does not answer."""

        def ask() -> dict[int, Heartbeat]:
            found = {}
            for rank in self.ranks:
                if self._store.check([str(rank)]):
                    found[rank] = Heartbeat(**json.loads(self._store.get(str(rank))))
            return found

        return within(PATIENCE_SECONDS, lambda: self._reach(ask))

    def _reach(self, act: Callable[[], T]) -> T:
        """Return the result of `act` on the store; a failed connection, but not a slow one, marks the store as gone."""
        if self.gone:
            raise ConnectionError("the store is gone")
        try:
            return act()
        except Exception:
            self.gone = True
            raise

    def ask_twice(self, pause: Callable[[], object]) -> tuple[dict[int, Heartbeat], set[int]] | None:
        """Return the others' current heartbeats, and the ranks that published nothing new during the pause."""
        before = self.ask()
        if before is not None:
            pause()
        now = self.ask()
        if before is None or now is None:
            return None
        others = [rank for rank in self.ranks if rank != self.rank]
        silent = {r for r in others if r not in now or (r in before and before[r].time == now[r].time)}
        return {rank: now[rank] for rank in others if rank in now}, silent


def lost_ranks(beats: Heartbeats, pause: Callable[[], object]) -> str:
    """Return which ranks are gone, in words; ranks that ended because they too lost a rank are not named."""
    heard = beats.ask_twice(pause)
    if heard is None:
        return no_store(beats)
    said, silent = heard
    lines = []
    for rank in (rank for rank in beats.ranks if rank != beats.rank):
        beat = said.get(rank)
        if beat is not None and beat.ended:
            if not beat.by_loss:
                lines.append(f"rank {rank} ended ({beat.ended})")
        elif rank in silent:
            lines.append(silent_words(rank, beat))
    return "; ".join(lines) or "all ranks still answer: the link between them broke"


def silent_words(rank: int, beat: Heartbeat | None) -> str:
    """Return the words that a rank does not answer, and what its last heartbeat said it was doing."""
    return f"rank {rank} does not answer" + (f" (it was {beat.doing})" if beat is not None and beat.doing else "")


def no_store(beats: Heartbeats) -> str:
    """Return why the others' heartbeats cannot be read, in words."""
    return f"{beats.keeper}, which keeps the store that ranks speak through, does not answer"


def _job_store() -> Any:
    """Return the process group's store."""
    # torch has no public accessor for the default store.
    return cloned(dist.distributed_c10d._get_default_store())


def cloned(store: Any) -> Any:
    """Return a new connection to a store, or the store itself if it cannot be cloned."""
    with contextlib.suppress(Exception):
        return store.clone()  # a separate connection: a blocked call on another must not block this one
    return store
