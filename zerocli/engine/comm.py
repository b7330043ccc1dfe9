"""Collectives over one axis of ranks: torch.distributed's own, with their bytes counted.

This is the only module that handles torch's names for them (they changed between 2.11 and 2.13), a world of one, which
needs none, and the difference between gloo (futures) and NCCL (streams).
"""

from __future__ import annotations

import contextlib
import datetime
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from zerocli.engine.events import SILENT, Events
from zerocli.engine.streams import StreamEvent
from zerocli.errors import Refused
from zerocli.ranks import deadlock, ending
from zerocli.ranks.issued import Issued
from zerocli.ranks.loss import severed
from zerocli.ranks.store import connecting_when_needed

# torch 2.13 renamed both; the old names warn there and the new ones are absent in 2.11.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Disagreed(Refused):
    """The ranks make different calls; raised on all of them at once."""


SENT = frozenset(
    (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""Dtypes that gloo and NCCL move as they are."""


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or its bytes if backends do not move its dtype; for collectives that do not add."""
    return tensor if tensor.dtype in SENT else tensor.view(-1).view(torch.uint8)


def _gather_any(full: torch.Tensor, shard: torch.Tensor, **how: Any) -> Any:
    return _all_gather(_sendable(full), _sendable(shard), **how)


def separate_gloo_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return gloo over the ranks of a group, apart from the group's own collectives. Collective.

    Not by `dist.new_group`, whose names depend on how many groups a rank is in: ranks that differ in that would wait
    for each other forever.
    """
    number = _num_separate[group.group_name] = _num_separate[group.group_name] + 1
    store = dist.PrefixStore(f"zerocli/{number}", dist.distributed_c10d._get_process_group_store(group))
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    with connecting_when_needed():
        gloo = dist.ProcessGroupGloo(store, rank, world, dist.default_pg_timeout)
    made, kind = dist.ProcessGroup(store, rank, world), dist.ProcessGroup.BackendType.GLOO
    dist.ProcessGroup._register_backend(made, torch.device("cpu"), kind, gloo)
    dist.ProcessGroup._set_default_backend(made, kind)
    # torch looks a group up when a collective fails and when its profiler starts: to name it, its backend and ranks.
    name: Any = f"zerocli {number} of {group.group_name}"
    known = dist.distributed_c10d._world
    dist.ProcessGroup._set_group_name(made, name)
    dist.ProcessGroup._set_group_desc(made, "messages and collectives of zerocli")
    known.pg_map[made] = ("gloo", store)
    known.pg_names[made], known.pg_backend_config[made] = name, "cpu:gloo"
    known.pg_group_ranks[made] = {each: place for place, each in enumerate(dist.get_process_group_ranks(group))}
    ending.GLOO.add(made)
    return made


def subgroup(group: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """Return a group of these ranks of a group, with its backend. Collective: all ranks of `group` are in one such.

    It is made once, as nothing destroys it: a communicator takes memory of the GPU, a gloo group threads.
    """
    made = _subgroups.setdefault(group, {})
    if tuple(ranks) in made:
        return made[tuple(ranks)]
    # Not by `dist.new_group`, for the reason in `separate_gloo_group`.
    number = _num_separate[group.group_name] = _num_separate[group.group_name] + 1
    known, store = dist.distributed_c10d._world, dist.distributed_c10d._get_process_group_store(group)
    backend, place = dist.distributed_c10d.Backend(known.pg_map[group][0]), ranks.index(dist.get_rank())
    name: Any = f"zerocli {number} of {group.group_name}, {len(ranks)} ranks from {ranks[0]}"
    about = (len(ranks), place, ranks, backend, store, name)
    limit = dist.distributed_c10d._get_default_timeout(backend)
    found: dist.ProcessGroup = dist.distributed_c10d._new_process_group_helper(*about, timeout=limit)[0]
    known.pg_group_ranks[found] = {rank: index for index, rank in enumerate(ranks)}
    made[tuple(ranks)] = found
    return found


_num_separate: Counter[str] = Counter()
"""Number of groups that the functions above have made, by group: all of its ranks call them alike."""
_subgroups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def _done_within(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective on the CPU; return whether it is complete."""
    try:
        # On a timeout torch raises and the collective goes on: it can be waited for again.
        work.wait(datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        if "Operation timed out" not in str(error):  # what gloo itself says of a lost rank has other words
            raise
        return False
    return True


class Pending:
    """A collective in flight; after `wait` its result may be used on the current stream."""

    def __init__(
        self, work: dist.Work | None, reached: StreamEvent | None, what: str = "a collective", events: Events = SILENT
    ) -> None:
        self.work, self._reached = work, reached
        """torch's handle; None on a GPU, and after `wait`."""
        self._what, self._events = what, events
        self.since: float | None = None
        """When the host began to wait for it (time.monotonic); None if it has not."""
        self.then: Callable[[], None] | None = None
        """Makes the result of what has arrived; called by the first `wait`, which lets go of it."""

    @property
    def done(self) -> bool:
        """Whether it is complete; on a CPU, whether the host has waited for it.

        torch's `is_completed` takes the work's lock with Python's lock held. Where torch's profiler runs, gloo's thread
        takes them in the other order when a collective ends.
        """
        return self.work is None and (self._reached is None or self._reached.done)

    def wait(self) -> None:
        if self.work is not None:
            self.since = time.monotonic()
            try:
                with self._events.completion(self):
                    self.work.wait()
            except RuntimeError as error:
                if (lost := severed(error, self._what)) is not None:
                    raise lost from error
                raise
            finally:
                self.work = None
        if self._reached is not None:
            self._reached.wait()
        if self.then is not None:
            then, self.then = self.then, None
            then()


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
        # Only a CPU needs the future. On a GPU torch makes the current stream wait for the collective, not the host: an
        # event recorded next marks its end.
        self._async = device.type == "cpu"
        self.issuer = group
        """The group that issues the collectives: this one, or another one of the same ranks."""
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
        with self._ended_on_error(entry), self._events.collective(self, entry):
            yield entry
        if entry.pending is None:  # the host has waited for it, or the stream will
            entry.pending = self.reached()

    @staticmethod
    @contextlib.contextmanager
    def _ended_on_error(entry: Issued) -> Iterator[None]:
        """Mark a collective that failed as complete; raise Severed if a rank was lost."""
        try:
            yield
        except RuntimeError as error:
            entry.end()
            if (lost := severed(error, str(entry))) is not None:
                raise lost from error
            raise

    @classmethod
    def alone(cls, device: torch.device) -> Collectives:
        """Return the collectives of a group of only this rank."""
        made = cls(None, device)
        made.rank, made.world = 0, 1
        return made

    def reached(self) -> Pending:
        """Return a Pending that completes with the work issued on the current stream so far."""
        return Pending(None, StreamEvent(self.device))

    def _issue(
        self, kind: str, what: str, nbytes: int, function: Callable[..., Any], into: torch.Tensor, *source: torch.Tensor
    ) -> Pending:
        """Issue one of torch's collectives, which writes `into`, and count its bytes; one rank alone copies."""
        if self.world == 1:
            for each in source:
                if each.data_ptr() != into.data_ptr():
                    into.copy_(each)
            return self.reached()
        self._require_dense(into, *source)
        self.nbytes[kind] += nbytes
        with self._noted(kind, what, nbytes) as entry:
            work = function(into, *source, group=self.issuer, async_op=self._async)
            work, reached = (work, None) if self._async else (None, StreamEvent(self.device))
            pending = entry.pending = Pending(work, reached, str(entry), self._events)
        return pending

    def _require_dense(self, *tensors: torch.Tensor) -> None:
        """Raise ValueError for a tensor with gaps or repeated elements: backends read its bytes as if it had none."""
        for tensor in tensors:
            if tensor.layout != torch.strided or not tensor.is_contiguous():
                strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
                raise ValueError(f"a collective needs contiguous memory, not {tuple(tensor.shape)} at {strides}")

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str = "") -> Pending:
        """Fill `full` with every rank's shard in rank order; `shard` may be this rank's slice of `full`."""
        return self._issue("all_gather", what, full.nbytes, _gather_any, full, shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, what: str = "") -> Pending:
        """Sum `full` over the ranks into each rank's `shard` of it; `shard` may be this rank's slice of `full`."""
        return self._issue("reduce_scatter", what, full.nbytes, _reduce_scatter, shard, full)

    def all_reduce(self, tensor: torch.Tensor, what: str = "") -> Pending:
        """Sum `tensor` over the ranks in place."""
        return self._issue("all_reduce", what, 2 * tensor.nbytes, dist.all_reduce, tensor)

    def sum_control(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the ranks in place, on the current stream; counted as control traffic."""
        return self._reduce_control(tensor, dist.ReduceOp.SUM)

    def max_control(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the largest of the ranks for each element of a small tensor, in place; otherwise as `sum_control`."""
        return self._reduce_control(tensor, dist.ReduceOp.MAX)

    def _reduce_control(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.world > 1:
            self._require_dense(tensor)
            self.nbytes["control"] += tensor.nbytes
            with self._noted("all_reduce", ""):
                dist.all_reduce(tensor, operation, group=self.issuer)
        return tensor

    def alike(self, number: int) -> torch.Tensor:
        """Return whether all ranks pass the same number: one element, 1.0 or 0.0, on the device. Collective."""
        bounds = torch.full((2,), number, dtype=torch.int64, device=self.device)
        bounds[1:].neg_()
        self.max_control(bounds)
        return (bounds[:1] == -bounds[1:]).float()

    def gather_control(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's copy of a small tensor, stacked in rank order."""
        everyone = tensor.new_empty((self.world, *tensor.shape))
        if self.world == 1:
            return everyone.copy_(tensor)
        self.nbytes["control"] += everyone.nbytes
        with self._noted("all_gather", ""):
            _all_gather(everyone.view(-1), tensor.reshape(-1), group=self.issuer)
        return everyone

    def send(self, rows: list[torch.Tensor], mine: torch.Tensor, gloo: Any, kind: str = "", what: str = "") -> Issued:
        """Begin to fill the rows with every rank's `mine`, on the CPU, by a separate gloo group; `receive` waits."""
        self.nbytes["control"] += mine.nbytes * len(rows)
        with self._noted(kind or "all_gather" * (not what), what) as entry:
            with torch._C._DisableFuncTorch():  # gloo allocates a tensor, which a transform would wrap
                entry.pending = Pending(gloo.allgather([rows], [mine]), None)
        return entry

    def receive(self, sent: Issued) -> None:
        """Wait for what was sent; raise Disagreed if no rank can go on."""
        assert sent.pending is not None and sent.pending.work is not None
        sent.pending.since = time.monotonic()
        work = sent.pending.work
        with self._ended_on_error(sent), self._events.completion(sent.pending):
            if not _done_within(work, deadlock.PATIENCE_SECONDS):
                self._wait_watched(work, f"is in the {sent}" if sent.kind else f"called {sent.what}")
        sent.end()

    def _wait_watched(self, work: dist.Work, words: str) -> None:
        """Wait for an exchange; raise Disagreed if no rank can go on, because some wait elsewhere."""
        ranks = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        with deadlock.Waiting(ranks, words) as waited:
            while not _done_within(work, deadlock.INTERVAL_SECONDS):
                if verdict := waited.look():
                    raise Disagreed(verdict)

    def broadcast_indices(self, indices: list[int]) -> list[int]:
        """Return rank 0's list; all ranks pass lists of equal length. For use outside training steps."""
        if self.world == 1 or self.backend == "fake":  # in a fake group this process is rank 0
            return indices
        return self.broadcast(torch.tensor(indices, dtype=torch.int64, device=self.device)).tolist()

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` with rank 0's. For use outside training steps."""
        if self.world > 1:
            self._require_dense(tensor)
            self.nbytes["control"] += tensor.nbytes
            with self._noted("broadcast", ""):
                dist.broadcast(_sendable(tensor), group=self.issuer, group_src=0)
        return tensor

    def take_nbytes(self) -> dict[str, int]:
        """Return the bytes moved since the last call, by kind, and reset the counts."""
        taken = {kind: self.nbytes[kind] for kind in ("all_gather", "reduce_scatter", "all_reduce")}
        self.nbytes.clear()
        return taken
