"""Shard arithmetic: each parameter's position in its flat buffer, and the slice of the buffer that a rank owns.

Pure integers, no tensors. Everything is counted in elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerocli.errors import WrongValue
from zerocli.layout.sizes import count_of

SHARD_ALIGN = 64
"""Slices and optimizer groups start at multiples of this, so vector kernels split work the same at every stage."""
PARAM_ALIGN = SHARD_ALIGN
"""Each parameter starts at a multiple of this many elements: matrix kernels get aligned addresses, and vector kernels
split work the same at every stage even in an update that skips some parameters."""


@dataclass(frozen=True)
class Span:
    """The half-open range [start, stop) of elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return max(0, self.stop - self.start)

    def intersect(self, other: Span) -> Span:
        """Return the intersection of both spans; its numel is 0 if they are disjoint."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shifted(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)

    def pieces(self, numel: int) -> Iterator[Span]:
        """Yield consecutive spans of at most `numel` elements that tile this one."""
        for start in range(self.start, self.stop, numel):
            yield Span(start, min(start + numel, self.stop))


def round_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `numel`."""
    return -(-numel // multiple) * multiple


def padded_numel(numel: int, world: int, align: int = SHARD_ALIGN) -> int:
    """Return `numel` padded so that `world` equal slices, each a multiple of `align`, tile it exactly."""
    return round_up(numel, world * align)


def owned(padded: int, world: int, rank: int) -> Span:
    """Return the slice that `rank` owns of a padded buffer; the slices of all ranks tile it exactly."""
    assert padded % (world * SHARD_ALIGN) == 0 and 0 <= rank < world
    each = padded // world
    return Span(rank * each, (rank + 1) * each)


def nearest_divisor(wanted: int, number: int) -> int:
    """Return the divisor of `number` nearest to `wanted`, the smaller one of a tie; looks at most 2^16 upwards."""
    start = min(wanted, number, 1 << 16)
    near = (d for distance in range(start) for d in (start - distance, start + distance))
    return next(d for d in near if number % d == 0)


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in order; of numbers beyond 2^32, those with a factor up to 2^16."""
    small = [d for d in range(1, min(math.isqrt(number), 1 << 16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def check_shard_ranks(shard_ranks: int, ranks: int, node: int = 0) -> None:
    """Raise WrongValue unless groups of `shard_ranks` data-parallel ranks tile `ranks`; 0 is one group of all.

    If a node's number of them is given, groups must also tile a node, or nodes a group.
    """
    if shard_ranks < 0 or (shard_ranks and ranks % shard_ranks):
        raise _wrong_shard_ranks(shard_ranks, f"the {count_of(ranks, 'data-parallel rank')}", divisors(ranks))
    if node and shard_ranks and shard_ranks % node and node % shard_ranks:
        raise _wrong_shard_ranks(shard_ranks, f"the {count_of(node, 'data-parallel rank')} of a node", divisors(node))


def _wrong_shard_ranks(shard_ranks: int, what: str, known: list[int]) -> WrongValue:
    *most, last = known
    listed = f"{', '.join(map(str, most))} or {last}" if most else f"only {last}"
    nearest = min(known, key=lambda each: abs(each - shard_ranks))
    return WrongValue(f"shard_ranks {shard_ranks} does not divide {what}: {listed} does", f"--shard-ranks {nearest}")


@dataclass(frozen=True)
class Entry:
    """One parameter's position in a flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int
    group: int
    """Index of the parameter's optimizer group (for example with or without weight decay)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> Span:
        return Span(self.offset, self.offset + self.numel)


@dataclass(frozen=True)
class Layout:
    """The positions of all parameters of one flat buffer, and its padded length."""

    entries: tuple[Entry, ...]
    regions: tuple[tuple[int, Span], ...]
    """(group, span) of each optimizer group, in order; together they tile the padded buffer."""
    total: int
    """Padded length: a multiple of world * SHARD_ALIGN."""

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(entry.numel for entry in self.entries)

    def start_of(self, group: int) -> int:
        """Return the start of the first group whose index is at least `group`; the buffer's end if there is none."""
        return min((span.start for its_group, span in self.regions if its_group >= group), default=self.total)

    def gaps(self) -> list[Span]:
        """Return the spans of padding between and after the parameters."""
        found, at = [], 0
        for entry in self.entries:
            if entry.offset > at:
                found.append(Span(at, entry.offset))
            at = entry.offset + entry.numel
        if self.total > at:
            found.append(Span(at, self.total))
        return found

    def segments(self, within: Span) -> list[tuple[int, Span]]:
        """Return (group, span) for the parts of `within` that each optimizer group covers."""
        cut = [(group, region.intersect(within)) for group, region in self.regions]
        return [(group, span) for group, span in cut if span.numel]


def lay_out(parameters: Sequence[tuple[str, tuple[int, ...], int]], world: int, align: int = SHARD_ALIGN) -> Layout:
    """Place (name, shape, group) triples one after another, group by group, for `world` ranks.

    Parameters, and slices of ranks, start at multiples of `align`.
    """
    entries: list[Entry] = []
    starts: list[tuple[int, int]] = []
    at = 0
    for group in sorted({group for _, _, group in parameters}):
        at = round_up(at, SHARD_ALIGN)
        starts.append((group, at))
        for name, shape, its_group in parameters:
            if its_group == group:
                at = round_up(at, max(align, PARAM_ALIGN))
                entries.append(Entry(name, tuple(shape), at, group))
                at += math.prod(shape)
    total = padded_numel(at, world, align)
    ends = [start for _, start in starts[1:]] + [total]
    regions = tuple((group, Span(start, end)) for (group, start), end in zip(starts, ends, strict=True))
    return Layout(tuple(entries), regions, total)
