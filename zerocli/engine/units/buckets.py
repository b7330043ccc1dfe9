"""Buckets: buffers of constant size for reduce-scattering gradients, and which part of a flat each one carries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zerocli.engine.streams import Waits
from zerocli.engine.units.unit import Flat
from zerocli.layout.buffers import bucket_numel, bucket_width
from zerocli.layout.flats import Sizing
from zerocli.layout.shards import Layout, Span

Strided = tuple[tuple[int, ...], tuple[int, ...], int]
"""(size, stride, offset) of a view into one-dimensional memory."""


@dataclass(frozen=True)
class Copy:
    """A part of one gradient and its position in a bucket."""

    entry: int
    """Index of the parameter in the layout; -1 for padding, which is zeroed."""
    source: Strided
    target: Strided


@dataclass(frozen=True)
class BucketPlan:
    """The part of a flat in one bucket: the same columns of every rank's slice."""

    columns: Span
    numel: int
    copies: tuple[Copy, ...]
    sizes: tuple[int, ...] = ()
    """Lengths of the copies if they tile the bucket one after another: one call then makes all their views."""


def plan_buckets(layout: Layout, world: int, numel: int) -> list[BucketPlan]:
    """Cut a flat into buckets of at most `numel` elements, each holding equal columns of all ranks' slices."""
    each = layout.total // world
    width = bucket_width(layout.total, world, numel)
    spans = [(i, entry.span) for i, entry in enumerate(layout.entries)] + [(-1, gap) for gap in layout.gaps()]
    plans = []
    for columns in Span(0, each).pieces(width):
        copies: list[Copy] = []
        for index, span in spans:
            copies.extend(_copies(index, span, columns, each, world))
        copies.sort(key=lambda copy: copy.target[2])
        plans.append(BucketPlan(columns, columns.numel * world, tuple(copies), _tiling(copies, columns.numel * world)))
    return plans


def _tiling(copies: list[Copy], numel: int) -> tuple[int, ...]:
    """Return the lengths of the copies' targets if, in order, they tile `numel` elements; else nothing."""
    at = 0
    for copy in copies:
        size, _, offset = copy.target
        if offset != at or len(size) > 1:
            return ()
        at += size[0]
    return tuple(copy.target[0][0] for copy in copies) if at == numel else ()


def _copies(index: int, span: Span, columns: Span, each: int, world: int) -> list[Copy]:
    """Return the copies from the parameter at `span` of the flat into the bucket of `columns`; full rows are one."""
    if columns.numel == each:  # the bucket is the whole flat: one contiguous copy
        return [Copy(index, ((span.numel,), (1,), 0), ((span.numel,), (1,), span.start))] if span.numel else []
    found: list[Copy] = []
    first, last = span.start // each, min(world - 1, max(span.start, span.stop - 1) // each)
    whole: list[int] = []
    for row in range(first, last + 1):
        part = columns.shifted(row * each).intersect(span)
        if part.numel == columns.numel:
            whole.append(row)
        elif part.numel:
            at = row * columns.numel + part.start - row * each - columns.start
            found.append(Copy(index, ((part.numel,), (1,), part.start - span.start), ((part.numel,), (1,), at)))
    if whole:  # consecutive by construction
        size = (len(whole), columns.numel)
        source = (size, (each, 1), whole[0] * each + columns.start - span.start)
        found.append(Copy(index, source, (size, (columns.numel, 1), whole[0] * columns.numel)))
    return found


class BucketPlans:
    """The buckets of each flat: their dtype, their size and their plans, which are made on first use."""

    def __init__(self, flats: list[Flat], sizing: Sizing, world: int) -> None:
        self._reduce_fp32, self._world = sizing.reduce == "fp32", world
        specs = [flat.spec for flat in flats]
        dtypes = {self.dtype(flat) for flat in flats}
        self._numels = {dtype: bucket_numel(specs, sizing, dtype.itemsize) for dtype in dtypes}
        self._plans: dict[int, list[BucketPlan]] = {}

    def dtype(self, flat: Flat) -> torch.dtype:
        """Return the dtype in which a flat's gradients are reduced."""
        return torch.float32 if self._reduce_fp32 else flat.dtype

    def numel(self, flat: Flat) -> int:
        """Return the number of elements of a bucket for the flat's gradients."""
        return self._numels[self.dtype(flat)]

    def of(self, flat: Flat) -> list[BucketPlan]:
        """Return the plans of the flat's buckets, in the order of their columns."""
        plans = self._plans.get(id(flat))
        if plans is None:
            plans = self._plans[id(flat)] = plan_buckets(flat.layout, self._world, self.numel(flat))
        return plans


def fill(memory: torch.Tensor, plan: BucketPlan, sources: list[torch.Tensor | None], add: bool = False) -> None:
    """Copy the plan's part of the gradients into memory, or add it to the contents with `add`."""
    into, out_of, zeroed = [], [], []
    for copy, target in zip(plan.copies, _targets(memory, plan), strict=True):
        source = sources[copy.entry] if copy.entry >= 0 else None
        if source is None:
            zeroed.append(target)
        else:
            into.append(target)
            size, stride, offset = copy.source
            if size != source.shape:  # a part of it
                source = source.as_strided(size, stride, source.storage_offset() + offset)
            out_of.append(source)
    if zeroed and not add:
        torch._foreach_zero_(zeroed)
    if into:
        (torch._foreach_add_ if add else torch._foreach_copy_)(into, out_of)


def _targets(memory: torch.Tensor, plan: BucketPlan) -> Sequence[torch.Tensor]:
    """Return the views of memory that the plan's copies go to."""
    if plan.sizes:
        return memory.split_with_sizes(plan.sizes)
    start = memory.storage_offset()
    return [memory.as_strided(size, stride, start + at) for size, stride, at in (each.target for each in plan.copies)]


class Completion:
    """The remaining work of a reduction, run at most once; `cause` is the wait that running it is charged to."""

    def __init__(self, finish: Callable[[], None], cause: str = "collectives") -> None:
        self._finish: Callable[[], None] | None = finish
        self.cause = cause

    def run(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass
class Bucket:
    """Memory that is used by one reduction at a time."""

    memory: torch.Tensor
    busy: Completion | None = None
    """The completion of the reduction that still uses the memory."""


class Pool:
    """At most `count` buckets per size and dtype, allocated on first use and then used in turn."""

    def __init__(self, count: int, device: torch.device, waits: Waits) -> None:
        self._count, self._device, self._waits = count, device, waits
        self._kinds: dict[tuple[int, torch.dtype], list[Bucket]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Return a bucket whose last use is complete, waiting for it if necessary."""
        buckets = self._kinds.setdefault((numel, dtype), [])
        is_free = bool(buckets) and buckets[0].busy is None
        if len(buckets) < self._count and not is_free:
            buckets.append(Bucket(torch.empty(numel, dtype=dtype, device=self._device)))
            return buckets[-1]
        bucket = buckets.pop(0)
        buckets.append(bucket)
        if bucket.busy is not None:
            with self._waits.waiting(bucket.busy.cause):
                bucket.busy.run()
            bucket.busy = None
        return bucket

    def all(self) -> list[Bucket]:
        return [bucket for buckets in self._kinds.values() for bucket in buckets]

    def clear(self) -> None:
        """Mark all buckets as free; their reductions are complete."""
        for bucket in self.all():
            bucket.busy = None
