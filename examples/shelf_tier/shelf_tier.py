"""A tier from another package: blocks on a shelf of plain host memory, copied at once.

    pip install ./examples/shelf_tier
    zerocli train --stage 3 --offload optimizer=shelf

The entry point in pyproject.toml makes its name known. `Tier` does the rest: bounds, lifetimes, accounting, and the
order of transfers. A tier that can copy in the background returns a transfer that is not finished yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tiers.base import Tier
from tiers.transfer import Transfer


class ShelfTier(Tier):
    """Host memory that nobody has pinned; each transfer is done when it is returned."""

    name = "shelf"

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def _free(self, handle: Tensor) -> None:
        pass

    def _write(self, handle: Tensor, source: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        for earlier in after:
            earlier.synchronize()
        handle[offset : offset + source.numel()].copy_(source)
        return Transfer.finished(source.numel())

    def _read(self, handle: Tensor, target: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        for earlier in after:
            earlier.synchronize()
        target.copy_(handle[offset : offset + target.numel()])
        return Transfer.finished(target.numel())
