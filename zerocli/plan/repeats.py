"""Repeated items of a long sequence: a few of them are replayed, and the ones between are counted.

A deep model is many equal blocks. Each one changes what is held by the same bytes once the first few have passed, so
its peak is as far above the last one's as that of the last above the one before: the highest of a run is its first or
its last. Both are replayed; what is between is added as a multiple. That is exact, not an estimate.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence


def replayed(keys: Sequence[Hashable], lead: int, period: int = 1) -> Iterator[tuple[int, int]]:
    """Yield (index, skipped) of the items to replay, in order: `skipped` items before it are left out.

    Of a run of items whose keys repeat with `period`, the first and last `lead` items are replayed and a multiple of
    `period` is left out; a run so short that nothing would be is replayed as it is.
    """
    for start, stop in _runs(keys, period):
        skipped = max(0, (stop - start - 2 * lead) // period * period)
        if not skipped:
            yield from ((index, 0) for index in range(start, stop))
            continue
        yield from ((index, 0) for index in range(start, start + lead))
        after = start + lead + skipped
        yield after, skipped
        yield from ((index, 0) for index in range(after + 1, stop))


def _runs(keys: Sequence[Hashable], period: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive stretches whose keys repeat with `period`; together they are all items."""
    start = 0
    if period == 1:
        for _, alike in itertools.groupby(keys):
            stop = start + sum(1 for _ in alike)
            yield start, stop
            start = stop
        return
    while start < len(keys):
        stop = min(start + period, len(keys))
        while stop < len(keys) and keys[stop] == keys[stop - period]:
            stop += 1
        yield start, stop
        start = stop
