"""`null`: stores nothing and counts bytes, for dry runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from tiers.base import Tier
from tiers.transfer import Transfer


class NullTier(Tier):
    """Discards writes and leaves the targets of reads unchanged; sizes, lifetimes and counts work as usual."""

    name = "null"
    stores = False

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self._counting = threading.Lock()
        self.bytes_written = 0
        self.bytes_read = 0

    def _allocate(self, nbytes: int) -> None:
        return None

    def _free(self, handle: None) -> None:
        pass

    def _write(self, handle: None, source: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        with self._counting:
            self.bytes_written += source.numel()
        return Transfer.finished(source.numel())

    def _read(self, handle: None, target: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        with self._counting:
            self.bytes_read += target.numel()
        return Transfer.finished(target.numel())
