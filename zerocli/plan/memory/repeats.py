"""Repeated items of a long sequence: a few of them are replayed, and the ones between are counted.

A deep model is many equal blocks. Each one changes what is held by the same bytes once the first few have passed, so
its peak is as far above the last one's as that of the last above the one before: the highest of a run is its first or
its last. Both are replayed; what is between is added as a multiple. That is exact, not an estimate.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence

from zerocli.layout.categories import CATEGORIES
from zerocli.plan.memory.ledger import Ledger

GRADIENTS = "gradients"


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
    changes = map(operator.ne, keys[period:], keys)
    for at in itertools.compress(range(period, len(keys)), changes):
        if at >= start + period:
            yield start, at
            start = at
    if keys:
        yield start, len(keys)


class Repeats:
    """What the items of a step that are not replayed hold, by category: on the ledger until they would free it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: dict[str, int] = dict.fromkeys(ledger.held, 0)
        self._pending = 0
        """Bytes of gradients that are still read in the next step."""

    def add(self, before: Mapping[str, int], times: int, pending: bool = False) -> None:
        """Count what has changed since `before` another `times`; with `pending`, its gradients outlive the step."""
        change = self._ledger.since(before, times)
        self._ledger.add(change)
        for category, nbytes in change.items():
            self._held[category] += nbytes
        self._pending += change[GRADIENTS] if pending else 0

    def end_pass(self) -> None:
        """Free all but gradients."""
        self._free([category for category in CATEGORIES if category != GRADIENTS])

    def end_step(self) -> None:
        """Free all but gradients that are pending in the next step."""
        self._free(CATEGORIES, self._pending)
        self._pending = 0

    def _free(self, categories: Sequence[str], gradients_left: int = 0) -> None:
        for category in categories:
            left = gradients_left if category == GRADIENTS else 0
            self._ledger.add({category: self._held[category] - left}, -1)
            self._held[category] = left
