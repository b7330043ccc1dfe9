"""The slowest rank of every few steps: which it is, what takes it longer than the others; a warning if it stays slow.

Ranks wait for each other in every step, so all of them take as long as the slowest. A rank's own time is the step's
without its waits for collectives: the slowest rank has the longest. Each rank measures that anyway (`Waits`); its means
over `INTERVAL` steps are gathered after a step (`Recorder`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

INTERVAL = 10
"""Steps after which ranks are compared."""
SLOW = 1.2
"""A rank is slow from this multiple of the median rank's own time on."""
SHARE = 0.05
"""And if the difference is at least this share of a step: below that nobody would notice."""
LONG_STEPS = 50
"""Steps in a row after which a slow rank is reported."""
CAUSES = ("compute", "data", "transfers", "optimizer")
"""What a rank's own time consists of; `compute` is all that is not a wait."""


class Stragglers:
    """Adds up this rank's own time and compares it with the others'."""

    def __init__(self, hosts: Sequence[str], say: Callable[[str], None]) -> None:
        """`hosts` are the ranks' nodes, if they are known; `say` is called with the warning."""
        self._hosts, self._say = hosts, say
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._steps: list[int] = []
        self._sums = dict.fromkeys(("seconds", *CAUSES), 0.0)
        self._taken: tuple[list[int], float] = ([], 0.0)
        """The steps whose means are being exchanged, and the mean of their seconds."""
        self._streak = (-1, 0)
        """The rank that was slow last, and for how many steps in a row."""
        self._warned: set[int] = set()

    def add(self, step: int, seconds: float, waits: Mapping[str, float]) -> None:
        """Count a step of this rank."""
        self._steps.append(step)
        self._sums["seconds"] += seconds
        self._sums["compute"] += max(0.0, seconds - sum(waits.values()))
        for cause in CAUSES[1:]:
            self._sums[cause] += max(0.0, waits[cause])

    def take(self) -> list[float]:
        """Return this rank's number and its means by cause once `INTERVAL` steps are counted, else nothing."""
        if len(self._steps) < INTERVAL:
            return []
        seconds, *causes = (each / len(self._steps) for each in self._sums.values())
        self._taken = (self._steps, seconds)
        self._steps, self._sums = [], dict.fromkeys(self._sums, 0.0)
        return [self._rank, *causes]

    def compare(self, rows: torch.Tensor) -> dict[str, Any] | None:
        """Return the slowest rank, from what `take` returned on each; None if it returned nothing, or of one rank."""
        found = slowest(rows) if rows.numel() else None
        if found is not None:
            rank, (steps, seconds) = found["rank"], self._taken
            found = {"rank": rank, "node": self._hosts[rank] if self._hosts else ""} | found
            found["steps"] = [steps[0], steps[-1]]
            self._watch(found, len(steps), seconds)
        return found

    def _watch(self, found: Mapping[str, Any], num_steps: int, seconds: float) -> None:
        """Warn of a rank that has been slow for long, once."""
        rank, over = found["rank"], found["seconds"] - found["median"]
        slow = found["seconds"] >= SLOW * found["median"] and over >= SHARE * seconds
        before = self._streak[1] if self._streak[0] == rank else 0
        self._streak = (rank, before + num_steps) if slow else (-1, 0)
        if self._streak[1] < LONG_STEPS or rank in self._warned:
            return
        self._warned.add(rank)
        where = f" on node {found['node']}" if found["node"] else ""
        more = f"{over / found['median']:.0%} longer" if found["median"] else "longer"
        self._say(
            f"warning: rank {rank}{where} has been slow for {self._streak[1]} steps: without waits for the others it "
            f"takes {found['seconds']:.4g} s per step, {more} than the median rank, most of that in {found['cause']}; "
            "all ranks wait for it"
        )


def slowest(rows: torch.Tensor) -> dict[str, Any] | None:
    """Return the rank with the longest own time, from every rank's (rank, seconds by cause); None if there is but one.

    The cause is what it takes longest over, compared with the median rank. Of an even number the lower median counts.
    """
    if len(rows) < 2:
        return None
    own = rows[:, 1:].sum(1)
    most = int(own.argmax())
    over = rows[most, 1:] - rows[:, 1:].median(0).values
    return {
        "rank": int(rows[most, 0]),
        "cause": CAUSES[int(over.argmax())],
        "seconds": own[most].item(),
        "median": own.median().item(),
        "fastest": own.min().item(),
    }
