"""`Stack`: arrays that are written in one order and read back in reverse, spread over tiers with budgets.

Their location is decided once: one contiguous arena per tier, cut into equal slots, used in the order of the placement.
Memory is then constant, and long-lived arrays do not fragment the memory of short-lived ones.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offload.placement import HBM, Share
from offload.verify import UNVERIFIED, Verifier
from tiers.base import Block, Tier, as_bytes, round_up
from tiers.errors import TierFull
from tiers.transfer import Transfer

IN_FLIGHT = 2
"""Maximum number of arrays kept on the device while they are still being written."""


@dataclass(eq=False)
class Slot:
    """Room for one array on a tier."""

    tier: Tier
    block: Block
    offset: int
    nbytes: int
    near: bool
    """Whether it is memory of the compute device."""
    taken: bool = False

    def view(self, nbytes: int) -> torch.Tensor:
        return self.tier.view(self.block)[self.offset : self.offset + nbytes]


class Saved:
    """One array of the stack; its slot is freed with the last reference to this object."""

    def __init__(self, slot: Slot, source: torch.Tensor, what: str, verifier: Verifier) -> None:
        self.slot, self.numel, self.dtype = slot, source.numel(), source.dtype
        self._source: torch.Tensor | None = None
        self._write: Transfer | None = None
        slot.taken = True
        if slot.near:
            slot.view(source.nbytes).copy_(as_bytes(source))
        else:
            self._source, self.what = source, what
            self.sums = verifier.sums(slot.block, slot.offset, source.nbytes)
            self.sums.wrote(0, source, what)
            self._write = slot.tier.write(slot.block, source, slot.offset)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def held(self) -> torch.Tensor | None:
        """Return the array if it needs no transfer: it is kept on the device, or is still being written from there."""
        if self.slot.near:
            return self.slot.view(self.nbytes).view(self.dtype)
        return self._source

    def finish_write(self) -> None:
        """Drop the device's copy after the write; raise if the write failed."""
        self._source = None
        if self._write is not None:
            write, self._write = self._write, None
            write.wait()

    def __del__(self) -> None:
        self._source = None
        self.slot.taken = False
        if self._write is not None and self._write.event is not None:
            self._write.wait()  # a CUDA copy holds its source until a wait


class Stack:
    """Places arrays by `shares`, in the order they arrive; `expected` of one size are expected to be alive at once."""

    def __init__(
        self,
        open_tier: Callable[[str], Tier],
        shares: Sequence[Share],
        expected: int,
        traffic: Counter[str],
        verifier: Verifier = UNVERIFIED,
    ) -> None:
        self._open_tier, self._shares, self._expected = open_tier, tuple(shares), max(1, expected)
        self._traffic, self._verifier = traffic, verifier
        self._slots: list[Slot] = []
        self._used: Counter[str] = Counter()
        self._in_flight: deque[weakref.ref[Saved]] = deque()
        self.notes: list[str] = []
        """Placement decisions, one line each."""

    def push(self, source: torch.Tensor, what: str) -> Saved:
        """Add a contiguous array; it is written asynchronously and must not be changed meanwhile.

        `what` describes it in messages.
        """
        self._finish_writes(IN_FLIGHT - 1)  # backpressure: the caller waits so that memory does not grow
        slot = self._take(source.nbytes)
        saved = Saved(slot, source, what, self._verifier)
        if not slot.near:
            # Weak: an array that backward has dropped frees its slot, and needs no wait here.
            self._in_flight.append(weakref.ref(saved))
            self._traffic["activations written"] += source.nbytes
        return saved

    def fetch(self, saved: Saved, target: torch.Tensor) -> Transfer:
        """Start reading an array back into `target`, after the caller's current stream."""
        self._traffic["activations read"] += target.nbytes
        transfer = saved.slot.tier.read(saved.slot.block, target, saved.slot.offset)
        transfer.what = saved.what
        return saved.sums.fetched(transfer, 0, target, saved.what)

    def close(self) -> None:
        """Free the arenas; arrays that are still in them may not be read any more."""
        self._finish_writes(0)
        for block in {slot.block for slot in self._slots}:
            block.tier.free(block)
        self._slots.clear()
        self._used.clear()

    def _finish_writes(self, left: int) -> None:
        """Wait for all writes in flight but the latest `left`, and drop their arrays from the device."""
        while len(self._in_flight) > left:
            saved = self._in_flight.popleft()()
            if saved is not None:
                saved.finish_write()

    @property
    def in_flight_nbytes(self) -> int:
        """Bytes that are on the device only because they are still being written."""
        alive = [saved for ref in self._in_flight if (saved := ref()) is not None]
        return sum(saved.nbytes for saved in alive if saved.held() is not None)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the arenas by tier."""
        return dict(self._used)

    def near(self) -> list[torch.Tensor]:
        """Return the memory of the arenas on the device."""
        return [block.tier.view(block) for block in {slot.block: None for slot in self._slots if slot.near}]

    def far(self) -> list[Block]:
        """Return the blocks of the arenas on other tiers."""
        return list({slot.block: None for slot in self._slots if not slot.near})

    # -- slots -----------------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> Slot:
        for slot in self._slots:
            if not slot.taken and slot.nbytes >= nbytes:
                return slot
        if not any(slot.taken for slot in self._slots):
            self.close()  # an array larger than any before
        first = len(self._slots)
        self._grow(nbytes)
        return self._slots[first]

    def _grow(self, nbytes: int) -> None:
        """Add slots for `expected` arrays: on the first tier until its budget or space is used up, then on the next.

        An array beyond those is one that few blocks have, such as an encoder's output: it gets a slot of its own.
        """
        left = 1 if self._slots else self._expected
        for number, share in enumerate(self._shares):
            tier = self._open_tier(share.tier)
            each = round_up(max(nbytes, 1), tier.alignment)
            count = left
            if share.budget is not None:
                count = min(count, max(0, share.budget - self._used[share.tier]) // each)
            last = number + 1 == len(self._shares)
            if last and count < left:
                raise TierFull(
                    tier=share.tier,
                    needed=left * each,
                    available=(share.budget or 0) - self._used[share.tier],
                    reason="the budget of activations",
                    hint="give it a larger budget, or name another tier after it: activations=cpu+nvme",
                )
            left -= self._add(share.tier, tier, each, count, last)
            if left == 0:
                return

    def _add(self, name: str, tier: Tier, each: int, count: int, last: bool) -> int:
        """Add up to `count` slots in one arena, as many as fit; with `last`, all of them or an error."""
        while count > 0:
            try:
                block = tier.allocate(count * each)
            except TierFull as full:
                if last:
                    raise
                fewer = min(count - 1, (full.available or 0) // each)
                self.notes.append(f"{name} has room for {fewer} of {count} checkpoints of {each} bytes; others go on")
                count = fewer
                continue
            self._used[name] += count * each
            self._slots += [Slot(tier, block, i * each, each, name == HBM) for i in range(count)]
            return count
        return 0
