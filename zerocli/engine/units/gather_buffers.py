"""Gather buffers: the memory that units are gathered into, and who else keeps views of it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerocli.engine.guards.holders import mark_own
from zerocli.engine.streams import StreamEvent
from zerocli.engine.units.unit import Flat


@dataclass(eq=False)
class Buffer:
    """One gather buffer of the pool."""

    tensor: torch.Tensor
    staged: torch.Tensor | None = None
    """Where encoded parameters arrive before they are decoded into `tensor`."""
    holder: Flat | None = None
    freed: StreamEvent | None = None
    """The last compute that reads the buffer ends here; the next gather into it starts after this event."""
    used_at: int = 0
    views: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=dict)
    """The part that a flat takes, and its parameters as views, by the flat's id; created once."""
    own_uses: int = 0
    """Use count of the storage without references from outside the gatherer."""
    last: Flat | None = None
    """The flat that it holds or has held last."""

    def __post_init__(self) -> None:
        self.storage = self.tensor.untyped_storage()
        mark_own(self.tensor)

    @property
    def uses(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)

    @property
    def aliased(self) -> bool:
        """Whether other code keeps a view of it; only valid while no parameter is a view of it."""
        return self.uses > self.own_uses

    def part_for(self, flat: Flat) -> torch.Tensor:
        """Return the part that the flat takes from now on; called while no other code refers to the buffer."""
        if id(flat) not in self.views:
            self.views[id(flat)] = self.tensor[: flat.layout.total], flat.views(self.tensor)
            mark_own(self.views[id(flat)][0], *self.views[id(flat)][1])
        self.own_uses, self.last = self.uses, flat
        return self.views[id(flat)][0]


class ReleasedBuffer:
    """A released buffer that other code keeps views of; does not keep its memory alive."""

    def __init__(self, buffer: Buffer) -> None:
        assert buffer.last is not None
        self.flat, self._buffer = buffer.last, weakref.ref(buffer)
        self._storage = StorageWeakRef(buffer.storage)
        self.start = buffer.tensor.data_ptr()
        self.stop = self.start + buffer.tensor.nbytes

    @property
    def storage(self) -> int:
        """Identity of its storage, valid while it is held."""
        return int(self._storage.cdata)

    @property
    def held(self) -> bool:
        """Whether other code still keeps a view of it."""
        buffer = self._buffer()
        return not self._storage.expired() if buffer is None else buffer.aliased
