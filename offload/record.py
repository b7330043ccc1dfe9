"""`Record`: several fp32 arrays of one piece in one store, chunk by chunk.

All arrays of a chunk are adjacent, so that a chunk moves in one transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from offload.store import Store
from offload.verify import UNVERIFIED, Unverified
from tiers.base import Tier
from tiers.transfer import Transfer


class Record:
    """Arrays of `numel` elements each, cut at `cuts` (ascending, from 0 to numel)."""

    def __init__(
        self,
        tier: Tier,
        arrays: Sequence[str],
        cuts: Sequence[int],
        traffic: Counter[str],
        verifier: Unverified = UNVERIFIED,
    ) -> None:
        self.arrays = tuple(arrays)
        self._cuts = list(cuts)
        self.store = Store(tier, "optimizer", cuts[-1] * len(self.arrays), torch.float32, traffic, verifier)

    def width(self, start: int, stop: int) -> int:
        """Return the elements of the chunk [start, stop) over all arrays."""
        return (stop - start) * len(self.arrays)

    def split(self, start: int, stop: int, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a chunk's arrays as views of memory that holds the whole chunk."""
        each = stop - start
        return {name: memory[i * each : (i + 1) * each] for i, name in enumerate(self.arrays)}

    def fetch(self, start: int, stop: int, memory: torch.Tensor) -> Transfer:
        """Start reading the chunk [start, stop), which must be one of the record's chunks, into memory."""
        return self.store.fetch(start * len(self.arrays), memory[: self.width(start, stop)])

    def put(self, start: int, stop: int, memory: torch.Tensor) -> Transfer:
        """Start writing the chunk back."""
        return self.store.put(start * len(self.arrays), memory[: self.width(start, stop)])

    def places(self, name: str, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """Yield (element of the store, range of the array) for each contiguous run of [start, stop) of an array."""
        index = self.arrays.index(name)
        for first, last in zip(self._cuts, self._cuts[1:], strict=False):
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield first * len(self.arrays) + index * (last - first) + low - first, range(low, high)

    def local(self, start: int, stop: int) -> torch.Tensor | None:
        """Return the chunk's own memory if the host can address it; after changing it, call `changed`."""
        return self.store.local(start * len(self.arrays), stop * len(self.arrays))

    def changed(self, start: int, stop: int) -> None:
        """Accept changes to the chunk that were made through `local`."""
        self.store.changed(start * len(self.arrays), stop * len(self.arrays))

    def fill(self, values: dict[str, torch.Tensor]) -> None:
        """Write every array in full; those not given are zero."""
        device = next(iter(values.values())).device if values else torch.device("cpu")
        for start, stop in zip(self._cuts, self._cuts[1:], strict=False):
            memory = torch.zeros(self.width(start, stop), device=device)
            for name, array in self.split(start, stop, memory).items():
                if name in values:
                    array.copy_(values[name][start:stop])
            self.put(start, stop, memory).synchronize()

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """Return one full array, on the device."""
        whole = torch.empty(self._cuts[-1], device=device)
        for start, stop in zip(self._cuts, self._cuts[1:], strict=False):
            at = start * len(self.arrays) + self.arrays.index(name) * (stop - start)
            self.store.fetch(at, whole[start:stop]).synchronize()
        return whole

    def write(self, name: str, values: torch.Tensor) -> None:
        """Overwrite one full array."""
        for start, stop in zip(self._cuts, self._cuts[1:], strict=False):
            at = start * len(self.arrays) + self.arrays.index(name) * (stop - start)
            self.store.put(at, values[start:stop].contiguous()).synchronize()
