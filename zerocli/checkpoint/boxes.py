"""Boxes: the parts of a parameter's global shape that a rank's flat slice covers. Pure integers, no tensors.

A rank owns a run of consecutive elements of a parameter. Expressed as boxes of the parameter's shape, a run
means the same at every world size, stage and placement, and also under tensor parallelism, where a rank's parameter is
a block of the global one (`Extent`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zerocli.layout.constants import PIECE_NUMEL
from zerocli.layout.shards import Span

MAX_CUT_DIMS = 12
"""Maximum number of split dimensions: more than any model has, few enough to visit every corner of a box."""

Rows = Sequence[Sequence[int]] | np.ndarray[Any, Any]


@dataclass(frozen=True)
class Box:
    """A box of a global tensor whose elements, in row-major order, are contiguous in a rank's memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Index of its first element in the rank's array."""

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Block:
    """Rows [rows.start, rows.stop) of a rank's own parameter, and the global position of its first element."""

    rows: Span
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Extent:
    """A rank's part of a global parameter: the global shape, and the blocks of rows that form the rank's parameter.

    Without tensor parallelism it is one block, the whole parameter. A matrix that is split along one dimension has one
    block, a fused matrix of queries, keys and values has three.
    """

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]


def whole(shape: tuple[int, ...]) -> Extent:
    """Return the extent of a parameter that is not split."""
    return Extent(shape, (Block(Span(0, shape[0] if shape else 1), (0,) * len(shape)),))


def boxes(shape: tuple[int, ...], run: Span, limit: int = PIECE_NUMEL) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that tile a run of a row-major tensor; `start` is within the run."""
    if not shape and run.numel:
        yield Box((), (), 0)
        return
    at = run.start
    while at < run.stop:
        left, inner, dim = run.stop - at, 1, len(shape) - 1  # `inner` elements are one index of dimension `dim`
        while dim > 0 and at % (inner * shape[dim]) == 0 and inner * shape[dim] <= min(left, limit):
            inner, dim = inner * shape[dim], dim - 1
        place = [at // math.prod(shape[d + 1 :]) % shape[d] for d in range(dim + 1)]
        # As many of that dimension as are left in the run, in their row and in the limit.
        count = min(left // inner, shape[dim] - place[dim], max(1, limit // inner))
        offsets = (*place, *(0,) * (len(shape) - dim - 1))
        yield Box(offsets, (*(1,) * dim, count, *shape[dim + 1 :]), at - run.start)
        at += count * inner


def tile(shape: tuple[int, ...], offsets: Rows, sizes: Rows) -> bool:
    """Return whether boxes within a tensor of `shape`, one per row, cover each of its elements exactly once.

    Each box is represented by its corners with alternating signs: their sum over all boxes equals that of the tensor's
    own corners if and only if the boxes tile it. That takes 2^dims corners per box.
    """
    starts = np.asarray(offsets, dtype=np.int64).reshape(len(offsets), len(shape))
    stops = starts + np.asarray(sizes, dtype=np.int64).reshape(starts.shape)
    if not math.prod(shape):
        return not (stops - starts).prod(1).any()
    cut = [d for d, n in enumerate(shape) if (starts[:, d] != 0).any() or (stops[:, d] != n).any()]
    if len(cut) > MAX_CUT_DIMS:
        return False
    whole = np.array([[shape[d] for d in cut]], dtype=np.int64)
    corners, signs = [], []
    for ends in itertools.product((False, True), repeat=len(cut)):
        sign = -1 if sum(ends) % 2 else 1
        corners += [np.where(ends, stops[:, cut], starts[:, cut]), np.where(ends, whole, 0)]
        signs += [np.full(len(starts), sign), np.full(1, -sign)]
    every, sign_of = np.concatenate(corners), np.concatenate(signs)
    if not cut:
        return int(sign_of.sum()) == 0
    order = np.lexsort(every.T)
    every = every[order]
    firsts = np.flatnonzero(np.concatenate([[True], (every[1:] != every[:-1]).any(1)]))
    return not np.add.reduceat(sign_of[order], firsts).any()


def overlapping(found: Iterable[Box], offsets: Rows, sizes: Rows) -> Iterator[list[int]]:
    """Yield, for each box, the indices of the boxes with these offsets and sizes that have elements in common with it.

    All at once for a box: a tensor that thousands of ranks saved has as many pieces.
    """
    starts, widths = np.asarray(offsets, dtype=np.int64), np.asarray(sizes, dtype=np.int64)
    for box in found:
        first, width = np.array(box.offsets, dtype=np.int64), np.array(box.sizes, dtype=np.int64)
        common = np.minimum(starts + widths, first + width) - np.maximum(starts, first)
        yield np.flatnonzero((common > 0).all(1)).tolist()


def boxes_of(extent: Extent, shape: tuple[int, ...], run: Span) -> Iterator[Box]:
    """Yield, in global coordinates, boxes that tile the run of a rank's own parameter of `shape`."""
    inner = math.prod(shape[1:])
    for block in extent.blocks:
        part = Span(block.rows.start * inner, block.rows.stop * inner).intersect(run)
        if not part.numel:
            continue
        for box in boxes(shape, part):
            inside = (box.offsets[0] - block.rows.start, *box.offsets[1:]) if shape else ()
            offsets = tuple(a + b for a, b in zip(inside, block.offsets, strict=True))
            yield Box(offsets, box.sizes, box.start + part.start - run.start)
