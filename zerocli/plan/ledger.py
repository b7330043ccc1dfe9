"""The ledger: bytes that are alive, by category, and the most there ever were, with the moment.

A plan replays a step on it with storages that have a size and no memory. They live as tensors do: as long as somebody
refers to them, which Python's own reference counts decide, as they do for the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zerocli.layout.categories import CATEGORIES


@dataclass
class Peak:
    """The most bytes alive at once, what they were, and when."""

    nbytes: int = 0
    moment: str = ""
    held: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Counts storages in and out; sizes round up to `granularity`, as the device's allocator rounds them."""

    def __init__(self, granularity: int = 1) -> None:
        self._granularity = granularity
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.moment = ""
        self.peak = Peak()

    def take(self, nbytes: int, category: str) -> int:
        """Count `nbytes` in and return what they take, rounded."""
        size = -(-nbytes // self._granularity) * self._granularity
        self.held[category] += size
        self.total += size
        if self.total > self.peak.nbytes:
            self.peak = Peak(self.total, self.moment, dict(self.held))
        return size

    def give(self, size: int, category: str) -> None:
        """Count out what `take` returned."""
        self.held[category] -= size
        self.total -= size

    def begin(self, moment: str) -> None:
        """Start a phase with a peak of its own, at what is alive now."""
        self.moment = moment
        self.peak = Peak(self.total, moment, dict(self.held))


class Storage:
    """Bytes without memory; counted out with the last reference."""

    __slots__ = ("_category", "_ledger", "_size", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int, category: str = "activations") -> None:
        self.nbytes = nbytes
        self._ledger, self._category = ledger, category
        self._size = ledger.take(nbytes, category)

    def __del__(self) -> None:
        if hasattr(self, "_size"):  # an interrupt may have come before it was counted
            self._ledger.give(self._size, self._category)
