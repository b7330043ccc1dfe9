"""Heartbeats: what the ranks of a run keep telling each other of themselves, through the store that opened their group.

A rank that is stuck, or has lost another, asks what the others last said: who still speaks is alive, who has begun
fewer collectives has not arrived, and who ended in good order has said why.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from zerocli.run.rank_loss import PATIENCE_SECONDS, within

T = TypeVar("T")


@dataclass(frozen=True)
class Heartbeat:
    """What a rank last said of itself."""

    time: float
    """By its own clock: only whether it moves on means something."""
    idle: float
    """Seconds since it last began or finished anything that others could wait for."""
    counts: dict[str, int] = field(default_factory=dict)
    """Collectives that it has begun, by axis."""
    doing: str = ""
    alone: str = ""
    """What it is busy with that no other rank takes part in, and that it watches itself."""
    ended: str = ""
    """Why it ended, said as its last words."""
    by_loss: bool = False
    """Whether it ended because it had lost another rank itself."""


class Heartbeats:
    """The beats of all ranks that hold a part of one model; `ranks` are global."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Any | None = None) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self._store = dist.PrefixStore("zerocli-beats", _job_store() if store is None else store)
        self.gone = False
        """Whether the store is no more; it is not asked again, as torch complains at length each time."""

    @property
    def keeper(self) -> str:
        """Who keeps the store."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return "torchrun on the host of rank 0" if agents else "rank 0"

    def say(self, beat: Heartbeat) -> None:
        """Tell the others, however long the store takes; nothing happens if it is gone."""
        with contextlib.suppress(Exception):
            self._reach(lambda: self._store.set(str(self.rank), json.dumps(asdict(beat))))

    def ask(self) -> dict[int, Heartbeat] | None:
        """Return what each rank last said, None if the store does not answer."""

        def ask() -> dict[int, Heartbeat]:
            found = {}
            for rank in self.ranks:
                if self._store.check([str(rank)]):
                    found[rank] = Heartbeat(**json.loads(self._store.get(str(rank))))
            return found

        return within(PATIENCE_SECONDS, lambda: self._reach(ask))

    def _reach(self, act: Callable[[], T]) -> T:
        """Return what `act` gets from the store; slow is not gone, a connection that failed is."""
        if self.gone:
            raise ConnectionError("the store is gone")
        try:
            return act()
        except Exception:
            self.gone = True
            raise

    def ask_twice(self, pause: Callable[[], object]) -> tuple[dict[int, Heartbeat], set[int]] | None:
        """Return what the others say now, and which of them have said nothing new during the pause."""
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
    """Say which ranks are gone, for one that has lost contact; those that ended for the same reason are not named."""
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
    """Say that a rank does not answer, and what it was doing when it last did."""
    return f"rank {rank} does not answer" + (f" (it was {beat.doing})" if beat is not None and beat.doing else "")


def no_store(beats: Heartbeats) -> str:
    """Say why the others cannot be asked."""
    return f"{beats.keeper}, which keeps the store that ranks speak through, does not answer"


def _job_store() -> Any:
    """Return the process group's store."""
    # torch has no public way to the store that it was given.
    return cloned(dist.distributed_c10d._get_default_store())


def cloned(store: Any) -> Any:
    """Return another way to a store, where it has one."""
    with contextlib.suppress(Exception):
        return store.clone()  # a connection of its own: a blocked one elsewhere must not block us
    return store
