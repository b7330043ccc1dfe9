"""Reductions: how the gradients of one flat are summed over the ranks, and what of that is still in flight.

Whole gradients are reduced in place; neighbours in memory are all-reduced together. Partitioned gradients are
reduce-scattered through buckets into the gradient shard, or through the bucket to another tier.

[Note: groups of ranks] If states are partitioned within groups, gradients are summed in each group first. In a step's
last pass the slice that a rank has is then all-reduced over the ranks that hold the same slice in other groups. On a
GPU the side stream orders both. On a CPU the host must wait for the first sum before it issues the second: it does so
when the next flat is launched, or at the end of backward, in the order of launches, which is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from zerocli.engine.comm import Pending
from zerocli.engine.guards.parameters import take_grad
from zerocli.engine.streams import SideStream
from zerocli.engine.units.buckets import BucketPlan, BucketPlans, Completion, Pool, fill
from zerocli.engine.units.norms import GradientNorms
from zerocli.engine.units.unit import Flat, Unit
from zerocli.layout.buffers import BUCKETS, bucket_limit
from zerocli.layout.shards import Span, round_up

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine

_Finish = Callable[[], None]
"""Waits for work that was issued, and does what is left."""


class Reductions:
    """Launches the reduction of one flat at a time on a side stream; `finish` completes all of them."""

    def __init__(self, flats: list[Flat], engine: Engine, plans: BucketPlans, norms: GradientNorms) -> None:
        sizing, device, waits = engine.sizing, engine.device, engine.waits
        self._stage, self._plans, self._norms = sizing.stage, plans, norms
        self._shards, self._replicas, self._device = engine.shards, engine.replicas, device
        self._waits, self._events = waits, engine.events
        self._side = SideStream(device)
        # Whole gradients are reduced in pieces with the same number of elements in fp32 as in the compute dtype. In
        # groups of ranks, each rank of a group has a slice of every piece.
        slices = 1 if self._shards is engine.collectives else self._shards.world
        self._limits: dict[torch.dtype, int] = {}
        for flat in flats:
            if flat.gradient.is_whole:
                elements = round_up(max(1, sizing.bucket_nbytes // plans.dtype(flat).itemsize), slices)
                self._limits[flat.gradient.dtype] = min(elements, self._limits.get(flat.gradient.dtype, elements))
        count = bucket_limit([flat.spec for flat in flats], sizing)
        self._buckets, self._lift = Pool(count, device, waits), Pool(count, device, waits)
        self._run: list[torch.Tensor] = []
        """Gradients that are contiguous in memory and still to be all-reduced together."""
        self._newest_in_run: Unit
        """The unit of the last gradient in the run."""
        self._unfinished: list[Completion] = []
        self._sums: list[Completion] = []
        """Issue what follows the sums that were launched, in the order of their launch."""
        self._flats = flats
        self._first = self._last = True

    def begin(self, first: bool, last: bool) -> None:
        """Begin a backward pass: the `first` overwrites gradients, others add to them; the `last` measures norms."""
        self._first, self._last = first, last

    def launch(self, flat: Flat) -> None:
        """Launch the reduction of a flat's gradients, all of which have arrived or count as zero."""
        self._start_sums_over_replicas()
        flat.gradient.open(self._device)  # on the stream of backward; the reduction has another
        if flat.gradient.is_whole:
            self._reduce_whole(flat)
        else:
            self._reduce_buckets(flat)

    def finish(self) -> None:
        """Launch what is still held back, and complete all reductions."""
        self._reduce_run()
        self._start_sums_over_replicas()
        for cause, rests in itertools.groupby(self._unfinished, key=lambda rest: rest.cause):
            with self._waits.waiting(cause):
                for rest in rests:
                    rest.run()
        self._forget()

    def abandon(self) -> None:
        """Complete what is in flight after an exception; its results are not used."""
        for rest in self._unfinished:
            with contextlib.suppress(Exception):  # the original exception is the one to report
                rest.run()
        self._forget()
        self._run = []

    def _forget(self) -> None:
        self._unfinished.clear()
        self._sums.clear()
        self._buckets.clear()
        self._lift.clear()

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the reduction buckets."""
        for bucket in (*self._buckets.all(), *self._lift.all()):
            yield "buffers", BUCKETS, bucket.memory

    # -- what follows a sum ----------------------------------------------------------------------------------------

    def _in_launch_order(self, pending: Pending, follow: Callable[[], _Finish]) -> _Finish:
        """Call `follow` once the sum is complete, in the order of launches; return what finishes both."""
        if self._device.type == "cuda":  # ordered by the stream that this runs on
            return follow()
        rest: list[_Finish] = []

        # On a CPU the sum is complete only when the host has waited for it.
        def start() -> None:
            pending.wait()
            rest.append(follow())

        started = Completion(start)

        def finish() -> None:
            started.run()
            rest[0]()

        self._sums.append(started)
        return finish

    def _start_sums_over_replicas(self) -> None:
        """Issue the second sums of what was launched before."""
        if self._replicas.world > 1 and self._sums:
            with self._waits.waiting("collectives"):
                for each in self._sums:
                    each.run()
            self._sums.clear()

    def _at_finish(self, pending: Pending, follow: Callable[[], _Finish]) -> _Finish:
        """Call `follow` on the stream that this runs on; on a CPU when the host finishes, which waits for `pending`.

        What is returned may be called again: on a GPU each stream that calls it waits.
        """
        if self._device.type == "cuda":
            return follow()

        def finish() -> None:
            pending.wait()
            follow()()

        return Completion(finish).run

    def _sum_over_replicas(self, part: torch.Tensor, what: str) -> Pending:
        """Sum a slice over the ranks that hold the same one, in the step's last pass."""
        return self._replicas.all_reduce(part, what) if self._last else self._replicas.reached()

    def sum_replicas(self) -> None:
        """Sum all gradients over the replicas now: the step ends without a last pass."""
        if self._replicas.world == 1:
            return
        for flat in self._flats:
            found = flat.gradient.read(self._device)
            self._replicas.all_reduce(found, _what(flat)).wait()
            if flat.gradient.store is not None:
                flat.gradient.store.put(0, found).synchronize()

    # -- whole gradients -------------------------------------------------------------------------------------------

    def _reduce_whole(self, flat: Flat) -> None:
        """Reduce a gradient that is kept whole, in place."""
        whole, held = flat.gradient.whole, flat.gradient.held
        assert whole is not None and held is not None
        if self._stage.optimizer:
            with self._side.run(), self._events.reduce(flat.unit):
                pending = self._shards.reduce_scatter(held, whole, _what(flat))
                finish = self._in_launch_order(pending, lambda: self._sum_over_replicas(held, _what(flat)).wait)
            self._unfinished.append(Completion(finish))
            return
        if self._run and not _adjoin(self._run[-1], whole):
            self._reduce_run()
        self._run.append(whole)
        self._newest_in_run = flat.unit
        if sum(part.nbytes for part in self._run) >= self._limits[whole.dtype] * whole.itemsize:
            self._reduce_run()

    def _reduce_run(self) -> None:
        """All-reduce a run of contiguous gradients in pieces of at most one bucket."""
        if not self._run:
            return
        numel = sum(part.numel() for part in self._run)
        # The parts are neighbours in one storage, so a view of the first one can extend over all of them.
        whole = self._run[0].as_strided((numel,), (1,))
        self._run = []
        with self._side.run(), self._events.reduce(self._newest_in_run):
            for piece in Span(0, numel).pieces(self._limits[whole.dtype]):
                self._unfinished.append(Completion(self._sum_everywhere(whole[piece.start : piece.stop])))

    def _sum_everywhere(self, whole: torch.Tensor) -> _Finish:
        """Sum a piece over all ranks; of several groups, each rank sums its slice over the replicas."""
        if self._replicas.world == 1:
            return self._shards.all_reduce(whole, "gradients").wait
        each = whole.numel() // self._shards.world
        part = whole[self._shards.rank * each : (self._shards.rank + 1) * each]

        def join() -> _Finish:
            return self._shards.all_gather(whole, part, "gradients").wait

        pending = self._shards.reduce_scatter(part, whole, "gradients")
        return self._in_launch_order(pending, lambda: self._at_finish(self._sum_over_replicas(part, "gradients"), join))

    # -- partitioned gradients -------------------------------------------------------------------------------------

    def _reduce_buckets(self, flat: Flat) -> None:
        """Reduce-scatter the flat's gradients bucket by bucket, and free them."""
        sources: list[torch.Tensor | None] = []
        for parameter in flat.parameters:
            grad = take_grad(parameter)
            sources.append(None if grad is None else grad.reshape(-1))
        plans = self._plans.of(flat)
        if self._shards.world == 1 and flat.gradient.held is not None:
            # With one rank the gradient shard itself serves as the bucket.
            for plan in plans:
                part = flat.gradient.held[plan.columns.start : plan.columns.stop]
                fill(part, plan, sources, add=not self._first)
                if self._last and self._replicas.world > 1:
                    with self._side.run(), self._events.reduce(flat.unit):
                        pending = self._replicas.all_reduce(part, _what(flat))
                    self._unfinished.append(Completion(pending.wait))
            return
        for plan in plans:
            bucket = self._buckets.take(self._plans.numel(flat), self._plans.dtype(flat))
            # Filled on backward's stream, which owns the gradients: they may be freed before the reduction has run.
            memory = bucket.memory[: plan.numel]
            fill(memory, plan, sources)
            with self._side.run(), self._events.reduce(flat.unit):
                finish = self._scatter(flat, plan, memory)
            bucket.busy = Completion(finish, "transfers" if flat.gradient.store is not None else "collectives")
            self._unfinished.append(bucket.busy)

    def _scatter(self, flat: Flat, plan: BucketPlan, memory: torch.Tensor) -> _Finish:
        """Reduce-scatter one bucket into its columns of the gradient shard; return the function that completes it."""
        target = flat.gradient.held[plan.columns.start : plan.columns.stop] if flat.gradient.held is not None else None
        if target is not None and self._first and target.dtype == memory.dtype:
            pending = self._shards.reduce_scatter(target, memory, _what(flat))
            return self._in_launch_order(pending, lambda: self._sum_over_replicas(target, _what(flat)).wait)
        # The sum goes into the bucket's own slice: the bucket is not read after the reduce-scatter.
        rank = self._shards.rank
        part = memory[rank * plan.columns.numel : (rank + 1) * plan.columns.numel]
        pending = self._shards.reduce_scatter(part, memory, _what(flat))

        def merge() -> _Finish:
            if target is None:
                return self._send(flat, plan, part)
            target.copy_(part) if self._first else target.add_(part)
            return self._sum_over_replicas(target, _what(flat)).wait

        return self._in_launch_order(pending, merge)

    def _send(self, flat: Flat, plan: BucketPlan, part: torch.Tensor) -> _Finish:
        """Add a reduced piece to the offloaded gradient; return the function that waits for the write."""
        store = flat.gradient.store
        assert store is not None
        if not self._first or part.dtype != store.dtype:
            lift = self._lift.take(self._plans.numel(flat) // self._shards.world, store.dtype)
            piece = lift.memory[: part.numel()]
            if self._first:
                piece.copy_(part)
            else:
                with self._waits.waiting("transfers"):
                    store.fetch(plan.columns.start, piece).wait()
                piece.add_(part)
        else:
            lift, piece = None, part

        def write() -> _Finish:
            if self._last:
                self._norms.measure_piece(flat, plan.columns, piece)
            return store.put(plan.columns.start, piece).wait

        done = self._at_finish(self._sum_over_replicas(piece, _what(flat)), write)
        if lift is not None:
            lift.busy = Completion(done, "transfers")
            self._unfinished.append(lift.busy)
        return done


def _adjoin(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether `right` starts where `left` ends, in the same storage."""
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and right.storage_offset() == left.storage_offset() + left.numel()


def _what(flat: Flat) -> str:
    return f"gradients of {flat.unit.title}"
