"""`Mover`: prefetches data from a slow tier into host memory.

Bytes go in two hops: from the disk into a cache in host memory, as far ahead as its budget allows, and from there to
the device when a buffer is free. The order of use is known, so the copy used furthest in the future is evicted: no
other policy reads the disk less often. Writes go to both the disk and the copy, so a copy is never stale, and data that
is read soon after it was written need not come from the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from offload.store import Store
from tiers.base import Block, Tier, round_up
from tiers.errors import TierFull
from tiers.transfer import JointTransfer, Transfer

NEVER = 1 << 60
"""Position in the order of use for stores that are not in it."""


@dataclass(eq=False)
class Copy:
    """The copy of a store in host memory."""

    block: Block
    valid: int = 0
    """Number of leading elements that equal the store's."""
    arriving: Transfer | None = None
    """The read from the store's tier that fills the copy."""


class Mover:
    """A cache of stores in host memory, of at most `budget` bytes.

    `open_cache` returns the tier for it: the same one until that is closed, as it may be while no copy is there.
    """

    def __init__(self, budget: int, open_cache: Callable[[int], Tier]) -> None:
        self.budget = budget
        self._open_cache = open_cache
        self._next_use: dict[StagedStore, int] = {}
        self._copies: dict[StagedStore, Copy] = {}

    @property
    def cache(self) -> Tier:
        return self._open_cache(self.budget)

    def expect(self, uses: Iterable[tuple[StagedStore, bool]]) -> None:
        """Set the order of the next uses, and start prefetching the stores that may be read now, the soonest first.

        A store that may not be read yet will be written before its use; it gets its copy then.
        """
        self._next_use = {}
        readable: dict[StagedStore, None] = {}
        for at, (store, now) in enumerate(uses):
            if store not in self._next_use:
                self._next_use[store] = at
                if now and store not in self._copies:
                    readable[store] = None
        for store in readable:
            copy = self.admit(store)
            if copy is None:
                return  # stores used later cannot evict more
            copy.arriving = store.read_ahead(self.cache.view(copy.block))
            copy.valid = store.numel

    def copy_of(self, store: StagedStore) -> Copy | None:
        """Wait for the store's copy and return it; None if the prefetch failed: reading the store raises the error."""
        copy = self._copies.get(store)
        if copy is not None and copy.arriving is not None:
            try:
                # The bytes must be in host memory before a copy out of them is issued.
                copy.arriving.wait_for_host()
                copy.arriving = None
            except Exception:
                copy.arriving = None
                self._evict(store)
                return None
        return copy

    def block_of(self, store: StagedStore) -> Block | None:
        """Return the block of the store's copy, arrived or not; None if there is no copy."""
        copy = self._copies.get(store)
        return None if copy is None else copy.block

    def admit(self, store: StagedStore) -> Copy | None:
        """Return an empty copy for the store, evicting copies that are used later; None if there is no room."""
        needed = round_up(store.nbytes, self.cache.alignment)
        while needed + sum(copy.block.reserved for copy in self._copies.values()) > self.budget:
            idle = (each for each, copy in self._copies.items() if copy.arriving is None or copy.arriving.done)
            victim = max(idle, key=self._place, default=None)
            if victim is None or self._place(victim) <= self._place(store):
                return None
            self._evict(victim)
        # A freed block counts as used until the last copy out of it is done; waiting for that would stall the host.
        if self.cache.used + needed > self.budget:
            return None
        try:
            copy = self._copies[store] = Copy(self.cache.allocate(store.nbytes))
        except TierFull:  # fragmentation, or the host has less memory than the budget
            return None
        return copy

    def close(self) -> None:
        """Wait for all prefetches and drop the copies; the stores stay."""
        for store in list(self._copies):
            self.copy_of(store)
        self._copies.clear()

    def forget(self, store: StagedStore) -> None:
        """Drop the store's copy, if there is one."""
        self._next_use.pop(store, None)
        if self.copy_of(store) is not None:
            self._evict(store)

    def _place(self, store: StagedStore) -> int:
        return self._next_use.get(store, NEVER)

    def _evict(self, store: StagedStore) -> None:
        block = self._copies.pop(store).block
        block.tier.free(block)


class StagedStore(Store):
    """A store on a slow tier, of which a mover may keep a copy in host memory."""

    def __init__(self, mover: Mover, *about: Any) -> None:
        """Take the mover, and the arguments of `Store`."""
        super().__init__(*about)
        self._mover = mover

    def put(self, start: int, source: torch.Tensor) -> Transfer:
        written = super().put(start, source)
        copy = self._mover.copy_of(self)
        if copy is None and start == 0:
            copy = self._mover.admit(self)
        if copy is None or start > copy.valid:  # no copy, or a hole before this part
            return written
        copy.valid = max(copy.valid, start + source.numel())
        kept = copy.block.tier.write(copy.block, source, start * self.dtype.itemsize)
        return self._track(JointTransfer((written, kept)), start, source.numel())

    def _read(self, start: int, target: torch.Tensor) -> Transfer:
        copy = self._mover.copy_of(self)
        # A copy may be filled only up to `valid`: an update writes it chunk by chunk.
        if copy is None or start + target.numel() > copy.valid:
            return super()._read(start, target)
        return copy.block.tier.read(copy.block, target, start * self.dtype.itemsize)

    def read_ahead(self, memory: torch.Tensor) -> Transfer:
        """Start reading the whole store into host memory."""
        self._traffic[f"{self.kind} staged"] += self.nbytes
        return self._track(self.tier.read(self.block, memory[: self.nbytes]), 0, self.numel)

    def free(self) -> None:
        self._mover.forget(self)
        super().free()
