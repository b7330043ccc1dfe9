"""`hbm`: the memory of the compute device, in exact blocks. Without a GPU host memory is reported as hbm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiers.base import Tier
from tiers.copies import Copier
from tiers.errors import format_nbytes
from tiers.limits import read_limits
from tiers.transfer import Transfer


class HbmTier(Tier):
    """Blocks are tensors on `device`; copies in and out run on the tier's own streams.

    Allocate and free on the stream that computes with the block: its memory is reused in that stream's order.
    """

    name = "hbm"
    addressable = True

    def __init__(self, capacity: int | None = None, *, device: str | torch.device | None = None) -> None:
        self.device = _device(device)
        if capacity is None:
            cuda = self.device.type == "cuda"
            capacity = torch.cuda.get_device_properties(self.device).total_memory if cuda else read_limits().available
        super().__init__(capacity)
        self._frees_in_stream_order = self.device.type == "cuda"
        # The granularity of the CUDA allocator; elsewhere a cache line.
        self.alignment = 512 if self.device.type == "cuda" else 64
        self._copier = Copier(self.name)

    def describe(self) -> str:
        """Return the device and its budget: `hbm: 120 GiB of cuda:0`."""
        return "; ".join([f"hbm: {format_nbytes(self.capacity or 0)} of {self.device}", *self.notes])

    def _allocate(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            raise self._full(nbytes, _free(self.device), "out of memory") from None

    def _free(self, handle: Tensor) -> None:
        pass  # the block held the last reference

    def _write(self, handle: Tensor, source: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        return self._copier.copy(source, handle[offset : offset + source.numel()], after)

    def _read(self, handle: Tensor, target: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        return self._copier.copy(handle[offset : offset + target.numel()], target, after)

    def _view(self, handle: Tensor) -> Tensor:
        return handle

    def _where(self) -> str:
        return str(self.device)

    def _close(self) -> None:
        self._copier.close()


def _device(device: str | torch.device | None) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_limits().available
