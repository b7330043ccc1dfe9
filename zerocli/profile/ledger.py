"""The ledger of what is really alive: a log of allocations, by category, with what stood at the peak.

Nothing is summed up while training runs: memory comes and goes as lines of a log, and a line may still get its name
later (a buffer is known for one when the engine is asked at the end of a phase). All figures are read off the log.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from zerocli.layout.categories import CATEGORIES

UNATTRIBUTED = "unattributed"
TIERS = ("hbm", "dram", "nvme")
NUM_HOLDERS = 10


@dataclass(eq=False)
class Allocation:
    """Memory of the device from its birth to its end; what nobody knows the use of is `unattributed`."""

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
    """One allocation's birth (+1) or end (-1), and the moment it fell into."""

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
    """(name, category, bytes) of the largest, equal names together."""


class Ledger:
    """Allocations by key (a storage's identity while it lives); sizes round up as the device's allocator rounds."""

    def __init__(self, granularity: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._granularity, self._clock = granularity, clock
        self._live: dict[int, Allocation] = {}
        self.events: list[Event] = []
        self.moment = ("initialisation", "")
        """(phase, unit) of what happens now."""

    def take(self, key: int, nbytes: int, category: str, name: str, made: str = "") -> Allocation:
        """Log an allocation under a key that is not in use."""
        size = -(-nbytes // self._granularity) * self._granularity
        moment = describe(*self.moment)
        taken = Allocation(size, category, name, self.moment[1], moment, self._clock(), made=made)
        self._live[key] = taken
        self.events.append(Event(taken.born, taken, 1, moment))
        return taken

    def give(self, key: int) -> None:
        """Log the end of what is alive under the key; nothing if there is none."""
        gone = self._live.pop(key, None)
        if gone is not None:
            gone.died = self._clock()
            self.events.append(Event(gone.died, gone, -1, describe(*self.moment)))

    def get(self, key: int) -> Allocation | None:
        return self._live.get(key)

    def disown(self, key: int) -> None:
        """Take what was logged under the key for no memory of the device after all."""
        found = self._live.get(key)
        if found is not None:
            found.nbytes = 0

    @property
    def total(self) -> int:
        """Bytes that are alive now."""
        return sum(each.nbytes for each in self._live.values())

    # -- reading it off --------------------------------------------------------------------------------------------

    def peak(self, start: int = 0, stop: int | None = None) -> Held:
        """Return what was alive at the highest point of events [start, stop); all before `start` counts as there."""
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
        alive: dict[int, Allocation] = {}
        for event in self.events[: index + 1]:
            if event.sign > 0:
                alive[id(event.allocation)] = event.allocation
            else:
                alive.pop(id(event.allocation), None)
        rows: Counter[str] = Counter()
        names: Counter[tuple[str, str]] = Counter()
        for each in alive.values():
            rows[each.category] += each.nbytes
            names[each.name, each.category] += each.nbytes
        last = self.events[index] if index >= 0 else None
        return Held(
            sum(rows.values()),
            last.moment if last else "",
            last.at if last else 0.0,
            {category: rows[category] for category in (*CATEGORIES, UNATTRIBUTED)},
            [(name, category, n) for (name, category), n in names.most_common(NUM_HOLDERS) if n],
        )

    def series(self, start: int, stop: int, num_points: int = 2000) -> list[tuple[float, dict[str, int]]]:
        """Return (time, bytes by category) over events [start, stop), at most `num_points`; no peak is left out."""
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
