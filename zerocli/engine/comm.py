"""Collectives over one axis of ranks: torch.distributed's own, with their bytes counted.

This is the only module that handles torch's names for them (they changed between 2.11 and 2.13), a world of one, which
needs none, and the difference between gloo (futures) and NCCL (streams).
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zerocli.engine import ending
from zerocli.engine.events import SILENT, Events
from zerocli.engine.streams import StreamEvent

# torch 2.13 renamed both; the old names warn there and the new ones are absent in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Severed(RuntimeError):
    """A collective that cannot be finished: another rank is gone, or can no longer be reached."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason
        self.missing = ""
        """The ranks that are gone, if known."""

    def __str__(self) -> str:
        return f"{self.what} failed, another rank was lost: {self.missing or self.reason}"


def severed(error: BaseException, what: str = "a collective") -> Severed | None:
    """Return a Severed if the error means that a rank was lost, else None.

    gloo reports it only in the message text; its "enforce fail" errors are mistakes of the caller instead.
    """
    text = str(error)
    if isinstance(error, Severed):
        return error
    if not isinstance(error, RuntimeError):
        return None
    by_gloo = "/gloo/transport/" in text and "enforce fail" not in text
    by_nccl = isinstance(error, dist.DistBackendError) and ("RemoteError" in text or "remote process exited" in text)
    if not (by_gloo or by_nccl or isinstance(error, dist.DistNetworkError | dist.DistStoreError)):
        return None
    words = re.sub(r"\[[^][]*/[^][]*:\d+\]\s*", "", text).strip().partition(". This is")[0]
    return Severed(what, (words.splitlines() or [type(error).__name__])[0][:200])


class Pending:
    """A collective in flight; after `wait` its result may be used on the current stream."""

    def __init__(
        self, work: dist.Work | None, reached: StreamEvent | None, what: str = "a collective", events: Events = SILENT
    ) -> None:
        self._work, self._reached = work, reached
        self._what, self._events = what, events
        self.since: float | None = None
        """When the host began to wait for it (time.monotonic); None if it has not."""

    @property
    def work(self) -> dist.Work | None:
        """Return torch's handle; None on a GPU, and after `wait`."""
        return self._work

    @property
    def done(self) -> bool:
        return (self._work is None or self._work.is_completed()) and (self._reached is None or self._reached.done)

    def wait(self) -> None:
        if self._work is not None:
            self.since = time.monotonic()
            try:
                with self._events.completion(self):
                    self._work.wait()
            except RuntimeError as error:
                if (lost := severed(error, self._what)) is not None:
                    raise lost from error
                raise
            finally:
                self._work = None
        if self._reached is not None:
            self._reached.wait()


@dataclass(eq=False)
class Issued:
    """A collective that this rank has issued: its position in the group's launch order, and its payload."""

    number: int
    kind: str
    what: str
    nbytes: int = 0
    """Bytes of the full buffer, twice that for an all-reduce; 0 for control values."""
    begun: float = field(default_factory=time.monotonic)
    pending: Pending | None = None
    """Its completion; None while the host is still inside the call."""
    on_host: bool = False
    """Whether the host waits for it (gloo): until the host does, it is open but delays nothing."""

    @property
    def since(self) -> float:
        """When it began to delay this rank; infinity if it does not yet."""
        if self.pending is None or not self.on_host:
            return self.begun
        return self.pending.since if self.pending.since is not None else math.inf

    @property
    def over(self) -> bool:
        return self.pending is not None and self.pending.done

    def restart(self) -> None:
        """Restart the clock of its delay."""
        self.begun = time.monotonic()

    def end(self) -> None:
        """Mark it as complete."""
        self.pending = Pending(None, None)

    def __str__(self) -> str:
        return f"{self.kind} of {self.what or 'control values'}" if self.kind else self.what


class Collectives:
    """The collectives of one group of ranks, issued on the current stream; counts the bytes of full buffers.

    An all-reduce counts twice, as in the ZeRO paper (it is a reduce-scatter and an all-gather). A world of one sends
    and counts nothing. Small control messages (norms, flags) are counted separately.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, events: Events = SILENT) -> None:
        self.group, self.device, self._events = group, device, events
        here = dist.is_available() and dist.is_initialized()
        if here:
            ending.arm()
        self.rank = dist.get_rank(group) if here else 0
        self.world = dist.get_world_size(group) if here else 1
        self.backend = dist.get_backend(group) if here and self.world > 1 else ""
        # Only a CPU needs the future: on a GPU the stream orders the collective.
        self._async = device.type == "cpu"
        self.nbytes: Counter[str] = Counter()
        self.issued = 0
        """Number of collectives issued. All ranks issue the same ones in the same order, so a lower number is late."""
        self.open: deque[Issued] = deque()
        """Collectives that may not be complete, oldest first; read by a watchdog."""
        self.moved = time.monotonic()
        """When the last one was issued."""

    @contextlib.contextmanager
    def _noted(self, kind: str, what: str, nbytes: int = 0) -> Iterator[Issued]:
        """Add a collective to the open ones before the host enters it."""
        while self.open and self.open[0].over:
            self.open.popleft()
        self.issued += 1
        entry = Issued(self.issued, kind, what, nbytes, on_host=self._async)
        self.moved = entry.begun
        self.open.append(entry)
        try:
            with self._events.collective(self, entry):
                yield entry
        except RuntimeError as error:
            entry.end()
            if (lost := severed(error, str(entry))) is not None:
                raise lost from error
            raise
        if entry.pending is None:  # the host has waited for it, or the stream will
            entry.pending = self._pending(None)

    @classmethod
    def alone(cls, device: torch.device) -> Collectives:
        """Return the collectives of a group of only this rank."""
        made = cls(None, device)
        made.rank, made.world = 0, 1
        return made

    def _pending(self, work: dist.Work | None, entry: Issued | None = None) -> Pending:
        what = str(entry) if entry is not None else ""
        return Pending(work if self._async else None, None if self._async else self.record_event(), what, self._events)

    def record_event(self) -> StreamEvent:
        """Record an event after the work issued on the current stream so far."""
        return StreamEvent(self.device)

    def reached(self) -> Pending:
        """Return a Pending that completes with the work issued on the current stream so far."""
        return self._pending(None)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str = "") -> Pending:
        """Fill `full` with every rank's shard in rank order; `shard` may be this rank's slice of `full`."""
        if self.world == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return self._pending(None)
        self.nbytes["all_gather"] += full.nbytes
        with self._noted("all_gather", what, full.nbytes) as entry:
            entry.pending = self._pending(_all_gather(full, shard, group=self.group, async_op=self._async), entry)
        return entry.pending

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, what: str = "") -> Pending:
        """Sum `full` over the ranks into each rank's `shard` of it; `shard` may be this rank's slice of `full`."""
        if self.world == 1:
            if full.data_ptr() != shard.data_ptr():
                shard.copy_(full)
            return self._pending(None)
        self.nbytes["reduce_scatter"] += full.nbytes
        with self._noted("reduce_scatter", what, full.nbytes) as entry:
            entry.pending = self._pending(_reduce_scatter(shard, full, group=self.group, async_op=self._async), entry)
        return entry.pending

    def all_reduce(self, tensor: torch.Tensor, what: str = "") -> Pending:
        """Sum `tensor` over the ranks in place."""
        if self.world == 1:
            return self._pending(None)
        self.nbytes["all_reduce"] += 2 * tensor.nbytes
        with self._noted("all_reduce", what, 2 * tensor.nbytes) as entry:
            entry.pending = self._pending(dist.all_reduce(tensor, group=self.group, async_op=self._async), entry)
        return entry.pending

    def sum_control(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the ranks in place, on the current stream; counted as control traffic."""
        if self.world > 1:
            self.nbytes["control"] += tensor.nbytes
            with self._noted("all_reduce", ""):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather_control(
        self, tensor: torch.Tensor, kind: str = "all_gather", what: str = "", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return every rank's copy of a small tensor, stacked in rank order; `kind` and `what` describe its purpose."""
        everyone = tensor.new_empty((self.world, *tensor.shape)) if out is None else out
        if self.world == 1:
            return everyone.copy_(tensor)
        self.nbytes["control"] += everyone.nbytes
        with self._noted(kind, what):
            _all_gather(everyone.view(-1), tensor.reshape(-1), group=self.group)
        return everyone

    def exchange(
        self, everyone: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup, kind: str = "", what: str = ""
    ) -> None:
        """Fill `everyone` with every rank's `mine`, on the CPU, over a gloo group of the same ranks; the host waits."""
        self.nbytes["control"] += everyone.nbytes
        with self._noted(kind or "all_gather" * (not what), what) as entry:
            _all_gather(everyone, mine, group=group)
            entry.end()

    def broadcast_indices(self, indices: list[int]) -> list[int]:
        """Return rank 0's list; all ranks pass lists of equal length. For use outside training steps."""
        if self.world == 1 or self.backend == "fake":  # in a fake group this process is rank 0
            return indices
        return self.broadcast(torch.tensor(indices, dtype=torch.int64, device=self.device)).tolist()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite `tensor` with rank `source`'s. For use outside training steps."""
        if self.world > 1:
            self.nbytes["control"] += tensor.nbytes
            with self._noted("broadcast", ""):
                dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def take_nbytes(self) -> dict[str, int]:
        """Return the bytes moved since the last call, by kind, and reset the counts."""
        taken = {kind: self.nbytes[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce")}
        self.nbytes.clear()
        return taken
