"""`Store`: one array of training state on any tier."""

from __future__ import annotations

from collections import Counter

import torch

from offload.verify import UNVERIFIED, Verifier
from tiers.base import Tier
from tiers.transfer import Transfer


class Store:
    """`numel` elements of one dtype in a block of a tier; parts are moved by transfers, and the bytes are counted."""

    def __init__(
        self,
        tier: Tier,
        kind: str,
        numel: int,
        dtype: torch.dtype,
        traffic: Counter[str],
        verifier: Verifier = UNVERIFIED,
    ) -> None:
        self.tier, self.kind, self.numel, self.dtype = tier, kind, numel, dtype
        self._traffic = traffic
        self.block = tier.allocate(numel * dtype.itemsize)
        self._sums = verifier.sums(self.block)
        self._open: list[tuple[Transfer, range]] = []
        """Transfers that may be under way, with the elements that they touch."""
        self.what = kind
        """What it holds, for messages."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def put(self, start: int, source: torch.Tensor) -> Transfer:
        """Start writing `source` at element `start`, after the caller's current stream."""
        assert source.dtype == self.dtype
        self._traffic[f"{self.kind} written"] += source.nbytes
        # Before the write begins, from the source: the checksum must not depend on what arrives.
        self._sums.wrote(start * self.dtype.itemsize, source, self.what)
        return self._track(self.tier.write(self.block, source, start * self.dtype.itemsize), start, source.numel())

    def fetch(self, start: int, target: torch.Tensor) -> Transfer:
        """Start filling `target` from element `start` on, after the caller's current stream and earlier writes."""
        assert target.dtype == self.dtype
        self._traffic[f"{self.kind} read"] += target.nbytes
        transfer = self._track(self._read(start, target), start, target.numel())
        return self._sums.fetched(transfer, start * self.dtype.itemsize, target, self.what)

    def copy_from(self, other: Store, numel: int) -> None:
        """Write all elements from a store of as many, `numel` at a time."""
        for start in range(0, self.numel, max(1, numel)):
            memory = torch.empty(min(numel, self.numel - start), dtype=self.dtype)
            other.fetch(start, memory).synchronize()
            self.put(start, memory).synchronize()

    def peek(self, start: int, target: torch.Tensor) -> Transfer:
        """Start filling `target` as `fetch` does, from any thread; not counted as training traffic."""
        assert target.dtype == self.dtype
        return self._sums.peek(self.block, start * self.dtype.itemsize, target, self.what)

    def local(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) in place after the array's transfers have ended; the host must be able to
        address them. After changing them, call `changed`."""
        self.finish_transfers()
        part = self.view(start, stop)
        self._sums.look(start * self.dtype.itemsize, part, self.what)
        return part

    def changed(self, start: int, stop: int) -> None:
        """Accept changes to elements [start, stop) that were made through `local`."""
        self._sums.wrote(start * self.dtype.itemsize, self.view(start, stop), self.what)

    def finish_transfers(self) -> None:
        """Block the host until no transfer touches the array; raise the first one's error."""
        for transfer, _ in self._open:
            transfer.synchronize()
        self._open.clear()

    def finish_transfers_in(self, start: int, stop: int) -> None:
        """Block until no transfer that is known now touches elements [start, stop); from any thread."""
        for transfer, span in tuple(self._open):
            if span.start < stop and start < span.stop:
                transfer.synchronize()

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) in place, on a tier that the host can address; nothing is waited for."""
        return self.tier.view(self.block).view(self.dtype)[start:stop]

    def free(self) -> None:
        """Free the array's memory once no transfer touches it."""
        self.finish_transfers()
        self.tier.free(self.block)

    def _read(self, start: int, target: torch.Tensor) -> Transfer:
        return self.tier.read(self.block, target, start * self.dtype.itemsize)

    def _track(self, transfer: Transfer, start: int, numel: int) -> Transfer:
        transfer.what = self.what
        # Failed ones stay, so that `finish_transfers` raises their error. A new list: another thread may read the old.
        # Only the oldest are asked: each answer is a call to the device, and an update has many under way.
        done = 0
        while done < len(self._open) and self._open[done][0].done:
            done += 1
        failed = [each for each in self._open[:done] if each[0].error is not None]
        self._open = [*failed, *self._open[done:], (transfer, range(start, start + numel))]
        return transfer
