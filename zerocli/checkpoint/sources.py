"""Sources: arrays of training state on any tier, read into host memory and written from it; and what is saved of them.

The thread that writes a checkpoint issues reads while training continues; `snapshot.Snapshot` keeps updates from
overwriting what is not read yet.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.record import UNIT, Record
from offload.store import Store
from tiers.transfer import Transfer
from zerocli.checkpoint.boxes import Box, boxes
from zerocli.engine.units.master import REMAINDER, join, split
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.layout.shards import Span

Wait = Callable[[], None]
"""Blocks the host until a read is done."""


class Source(ABC):
    """One array of one dtype; positions count elements."""

    dtype: torch.dtype
    on_gpu = False
    """Whether a read is an asynchronous copy from the GPU."""

    @abstractmethod
    def read(self, start: int, target: torch.Tensor) -> Wait:
        """Start filling host memory from element `start` on, on the current stream."""

    @abstractmethod
    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite the array from element `start` on with host memory, which may be reused on return."""


class Memory(Source):
    """An array in a torch tensor, on the device or the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype, self.on_gpu = tensor, tensor.dtype, tensor.is_cuda

    def read(self, start: int, target: torch.Tensor) -> Wait:
        target.copy_(self.tensor[start : start + target.numel()], non_blocking=True)
        if not self.tensor.is_cuda:
            return lambda: None
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize

    def write(self, start: int, values: torch.Tensor) -> None:
        self.tensor[start : start + values.numel()].copy_(values)


class Stored(Source):
    """An array that a tier holds."""

    def __init__(self, store: Store) -> None:
        self._store, self.dtype = store, store.dtype

    def read(self, start: int, target: torch.Tensor) -> Wait:
        return self._store.peek(start, target).synchronize

    def write(self, start: int, values: torch.Tensor) -> None:
        self._store.put(start, values).synchronize()


class Recorded(Source):
    """One array of a record, which interleaves its arrays in chunks."""

    def __init__(self, record: Record, name: str) -> None:
        self._record, self._name, self.dtype = record, name, record.arrays[name]

    def read(self, start: int, target: torch.Tensor) -> Wait:
        transfers = [
            self._record.store.peek(at, target[part.start - start : part.stop - start].view(UNIT))
            for at, part in self._record.places(self._name, start, start + target.numel())
        ]
        return lambda: _finish(transfers)

    def write(self, start: int, values: torch.Tensor) -> None:
        _finish(
            [
                self._record.store.put(at, values[part.start - start : part.stop - start].view(UNIT))
                for at, part in self._record.places(self._name, start, start + values.numel())
            ]
        )


class SplitMaster(Source):
    """A split master: parameters and their remainder, joined when read, split when written: engine/units/master.py."""

    dtype = torch.float32

    def __init__(self, parameters: Source, remainder: Source) -> None:
        self.parameters, self.remainder = parameters, remainder
        self.on_gpu = parameters.on_gpu and remainder.on_gpu

    def read(self, start: int, target: torch.Tensor) -> Wait:
        if isinstance(self.parameters, Memory) and isinstance(self.remainder, Memory):  # joined where they are
            part = slice(start, start + target.numel())
            return Memory(join(self.parameters.tensor[part], self.remainder.tensor[part])).read(0, target)
        parameters = torch.empty(target.numel(), dtype=self.parameters.dtype)
        remainder = torch.empty(target.numel(), dtype=self.remainder.dtype)
        waits = [self.parameters.read(start, parameters), self.remainder.read(start, remainder)]
        once = threading.Lock()

        def wait() -> None:
            with once:  # the writer and an update may both wait: joining twice at a time would spoil the target
                if waits:
                    for each in waits:
                        each()
                    join(parameters, remainder, out=target)
                    waits.clear()

        return wait

    def write(self, start: int, values: torch.Tensor) -> None:
        parameters, remainder = split(values)
        self.parameters.write(start, parameters)
        self.remainder.write(start, remainder)


def _finish(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.synchronize()


def source_of(flat: Flat, name: str) -> tuple[Source, Span]:
    """Return the source of an array of the flat (`MASTER`, an optimizer state), and the span of the flat it covers."""
    if name == MASTER and flat.trainable and flat.split:
        parameters = parameters_of(flat) if flat.held_parameters is None else Memory(flat.held_parameters)
        return SplitMaster(parameters, source_of(flat, REMAINDER)[0]), flat.held
    if name == REMAINDER and flat.remainder is not None:
        return Memory(flat.remainder), flat.held
    if flat.record is not None and name in flat.record.arrays:
        return Recorded(flat.record, name), flat.held
    if name != MASTER:
        return Memory(flat.states[name]), flat.held
    if flat.trainable and flat.master is not None:
        return Memory(flat.master), flat.held
    return parameters_of(flat), flat.own


def parameters_of(flat: Flat) -> Source:
    """Return the source of this rank's slice of the parameters, in the compute dtype."""
    if flat.shard is not None:
        return Memory(flat.shard)
    assert flat.param_store is not None
    return Stored(flat.param_store)


@dataclass(eq=False)
class Part:
    """The boxes of one global tensor that this rank holds, and the array that contains them."""

    name: str
    shape: tuple[int, ...]
    source: Source
    boxes: Sequence[Box]
    owner: Any = None
    """The flat whose update changes the array, and whose move frees it; None if neither happens to it."""

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def nbytes(self) -> int:
        return sum(box.numel for box in self.boxes) * self.dtype.itemsize


def tensor_part(name: str, tensor: torch.Tensor) -> Part:
    """Return a part that is a whole tensor; it must not change afterwards."""
    flat = tensor.detach().contiguous().reshape(-1)
    return Part(name, tuple(tensor.shape), Memory(flat), list(boxes(tuple(tensor.shape), Span(0, flat.numel()))))
