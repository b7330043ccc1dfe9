"""The ledger of live memory: a log of allocations, by category, from which the peak is computed.

Nothing is summed up during training: allocations and frees are log entries, and an entry may be named later (a buffer
is identified when the engine is queried at the end of a phase). All figures are computed from the log.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from zerocli.layout.categories import CATEGORIES

UNATTRIBUTED = "unattributed"
TIERS = ("hbm", "dram", "nvme")
"""The tiers that every profile has; after them come those of other packages that the run used."""
NUM_HOLDERS = 10


@dataclass(eq=False)
class Allocation:
    """Device memory from allocation to free; memory of unknown use is `unattributed`."""

    nbytes: int
    category: str
    name: str
    unit: str
    moment: str
    """Phase and unit in which it was made."""
    born: float
    died: float | None = None
    made: str = ""
    """The operation that made it, and the shape it made."""


@dataclass(frozen=True)
class Event:
    """One allocation (+1) or free (-1), and the moment at which it happened."""

    at: float
    allocation: Allocation
    sign: int
    moment: str


@dataclass(frozen=True)
class Held:
    """What was alive at one point of the log."""

    nbytes: int
    moment: str
    at: float
    rows: dict[str, int]
    holders: list[tuple[str, str, int]] = field(default_factory=list)
    """(name, category, bytes) of the largest allocations, summed by name."""
    names: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes of all allocations, by (name, category)."""


class Ledger:
    """Allocations by key (a live storage's identity); sizes are rounded up as the device's allocator does."""

    def __init__(self, granularity: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._granularity, self._clock = granularity, clock
        self._live: dict[int, Allocation] = {}
        self.events: list[Event] = []
        self.moment = ("initialisation", "")
        """The current (phase, unit)."""

    def take(self, key: int, nbytes: int, category: str, name: str, made: str = "") -> Allocation:
        """Log an allocation under a key that is not in use."""
        size = -(-nbytes // self._granularity) * self._granularity
        moment = describe(*self.moment)
        taken = Allocation(size, category, name, self.moment[1], moment, self._clock(), made=made)
        self._live[key] = taken
        self.events.append(Event(taken.born, taken, 1, moment))
        return taken

    def give(self, key: int) -> None:
        """Log the free of the allocation under the key; do nothing if there is none."""
        gone = self._live.pop(key, None)
        if gone is not None:
            gone.died = self._clock()
            self.events.append(Event(gone.died, gone, -1, describe(*self.moment)))

    def get(self, key: int) -> Allocation | None:
        return self._live.get(key)

    def disown(self, key: int) -> None:
        """Remove the allocation under the key from the log: it is not device memory after all."""
        found = self._live.get(key)
        if found is not None:
            found.nbytes = 0

    # -- reading it off --------------------------------------------------------------------------------------------

    def peak(self, start: int = 0, stop: int | None = None) -> Held:
        """Return what was alive at the peak of events [start, stop), including what was allocated before `start`."""
        stop = len(self.events) if stop is None else stop
        total = sum(event.sign * event.allocation.nbytes for event in self.events[:start])
        best, at = total, start - 1
        for index in range(start, stop):
            event = self.events[index]
            total += event.sign * event.allocation.nbytes
            if total > best:
                best, at = total, index
        return self.held(at)

    def held(self, index: int) -> Held:
        """Return what was alive right after the event of this index."""
        rows: Counter[str] = Counter()
        names: Counter[tuple[str, str]] = Counter()
        for each in _alive(self.events[: index + 1]):
            rows[each.category] += each.nbytes
            names[each.name, each.category] += each.nbytes
        last = self.events[index] if index >= 0 else None
        return Held(
            sum(rows.values()),
            last.moment if last else "",
            last.at if last else 0.0,
            {category: rows[category] for category in (*CATEGORIES, UNATTRIBUTED)},
            [(name, category, n) for (name, category), n in names.most_common(NUM_HOLDERS) if n],
            dict(names),
        )

    def series(self, start: int, stop: int, num_points: int = 2000) -> list[tuple[float, dict[str, int]]]:
        """Return (time, bytes by category) over events [start, stop), at most `num_points`; peaks are kept."""
        held = Counter({name: n for name, n in self.held(start - 1).rows.items() if n})
        each = max(1, -(-(stop - start) // max(1, num_points)))
        points: list[tuple[float, dict[str, int]]] = []
        for first in range(start, stop, each):
            best: tuple[int, float, dict[str, int]] | None = None
            for event in self.events[first : min(stop, first + each)]:
                held[event.allocation.category] += event.sign * event.allocation.nbytes
                total = sum(held.values())
                if best is None or total > best[0]:
                    best = (total, event.at, {name: n for name, n in held.items() if n})
            if best is not None:
                points.append(best[1:])
        return points

    def lives(self, start: int, stop: int) -> Iterator[Allocation]:
        """Yield the allocations that are alive at some point of events [start, stop), each once."""
        yield from _alive(self.events[:start])
        yield from (event.allocation for event in self.events[start:stop] if event.sign > 0)


def _alive(events: Sequence[Event]) -> Iterable[Allocation]:
    alive: dict[int, Allocation] = {}
    for event in events:
        if event.sign > 0:
            alive[id(event.allocation)] = event.allocation
        else:
            alive.pop(id(event.allocation), None)
    return alive.values()


def describe(phase: str, unit: str) -> str:
    """Return a moment in words: `backward of blocks.3`."""
    return f"{phase} of {unit}" if unit else phase
