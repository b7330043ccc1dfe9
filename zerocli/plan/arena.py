"""What torch's CUDA allocator reserves for a sequence of allocations: one arena per stream, filled by best fit.

With expandable segments (`zerocli.allocator`) an arena is one range of addresses that grows at its end, by pages of 20
MiB. An allocation takes the smallest free range that holds it, and leaves the rest of the range free. What lies between
live allocations is lost for larger ones: a plan that only summed live bytes would be too low.
"""

from __future__ import annotations

import bisect
from collections import defaultdict

PAGE_NBYTES = 20 << 20
SMALL_NBYTES = 1 << 20
"""Allocations of up to this size share an arena of their own."""
SMALL_PAGE_NBYTES = 2 << 20
COMPUTE = ""
"""The arena of the compute stream."""


class Arena:
    """A range of addresses with free and live parts."""

    def __init__(self, page: int) -> None:
        self._page = page
        self.nbytes = 0
        """What is mapped; nothing is ever unmapped."""
        self._free: list[tuple[int, int]] = []
        """(size, start) of each free range, sorted."""
        self._size_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        """The start of the free range that ends at an address."""

    def take(self, size: int) -> int:
        """Allocate; return the address."""
        at = bisect.bisect_left(self._free, (size, -1))
        if at == len(self._free):
            tail = self.nbytes - self._start_before.get(self.nbytes, self.nbytes)
            grown = -(-(size - tail) // self._page) * self._page
            self.nbytes += grown
            self.give(self.nbytes - grown, grown)
            at = bisect.bisect_left(self._free, (size, -1))
        found, start = self._free[at]
        self._remove(start, found)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Free an allocation; it becomes one range with free neighbours."""
        before = self._start_before.get(start)
        if before is not None:
            self._remove(before, start - before)
            start, size = before, size + start - before
        after = self._size_at.get(start + size)
        if after is not None:
            self._remove(start + size, after)
            size += after
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        bisect.insort(self._free, (size, start))
        self._size_at[start], self._start_before[start + size] = size, start

    def _remove(self, start: int, size: int) -> None:
        del self._free[bisect.bisect_left(self._free, (size, start))]
        del self._size_at[start], self._start_before[start + size]


class Arenas:
    """The arenas of all streams."""

    def __init__(self) -> None:
        self._large: defaultdict[str, Arena] = defaultdict(lambda: Arena(PAGE_NBYTES))
        self._small: defaultdict[str, Arena] = defaultdict(lambda: Arena(SMALL_PAGE_NBYTES))

    @property
    def nbytes(self) -> int:
        """The bytes that are reserved, of all streams."""
        return sum(arena.nbytes for kind in (self._large, self._small) for arena in kind.values())

    def take(self, size: int, stream: str = COMPUTE) -> int:
        return self._of(size, stream).take(size)

    def give(self, start: int, size: int, stream: str = COMPUTE) -> None:
        self._of(size, stream).give(start, size)

    def _of(self, size: int, stream: str) -> Arena:
        return (self._large if size > SMALL_NBYTES else self._small)[stream]
