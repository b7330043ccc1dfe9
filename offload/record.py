"""`Record`: several arrays of one piece in one store, chunk by chunk.

All arrays of a chunk are adjacent, so that a chunk moves in one transfer. The store counts units of two bytes: fp32
arrays come first, two units per element; int16 arrays follow, and a chunk is padded to whole fp32 words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from offload.store import Store
from offload.verify import UNVERIFIED, Verifier
from tiers.base import Tier
from tiers.transfer import Transfer

UNIT = torch.int16


class Record:
    """Arrays of `numel` elements each, cut at `cuts` (ascending, from 0 to numel)."""

    def __init__(
        self,
        tier: Tier,
        arrays: Mapping[str, torch.dtype],
        cuts: Sequence[int],
        traffic: Counter[str],
        verifier: Verifier = UNVERIFIED,
    ) -> None:
        assert set(arrays.values()) <= {torch.float32, torch.int16}
        self.arrays = dict(sorted(arrays.items(), key=lambda array: -array[1].itemsize))
        """The dtype of each array, by name, in their order within a chunk."""
        self._chunks = list(zip(cuts, cuts[1:], strict=False))
        self._starts: dict[int, int] = {}
        """The unit at which each chunk begins, by its first element."""
        total = 0
        for start, stop in self._chunks:
            self._starts[start] = total
            total += self.units(start, stop)
        self._numel = cuts[-1]
        self.store = Store(tier, "optimizer", total, UNIT, traffic, verifier)

    def units(self, start: int, stop: int) -> int:
        """Return the units of the chunk [start, stop) over all arrays."""
        units = (stop - start) * sum(dtype.itemsize for dtype in self.arrays.values()) // UNIT.itemsize
        return units + units % 2

    def split(self, start: int, stop: int, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a chunk's arrays as views of memory that holds the whole chunk."""
        found, at = {}, 0
        for name, dtype in self.arrays.items():
            end = at + (stop - start) * dtype.itemsize // UNIT.itemsize
            found[name], at = memory[at:end].view(dtype), end
        return found

    def fetch(self, start: int, stop: int, memory: torch.Tensor) -> Transfer:
        """Start reading the chunk [start, stop), which must be one of the record's chunks, into memory."""
        return self.store.fetch(self._starts[start], memory[: self.units(start, stop)])

    def put(self, start: int, stop: int, memory: torch.Tensor) -> Transfer:
        """Start writing the chunk back."""
        return self.store.put(self._starts[start], memory[: self.units(start, stop)])

    def places(self, name: str, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """Yield (unit of the store, range of the array) for each contiguous run of [start, stop) of an array."""
        names = list(self.arrays)
        before = sum(self.arrays[n].itemsize for n in names[: names.index(name)])
        width = self.arrays[name].itemsize
        for first, last in self._chunks:
            low, high = max(start, first), min(stop, last)
            if low < high:
                offset = before * (last - first) + width * (low - first)
                yield self._starts[first] + offset // UNIT.itemsize, range(low, high)

    def local(self, start: int, stop: int) -> torch.Tensor:
        """Return the chunk's own memory, which the host must be able to address; after changing it, call `changed`."""
        return self.store.local(self._starts[start], self._starts[start] + self.units(start, stop))

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Return the chunk's own memory, which the host must be able to address; nothing is waited for."""
        return self.store.view(self._starts[start], self._starts[start] + self.units(start, stop))

    def finish_transfers_in(self, start: int, stop: int) -> None:
        """Block until no transfer that is known now touches the chunk; from any thread."""
        self.store.finish_transfers_in(self._starts[start], self._starts[start] + self.units(start, stop))

    def changed(self, start: int, stop: int) -> None:
        """Accept changes to the chunk that were made through `local`."""
        self.store.changed(self._starts[start], self._starts[start] + self.units(start, stop))

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        """Write every array in full; those not given are zero."""
        device = next(iter(values.values())).device if values else torch.device("cpu")
        for start, stop in self._chunks:
            memory = torch.zeros(self.units(start, stop), dtype=UNIT, device=device)
            for name, array in self.split(start, stop, memory).items():
                if name in values:
                    array.copy_(values[name][start:stop])
            self.put(start, stop, memory).synchronize()

    def copy_from(self, other: Record) -> None:
        """Write every array in full from a record of the same arrays and chunks, a chunk at a time."""
        for start, stop in self._chunks:
            memory = torch.empty(self.units(start, stop), dtype=UNIT)
            other.fetch(start, stop, memory).synchronize()
            self.put(start, stop, memory).synchronize()

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """Return one full array, on the device."""
        whole = torch.empty(self._numel, dtype=self.arrays[name], device=device)
        for at, part in self.places(name, 0, self._numel):
            self.store.fetch(at, whole[part.start : part.stop].view(UNIT)).synchronize()
        return whole

    def write(self, name: str, values: torch.Tensor) -> None:
        """Overwrite one full array."""
        for at, part in self.places(name, 0, self._numel):
            self.store.put(at, values[part.start : part.stop].contiguous().view(UNIT)).synchronize()
