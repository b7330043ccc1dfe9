"""The layout of a block in its files: a record of stripe units, and the pieces a transfer is cut into."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tiers.base import PAGE_NBYTES
from tiers.swapfile import SwapFile


@dataclass
class Unit:
    """`nbytes` true bytes at `start` of a file; `checksum` covers all of them, None before the first write."""

    file: SwapFile
    start: int
    nbytes: int
    checksum: int | None = None


@dataclass
class Record:
    """A block's units, in order: all of the stripe unit's size except the last."""

    units: list[Unit]
    broken: dict[int, str] = field(default_factory=dict)
    """Units whose last write failed, and why: their contents on disk are undefined."""


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of one unit and the caller's memory for them."""

    index: int
    unit: Unit
    start: int
    end: int
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def whole(self) -> bool:
        """Whether this is all of its unit."""
        return self.start == 0 and self.end == self.unit.nbytes

    @property
    def in_place(self) -> bool:
        """Whether the bytes can move directly between disk and the caller's memory, except a last partial page."""
        if self.data.is_cuda:
            return False
        aligned = self.start % PAGE_NBYTES == 0 and self.data.data_ptr() % PAGE_NBYTES == 0
        to_the_end = self.nbytes % PAGE_NBYTES == 0 or self.end == self.unit.nbytes
        return not self.unit.file.direct or (aligned and to_the_end)

    @property
    def body_nbytes(self) -> int:
        """Return how many bytes of an in-place piece move directly to or from the disk: whole pages with O_DIRECT."""
        return self.nbytes // PAGE_NBYTES * PAGE_NBYTES if self.unit.file.direct else self.nbytes


def cut(record: Record, data: Tensor, offset: int, unit_nbytes: int) -> list[Piece]:
    """Return the parts of units that bytes [offset, offset + len(data)) fall into; pieces tile `data` exactly."""
    pieces = []
    end = offset + data.numel()
    for index in range(offset // unit_nbytes, -(-end // unit_nbytes)):
        base = index * unit_nbytes
        unit = record.units[index]
        first, last = max(offset, base), min(end, base + unit.nbytes)
        pieces.append(Piece(index, unit, first - base, last - base, data[first - offset : last - offset]))
    return pieces
