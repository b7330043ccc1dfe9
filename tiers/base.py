"""`Tier`: a place to store bytes. Five methods (allocate, write, read, free, close), and capabilities as properties.

A new tier implements the underscored methods and inherits the rest: bounds, lifetimes, accounting, and the order of
transfers. The rules that every tier follows, and `tiers.conformance` checks:

- Transfers of one block whose bytes overlap happen in the order they were requested.
- A transfer starts after the work already queued on the caller's current CUDA stream that could touch its memory.
- `free` returns at once; the space is reused once no transfer in flight touches it.
- `close` refuses new work, ends what is in flight (each transfer finishes or raises) and releases everything.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor, uint8

from tiers.errors import TierError, TierFull
from tiers.events import SILENT, TierEvents
from tiers.transfer import Transfer

PAGE_NBYTES = 4096


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `nbytes`."""
    return -(-nbytes // multiple) * multiple


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the same memory as a flat uint8 tensor; the tensor must be contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"a transfer needs a contiguous tensor, not strides {tensor.stride()} of {list(tensor.shape)}")
    flat = tensor if tensor.dim() == 1 and not tensor.requires_grad else tensor.detach().reshape(-1)
    return flat.view(uint8)


@dataclass(frozen=True)
class _Use:
    """Bytes [start, end) of a block that a transfer reads or changes."""

    start: int
    end: int
    changes: bool
    transfer: Transfer


@dataclass(eq=False)
class Block:
    """`nbytes` bytes of a tier; `generation` is unique per allocation, so a stale block is always recognised."""

    tier: Tier
    nbytes: int
    generation: int
    reserved: int = field(repr=False)
    _handle: Any = field(repr=False)
    _uses: deque[_Use] = field(default_factory=deque, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _freed: bool = False


class Tier(ABC):
    """A place to store bytes; thread-safe."""

    name: str = "tier"
    addressable = False
    """Whether `view` returns the bytes as a tensor."""
    pinned = False
    """Whether its memory is registered for direct GPU copies."""
    stores = True
    """Whether what was written can be read back (false for dry runs)."""
    alignment = 1
    """Transfers at multiples of this address and offset need no extra copy; sizes round up to it."""

    events: TierEvents = SILENT
    """Subscriber that is notified of every transfer."""

    _hazard_nbytes = 1
    """Transfers that touch the same aligned span of this many bytes are ordered."""
    _full_hint = "place less there, give it a larger budget, or use a tier with more room"
    _frees_in_stream_order = False
    """Whether freed memory is reused only in the order of the stream that freed it."""

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity of {self.name} is {capacity} bytes; it cannot be negative")
        self.notes: list[str] = []
        """Automatic decisions of the tier, one line each, for the user."""
        self.capacity = capacity
        """The total bytes that the tier may hold, None if there is no bound."""
        self.peak = 0
        """The peak of the occupied bytes."""
        self._used = 0
        self._closed = False
        self._generations = itertools.count(1)
        self._lock = threading.RLock()
        self._live: set[Block] = set()
        self._retired: list[Block] = []

    # What a tier implements: a handle is opaque to others, `source` and `target` are flat uint8 tensors that fit, and
    # `after` are earlier transfers of the block that must end first.

    @abstractmethod
    def _allocate(self, nbytes: int) -> Any: ...

    @abstractmethod
    def _free(self, handle: Any) -> None: ...

    @abstractmethod
    def _write(self, handle: Any, source: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer: ...

    @abstractmethod
    def _read(self, handle: Any, target: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer: ...

    def _view(self, handle: Any) -> Tensor:
        raise TierError(f"{self.name} has no memory to look at; read the block instead", tier=self.name)

    def _where(self) -> str | None:
        """Return the path or device to name in errors, None if the tier's name is enough."""
        return None

    def _full(self, needed: int, available: int, reason: str | None = None) -> TierFull:
        """Return the error of an allocation for which there is no room."""
        place, hint = self._where(), self._full_hint
        return TierFull(tier=self.name, needed=needed, available=available, path=place, reason=reason, hint=hint)

    def _abort(self) -> None:  # noqa: B027 (optional)
        """Make transfers in flight end soon, with or without an error; called once, before `_close`."""

    def _close(self) -> None:  # noqa: B027 (optional)
        """Release everything that is left; called once, with nothing in flight."""

    # What callers use.

    @property
    def used(self) -> int:
        """Return the bytes that blocks occupy now, including rounding."""
        with self._lock:
            self._reclaim()
            return self._used

    @property
    def footprint(self) -> int:
        """Return the bytes that the tier has taken from the machine, including free space inside it."""
        return self.used

    @property
    def pinned_nbytes(self) -> int:
        """Return the bytes of host memory that the tier has page-locked for its blocks."""
        return 0

    @property
    def file_nbytes(self) -> int:
        """Return the bytes of the files that the tier keeps."""
        return 0

    def host_memory(self) -> Sequence[Tensor]:
        """Return all host memory that the tier has mapped, including free space inside it and staging."""
        return ()

    def describe(self) -> str:
        """Return one line for the user about the tier and its limits."""
        bound = "no bound" if self.capacity is None else f"{self.capacity} bytes"
        return "; ".join([f"{self.name}: {bound}", *self.notes])

    def allocate(self, nbytes: int) -> Block:
        """Return a block of exactly `nbytes`, its contents undefined; raise `TierFull` when there is no room."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        reserved = round_up(nbytes, self.alignment)
        with self._lock:
            self._refuse_if_closed()
            self._reclaim()
            try:
                handle = self._reserve(nbytes, reserved)
            except TierFull:
                if not self._retired:
                    raise
                self._reclaim(wait=True)
                handle = self._reserve(nbytes, reserved)
            self._used += reserved
            self.peak = max(self.peak, self._used)
            block = Block(self, nbytes, next(self._generations), reserved, handle)
            self._live.add(block)
            return block

    def write(self, block: Block, source: Tensor, offset: int = 0) -> Transfer:
        """Start copying `source` into the block at byte `offset`."""
        return self._move(block, source, offset, writes=True)

    def read(self, block: Block, target: Tensor, offset: int = 0) -> Transfer:
        """Start filling `target` from the block's bytes at `offset`."""
        return self._move(block, target, offset, writes=False)

    def view(self, block: Block) -> Tensor:
        """Return the block's own memory as a uint8 tensor, valid until the block is freed (addressable tiers only).

        The tier cannot track uses of the view: end another tier's transfers to or from it before `free`.
        """
        self._check(block)
        return self._view(block._handle)[: block.nbytes]

    def free(self, block: Block) -> None:
        """Free the block; its space is reused once no transfer touches it."""
        with self._lock, block._lock:
            self._check(block)
            block._freed = True
            self._live.discard(block)
            self._retired.append(block)
            self._reclaim()

    def trim(self) -> None:  # noqa: B027 (optional)
        """Return memory that holds nothing to the machine, as far as that is possible at once."""

    def close(self) -> None:
        """Refuse new work, end what is in flight and release everything; a second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._abort()
        with self._lock:
            for block in [*self._live, *self._retired]:
                with block._lock:
                    _drain(block)
            self._reclaim()
            for block in self._live:
                block._handle = None
            self._live.clear()
            self._used = 0
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _move(self, block: Block, tensor: Tensor, offset: int, writes: bool) -> Transfer:
        began = time.perf_counter()
        transfer = self._begin(block, as_bytes(tensor), offset, writes)
        self.events.transfer(block, transfer, writes, began)
        return transfer

    def _begin(self, block: Block, data: Tensor, offset: int, writes: bool) -> Transfer:
        if offset < 0 or offset + data.numel() > block.nbytes:
            raise ValueError(f"bytes {offset} to {offset + data.numel()} are outside a block of {block.nbytes} bytes")
        with block._lock:
            self._check(block)
            if data.numel() == 0:
                return Transfer.finished(0)
            start = offset // self._hazard_nbytes * self._hazard_nbytes
            end = round_up(offset + data.numel(), self._hazard_nbytes)
            # Each answer may be a call to a driver, so only the oldest are asked, and those that touch these bytes.
            while block._uses and block._uses[0].transfer.done:
                block._uses.popleft()
            after = [
                use.transfer
                for use in block._uses
                if (writes or use.changes) and use.start < end and start < use.end and not use.transfer.done
            ]
            transfer = (self._write if writes else self._read)(block._handle, data, offset, after)
            if not transfer.done:
                block._uses.append(_Use(start, end, writes, transfer))
            return transfer

    def _reserve(self, nbytes: int, reserved: int) -> Any:
        if self.capacity is not None and self._used + reserved > self.capacity:
            raise self._full(reserved, self.capacity - self._used)
        return self._allocate(nbytes)

    def _reclaim(self, wait: bool = False) -> None:
        """Reclaim the space of freed blocks that no transfer touches; with `wait`, of all freed blocks."""
        waiting = []
        for block in self._retired:
            if wait:
                _drain(block)
            if all(self._is_over(use.transfer) for use in block._uses):
                block._uses.clear()
                self._free(block._handle)
                block._handle = None
                self._used -= block.reserved
            else:
                waiting.append(block)
        self._retired = waiting

    def _is_over(self, transfer: Transfer) -> bool:
        return transfer.done or (self._frees_in_stream_order and transfer.event is not None and transfer.released)

    def _check(self, block: Block) -> None:
        self._refuse_if_closed()
        if block.tier is not self:
            raise TierError(f"this block belongs to {block.tier.name}, not to this {self.name}", tier=self.name)
        if block._freed:
            raise TierError(f"block {block.generation} of {self.name} was freed already", tier=self.name)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise TierError(f"{self.name} is closed", tier=self.name)


def _drain(block: Block) -> None:
    """Block the host until no transfer touches the block; errors are left to the callers of the transfers."""
    for use in block._uses:
        try:
            use.transfer.synchronize()
        except Exception:
            pass
