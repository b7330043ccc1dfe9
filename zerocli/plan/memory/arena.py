"""What torch's CUDA allocator reserves for a sequence of allocations: one arena per stream, filled by best fit.

With expandable segments (`zerocli.allocator`) an arena is one range of addresses that grows at its end, by pages of 20
MiB. An allocation takes the smallest free range that holds it, and leaves the rest of the range free. The range at the
end, which could grow, counts as the largest. What lies between live allocations is lost for larger ones: a plan that
only summed live bytes would be too low.
"""

from __future__ import annotations

from collections import defaultdict

from tiers.extents import Extents

PAGE_NBYTES = 20 << 20
SMALL_NBYTES = 1 << 20
"""Allocations of up to this size share an arena of their own."""
SMALL_PAGE_NBYTES = 2 << 20
COMPUTE = ""
"""The arena of the compute stream."""


class Arena(Extents):
    """A range of addresses that grows by pages where no free part of it is large enough; nothing is unmapped."""

    def __init__(self, page: int) -> None:
        super().__init__()
        self._page = page

    def take(self, nbytes: int, end_last: bool = True) -> int:
        """Allocate; return the address."""
        start = super().take(nbytes, end_last)
        if start is None:
            missing = nbytes - self.free_at_end
            self.grow(-(-missing // self._page) * self._page)
            start = super().take(nbytes)
        assert start is not None
        return start


class Arenas:
    """The arenas of all streams."""

    def __init__(self) -> None:
        self._large: defaultdict[str, Arena] = defaultdict(lambda: Arena(PAGE_NBYTES))
        self._small: defaultdict[str, Arena] = defaultdict(lambda: Arena(SMALL_PAGE_NBYTES))

    @property
    def nbytes(self) -> int:
        """The bytes that are reserved, of all streams."""
        return sum(arena.size for kind in (self._large, self._small) for arena in kind.values())

    def take(self, size: int, stream: str = COMPUTE) -> int:
        return (self._large if size > SMALL_NBYTES else self._small)[stream].take(size)

    def give(self, start: int, size: int, stream: str = COMPUTE) -> None:
        (self._large if size > SMALL_NBYTES else self._small)[stream].give(start, size)
