"""`dram`: host memory in exact-size, page-aligned arenas, pinned where there is a GPU.

Arenas are mapped and pinned when a block first needs one: pinning is slow, so arenas stay pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tiers.base import PAGE_NBYTES, Tier, round_up
from tiers.copies import Copier
from tiers.errors import TierError, format_nbytes
from tiers.extents import Extents
from tiers.limits import read_limits
from tiers.pages import Pages, Registrar
from tiers.transfer import Transfer

ARENA_NBYTES = 256 << 20
FIRST_ARENA_NBYTES = 16 << 20


class _Arena:
    """One mapping, cut into blocks."""

    def __init__(self, nbytes: int, shared: bool) -> None:
        self.pages = Pages(nbytes, huge=not shared)
        self.extents = Extents(self.pages.nbytes)


@dataclass(frozen=True)
class _Place:
    arena: _Arena
    start: int
    nbytes: int

    def bytes(self, offset: int, nbytes: int) -> Tensor:
        start = self.start + offset
        return self.arena.pages.bytes[start : start + nbytes]


class DramTier(Tier):
    """Host memory; `pin` is True (pinned or an error), False, or "auto" (pinned if the machine allows it)."""

    name = "dram"
    addressable = True
    alignment = PAGE_NBYTES

    def __init__(
        self,
        capacity: int | None = None,
        *,
        pin: bool | Literal["auto"] = "auto",
        arena_nbytes: int = ARENA_NBYTES,
        registrar: Registrar | None = None,
    ) -> None:
        self.limits = read_limits()
        """What the machine allowed when the tier was opened."""
        super().__init__(self.limits.available if capacity is None else capacity)
        self._must_pin = pin is True
        self._registrar = registrar or Registrar()
        self._pin = pin is not False and self._registrar.available
        if self._must_pin and not self._pin:
            raise TierError("host memory cannot be pinned: there is no GPU to pin it for", tier=self.name)
        self._arena_nbytes = round_up(max(arena_nbytes, 1), PAGE_NBYTES)
        self._arenas: list[_Arena] = []
        self._copier = Copier(self.name)

    @property
    def pinned(self) -> bool:  # type: ignore[override]
        """Whether its memory is (or, before the first block, will be) registered with CUDA."""
        return self._pin and all(arena.pages.pinned for arena in self._arenas)

    @property
    def pinned_nbytes(self) -> int:
        with self._lock:
            return sum(arena.pages.nbytes for arena in self._arenas if arena.pages.pinned)

    @property
    def footprint(self) -> int:
        with self._lock:
            return sum(arena.pages.nbytes for arena in self._arenas)

    def host_memory(self) -> list[Tensor]:
        with self._lock:
            return [arena.pages.bytes for arena in self._arenas]

    def trim(self) -> None:
        with self._lock:
            self._reclaim()
            self._unmap_empty()

    def describe(self) -> str:
        """Return what was found: `94.2 GiB free (cgroup limit 120 GiB), memlock unlimited, pinned`."""
        state = "pinned" if self.pinned else "not pinned"
        return "; ".join([f"{self.limits.describe()}, {state}", *self.notes])

    def _allocate(self, nbytes: int) -> _Place | None:
        if nbytes == 0:
            return None
        nbytes = round_up(nbytes, PAGE_NBYTES)
        for arena in self._arenas:
            start = arena.extents.take(nbytes)
            if start is not None:
                return _Place(arena, start, nbytes)
        arena = self._map(nbytes)
        start = arena.extents.take(nbytes)
        assert start is not None
        return _Place(arena, start, nbytes)

    def _free(self, handle: _Place | None) -> None:
        if handle is not None:
            handle.arena.extents.give(handle.start, handle.nbytes)

    def _write(self, handle: _Place, source: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        return self._copier.copy(source, handle.bytes(offset, source.numel()), after, self.events)

    def _read(self, handle: _Place, target: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        return self._copier.copy(handle.bytes(offset, target.numel()), target, after, self.events)

    def _view(self, handle: _Place | None) -> Tensor:
        return torch.empty(0, dtype=torch.uint8) if handle is None else handle.bytes(0, handle.nbytes)

    def _close(self) -> None:
        self._copier.close()
        for arena in self._arenas:
            arena.pages.release()
        self._arenas = []

    def _map(self, nbytes: int) -> _Arena:
        """Return a new arena with room for `nbytes`, within the budget and what the machine has left."""
        assert self.capacity is not None
        budget = round_up(self.capacity, PAGE_NBYTES)
        if budget - self.footprint < nbytes:
            self._unmap_empty()
        room = budget - self.footprint
        if room < nbytes:
            raise self._full(nbytes, room, f"{format_nbytes(self.footprint)} mapped, in pieces too small")
        limits = read_limits()
        if limits.available < nbytes:
            raise self._full(nbytes, limits.available, limits.describe())
        size = min(self._arena_size(nbytes), room, max(nbytes, limits.available))
        arena = _Arena(size, shared=size > nbytes)
        if self._pin:
            self._pin_arena(arena)
        self._arenas.append(arena)
        return arena

    def _arena_size(self, nbytes: int) -> int:
        """Return the size of an arena for a block of `nbytes`: exactly its size if it is large, else room for many.

        A large block in a shared arena would waste a large remainder. The shared arenas of a small job stay small.
        """
        if 8 * nbytes >= self._arena_nbytes:
            return nbytes
        return max(nbytes, min(self._arena_nbytes, max(FIRST_ARENA_NBYTES, self.footprint)))

    def _pin_arena(self, arena: _Arena) -> None:
        """Pin the arena if the driver accepts it; the memlock limit is not checked, as it may not apply."""
        refusal = arena.pages.pin(self._registrar)
        if refusal is None:
            return
        wanted = self.pinned_nbytes + arena.pages.nbytes
        memlock = self.limits.memlock
        limit = "memlock unlimited" if memlock is None else f"memlock limit {format_nbytes(memlock)}"
        fact = f"pinning {format_nbytes(wanted)} of host memory was refused ({refusal}; {limit})"
        if self._must_pin:
            arena.pages.release()
            raise TierError(fact, tier=self.name, hint="raise the limit (ulimit -l unlimited), or go on unpinned")
        self._pin = False
        self.notes.append(f"{fact}: going on unpinned, copies to the GPU will be slower")

    def _unmap_empty(self) -> None:
        kept = []
        for arena in self._arenas:
            if arena.extents.free == arena.extents.size:
                arena.pages.release()
            else:
                kept.append(arena)
        self._arenas = kept
