"""The ledger: live bytes by category, their peak, and the moment of the peak.

A plan replays a step on it with storages that have a size but no memory. Like tensors, they live as long as they are
referenced: Python's reference counts free them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerocli.layout.categories import CATEGORIES


@dataclass
class Peak:
    """The peak of live bytes, their categories, and the moment."""

    nbytes: int = 0
    moment: str = ""
    held: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Counts allocations and frees; sizes are rounded up to `granularity`, as in the device's allocator."""

    def __init__(self, granularity: int = 1) -> None:
        self._granularity = granularity
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.moment = ""
        self.peak = Peak()

    def take(self, nbytes: int, category: str) -> int:
        """Count an allocation and return its rounded size."""
        size = self.rounded(nbytes)
        self.held[category] += size
        self.total += size
        if self.total > self.peak.nbytes:
            self.peak = Peak(self.total, self.moment, dict(self.held))
        return size

    def give(self, size: int, category: str) -> None:
        """Count the free of a size that `take` returned."""
        self.held[category] -= size
        self.total -= size

    def rounded(self, nbytes: int) -> int:
        """Return the bytes that an allocation of `nbytes` takes."""
        return -(-nbytes // self._granularity) * self._granularity

    def since(self, before: Mapping[str, int], times: int) -> dict[str, int]:
        """Return `times` the change by category since `before` was held."""
        return {category: times * (nbytes - before[category]) for category, nbytes in self.held.items()}

    def add(self, change: Mapping[str, int], sign: int = 1) -> None:
        """Add a change of what is held, by category; the peak is not looked at."""
        for category, nbytes in change.items():
            self.held[category] += sign * nbytes
            self.total += sign * nbytes

    def begin(self, moment: str) -> None:
        """Start a phase; its peak starts at the bytes that are live now."""
        self.moment = moment
        self.peak = Peak(self.total, moment, dict(self.held))


class Storage:
    """A size without memory; its free is counted when the last reference is dropped."""

    __slots__ = ("_category", "_ledger", "_size", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int, category: str = "activations") -> None:
        self.nbytes = nbytes
        self._ledger, self._category = ledger, category
        self._size = ledger.take(nbytes, category)

    def __del__(self) -> None:
        if hasattr(self, "_size"):  # an interrupt may come before it is counted
            self._ledger.give(self._size, self._category)
