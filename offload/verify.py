"""Verification: data read from a tier equals what was written there, or an error names it.

With `verify` every offloaded array (`Store`, and the arrays of a `Stack`) has a `Sums`: checksums of what was written,
taken from the source before the write and kept in this process. Data is compared where it is used, so one comparison
covers the whole path: staging, the tier, a prefetched copy, the link. Bytes of an earlier write or of another piece are
detected too, as checksums are not stored with the data. Tiers are not involved.

Checksums cover cells of `CELL_NBYTES`, cut where transfers begin and end. Cuts are kept: only the first transfer that
makes a cut has to read a cell back. So after the first step any mix of granularities costs no more than the checksums
themselves.

In host memory a mismatch raises at once. On a GPU the host does not wait for the comparison: each stream keeps the
number of the first piece that differed, which `collect` gathers and the engine checks before it reports the step.
"""

from __future__ import annotations

import bisect
import dataclasses
import threading
from collections.abc import Callable

import torch

from offload.checksum import checksums, kernels
from tiers.base import Block, as_bytes
from tiers.copies import stream_position
from tiers.errors import TierError, format_nbytes
from tiers.transfer import JointTransfer, Transfer

CELL_NBYTES = 2 << 20
"""Large enough to need few checksums, small enough to read back when a transfer begins inside a cell."""


class Corrupted(TierError):
    """Bytes that were read from a tier are not those that were written there."""


class Unchecked:
    """The checksums of an array that is not verified: none."""

    def wrote(self, offset: int, source: torch.Tensor, what: str) -> None:
        """Take the checksums of `source`, which is about to be written, or was changed in place, at byte `offset`."""

    def fetched(self, transfer: Transfer, offset: int, target: torch.Tensor, what: str) -> Transfer:
        """Return the transfer that fills `target`; waiting for it compares the data."""
        return transfer

    def peek(self, block: Block, offset: int, target: torch.Tensor, what: str) -> Transfer:
        """Start filling `target` from the block, from any thread, and compare as `fetched` does."""
        return block.tier.read(block, target, offset)

    def look(self, offset: int, memory: torch.Tensor, what: str) -> None:
        """Compare the tier's own memory before it is used in place."""


_UNCHECKED = Unchecked()


class Verifier:
    """Records mismatches for one rank, if `active`; after the first one `refuse` always raises."""

    def __init__(self, active: bool = True) -> None:
        self.active = active
        self._failure: tuple[str, str] | None = None
        self._pieces: dict[tuple[str, str], int] = {}
        """Numbers of pieces by (message, tier), from 1."""
        self._flags: dict[torch.cuda.Stream, torch.Tensor] = {}
        """By stream: the number of the first piece that differed there. Not shared, so no stream waits for another."""
        self._sides: dict[torch.device, torch.cuda.Stream] = {}
        """Streams on which checksums are copied to the host."""

    def sums(self, block: Block, start: int = 0, nbytes: int | None = None) -> Unchecked:
        """Return the checksums of an array in bytes [start, start + nbytes) of the block, all of it by default."""
        if not self.active or not block.tier.stores:
            return _UNCHECKED
        return Sums(self, block, start, block.nbytes if nbytes is None else nbytes)

    @property
    def failed(self) -> bool:
        """Whether a piece differed in host memory."""
        return self._failure is not None

    def differs(self, message: str, tier: str) -> Corrupted:
        """Record that a piece differed in host memory; return the error to raise."""
        self._failure = self._failure or (message, tier)
        return _error(message, tier)

    def bring(self, taken: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return checksums on the device that compares; their data has been read back since they were taken."""
        if taken.is_cuda and device.type == "cpu":
            # They are complete: the write, and so the read, came after them. The current stream may be far behind.
            if taken.device not in self._sides:
                self._sides[taken.device] = torch.cuda.Stream(taken.device)
            with torch.cuda.stream(self._sides[taken.device]):
                return taken.cpu()
        if taken.is_cuda:
            taken.record_stream(torch.cuda.current_stream(taken.device))
        return taken.to(device, non_blocking=True)

    def flag(self, found: torch.Tensor, written: torch.Tensor, message: str, tier: str) -> None:
        """Record, in the order of the current stream, whether a piece differed on the GPU."""
        number = self._pieces.setdefault((message, tier), len(self._pieces) + 1)
        stream = torch.cuda.current_stream(found.device)
        if stream not in self._flags:
            self._flags[stream] = torch.zeros((), dtype=torch.int64, device=found.device)
        # In place: a flag is set once, and a concurrent read on another stream sees it now or the next time.
        flag = self._flags[stream]
        if (triton := kernels()) is not None:
            triton.note_difference(found, written, flag, number)
        else:
            flag.copy_(torch.where(flag == 0, (found != written).any() * number, flag))

    def collect(self) -> torch.Tensor | None:
        """Return the number of a piece that differed on the GPU, 0 if none did, in the order of the current stream.

        None if nothing was compared on a GPU.
        """
        if not self._flags:
            return None
        current = torch.cuda.current_stream(next(iter(self._flags.values())).device)
        for stream, flag in self._flags.items():
            current.wait_stream(stream)
            flag.record_stream(current)
        return torch.stack(list(self._flags.values())).max()

    def refuse(self, number: int = 0) -> None:
        """Raise `Corrupted` if anything read so far differed in host memory, or the piece `number` did on a GPU."""
        if self._failure is None and number:
            self._failure = next(piece for piece, own in self._pieces.items() if own == number)
        if self._failure is not None:
            raise _error(*self._failure)


UNVERIFIED = Verifier(active=False)


class Sums(Unchecked):
    """The checksums of one array: of its cells, as they were last written."""

    def __init__(self, verifier: Verifier, block: Block, start: int, nbytes: int) -> None:
        self._verifier, self._block, self._start = verifier, block, start
        self._cuts = [*range(0, nbytes, CELL_NBYTES), nbytes]
        """The starts of all cells, and the array's end."""
        self._known: dict[int, tuple[torch.Tensor, int]] = {}
        """By a cell's first byte: its checksum, as (tensor of checksums, index)."""
        self._lock = threading.RLock()

    def wrote(self, offset: int, source: torch.Tensor, what: str) -> None:
        data = as_bytes(source)
        if not data.numel():
            return
        position = None if data.is_cuda else stream_position(data)
        if position is not None:
            position.synchronize()  # host memory that the caller's stream may still be filling
        with self._lock:
            cuts = self._cut(offset, offset + data.numel(), what)
            taken = checksums(data, [cut - offset for cut in cuts])
            self._known.update((cut, (taken, i)) for i, cut in enumerate(cuts[:-1]))

    def fetched(self, transfer: Transfer, offset: int, target: torch.Tensor, what: str) -> Transfer:
        data = as_bytes(target)
        if not data.numel():
            return transfer
        with self._lock:
            cuts = self._cut(offset, offset + data.numel(), what)
            return CheckedTransfer(transfer, data, self._comparison(cuts, data, what))

    def peek(self, block: Block, offset: int, target: torch.Tensor, what: str) -> Transfer:
        data = as_bytes(target)
        with self._lock:  # no new cuts: they would serve only a checkpoint
            cuts = self._around(offset, offset + data.numel())
            whole = cuts[0] == offset and cuts[-1] == offset + data.numel()
            memory = data if whole else data.new_empty(cuts[-1] - cuts[0])
            compare = self._comparison(cuts, memory, what)

        def finish(now: bool) -> None:
            compare(now)
            if memory is not data:
                data.copy_(memory[offset - cuts[0] :][: data.numel()])

        return CheckedTransfer(block.tier.read(block, memory, self._start + cuts[0]), memory, finish)

    def look(self, offset: int, memory: torch.Tensor, what: str) -> None:
        data = as_bytes(memory)
        if data.numel():
            with self._lock:
                cuts = self._cut(offset, offset + data.numel(), what)
                compare = self._comparison(cuts, data, what)
            compare(True)

    def _around(self, first: int, last: int) -> list[int]:
        """Return the cuts from the last one not after `first` to the first one not before `last`."""
        return self._cuts[bisect.bisect_right(self._cuts, first) - 1 : bisect.bisect_left(self._cuts, last) + 1]

    def _cut(self, first: int, last: int, what: str) -> list[int]:
        """Return the cuts from `first` to `last`, adding these two if they are new."""
        for at in (first, last):
            place = bisect.bisect_left(self._cuts, at)
            if self._cuts[place] != at:
                self._split(self._cuts[place - 1], at, self._cuts[place], what)
                self._cuts.insert(place, at)
        return self._around(first, last)

    def _split(self, first: int, at: int, last: int, what: str) -> None:
        """Read a cell back and take the checksums of its two parts."""
        if first in self._known:
            memory = torch.empty(last - first, dtype=torch.uint8)
            self._block.tier.read(self._block, memory, self._start + first).synchronize()
            self._comparison([first, last], memory, what)(True)
            taken = checksums(memory, [0, at - first, last - first])
            self._known[first], self._known[at] = (taken, 0), (taken, 1)

    def _comparison(self, cuts: list[int], memory: torch.Tensor, what: str) -> Callable[[bool], None]:
        """Return a function that compares memory with the cells between `cuts` as of now; with True it blocks the host.

        Cells that were never written are skipped.
        """
        runs: list[_Run] = []
        for i, cut in enumerate(cuts[:-1]):
            if cut in self._known:
                if not runs or runs[-1].last != i:
                    runs.append(_Run(i, i, []))
                runs[-1].append(*self._known[cut])

        def compare(now: bool) -> None:
            for run in runs:
                inside = cuts[run.first : run.last + 1]
                part = memory[inside[0] - cuts[0] : inside[-1] - cuts[0]]
                found = checksums(part, [cut - inside[0] for cut in inside])
                parts = [self._verifier.bring(taken[at:stop], found.device) for taken, at, stop in run.taken]
                written = parts[0] if len(parts) == 1 else torch.cat(parts)
                tier = self._block.tier.name
                if found.is_cuda and not now:
                    self._verifier.flag(found, written, self._message(inside[0], inside[-1], what), tier)
                elif not torch.equal(found, written):
                    cell = int((found != written).nonzero()[0])
                    raise self._verifier.differs(self._message(inside[cell], inside[cell + 1], what), tier)

        return compare

    def _message(self, first: int, last: int, what: str) -> str:
        place = f"{format_nbytes(last - first)} at byte {first} of {self._cuts[-1]} on {self._block.tier.name}"
        return f"{what} ({place}) are not what was written: a bit flipped in host memory, on disk or on the way"


@dataclasses.dataclass
class _Run:
    """Adjacent cells whose checksums are known."""

    first: int
    last: int
    """The cell after the last one."""
    taken: list[tuple[torch.Tensor, int, int]]
    """Their checksums: (tensor, start, stop) of each slice."""

    def append(self, taken: torch.Tensor, place: int) -> None:
        """Add the next cell, whose checksum is at `place` of `taken`."""
        self.last += 1
        if self.taken and self.taken[-1][0] is taken and self.taken[-1][2] == place:
            self.taken[-1] = (taken, self.taken[-1][1], place + 1)
        else:
            self.taken.append((taken, place, place + 1))


class CheckedTransfer(JointTransfer):
    """A read that is compared once, at the first wait; every wait raises if the comparison failed."""

    def __init__(self, inner: Transfer, memory: torch.Tensor, compare: Callable[[bool], None]) -> None:
        super().__init__((inner,))
        self._on_host = not memory.is_cuda
        self.event = inner.event
        self._compare: Callable[[bool], None] | None = compare
        self._corrupted: Corrupted | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        # The host compares host memory, and is not ordered by any stream.
        super().synchronize() if self._on_host else super().wait()
        self._finish(False)

    def synchronize(self) -> None:
        super().synchronize()
        self._finish(True)

    def _finish(self, now: bool) -> None:
        with self._lock:
            compare, self._compare = self._compare, None
            if compare is not None:
                try:
                    compare(now)
                except Corrupted as error:
                    self._corrupted = error
        if self._corrupted is not None:
            raise self._corrupted

    @property
    def error(self) -> BaseException | None:
        return self._corrupted or super().error


def _error(message: str, tier: str) -> Corrupted:
    hint = "resume from the last checkpoint; where it happens again, test this machine's memory and disks"
    return Corrupted(message, tier=tier, hint=hint)
