"""Which bytes of a file or an arena are free: integers only, no memory."""

from __future__ import annotations

from bisect import bisect_left, insort


class Extents:
    """Free spans of [0, size), allocated by best fit; freed neighbours are merged.

    Sizes are whole pages and not rounded to a power of two, and allocating and freeing the same sizes repeatedly never
    needs more space.
    """

    def __init__(self, size: int = 0) -> None:
        self.size = 0
        self.free = 0
        self._by_size: list[tuple[int, int]] = []
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self.grow(size)

    def grow(self, nbytes: int) -> None:
        """Append `nbytes` of free space."""
        self.size += nbytes
        self.give(self.size - nbytes, nbytes)

    @property
    def free_at_end(self) -> int:
        """The free bytes before the end, which growing would add to."""
        return self.size - self._start_before.get(self.size, self.size)

    def take(self, nbytes: int, end_last: bool = False) -> int | None:
        """Return the start of `nbytes` that are now taken, None if no free span is large enough.

        With `end_last` the span at the end is taken only if no other holds them, however large that is.
        """
        if nbytes == 0:
            return 0
        spans = self._by_size
        index = bisect_left(spans, (nbytes, -1))
        if index == len(spans):
            return None
        length, start = spans[index]
        if end_last and start + length == self.size and index + 1 < len(spans):
            index += 1
            length, start = spans[index]
        del spans[index], self._length_at[start], self._start_before[start + length]
        if length > nbytes:
            self._insert(start + nbytes, length - nbytes)
        self.free -= nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Make [start, start + nbytes) free again, merged with its free neighbours."""
        if nbytes == 0:
            return
        self.free += nbytes
        before = self._start_before.pop(start, None)
        if before is not None:
            nbytes += self._forget(before)
            start = before
        if start + nbytes in self._length_at:
            after = self._forget(start + nbytes)
            del self._start_before[start + nbytes + after]
            nbytes += after
        self._insert(start, nbytes)

    def _insert(self, start: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, start))
        self._length_at[start] = nbytes
        self._start_before[start + nbytes] = start

    def _forget(self, start: int) -> int:
        """Drop the span that begins here, but for where it ends; return its length."""
        nbytes = self._length_at.pop(start)
        del self._by_size[bisect_left(self._by_size, (nbytes, start))]
        return nbytes
