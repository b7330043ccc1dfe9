"""Reducing: gradients are reduced to the ranks that own them, overlapped with the rest of backward.

Gradients that are not partitioned are kept whole in flat buffers and reduced in place on the last micro-step.
Partitioned gradients are reduce-scattered on every micro-step through buckets of constant size, and then freed. All
ranks launch the units in the same order, even if they use different parameters.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerocli.engine.buckets import BucketPlan, Completion, Pool, fill, plan_buckets
from zerocli.engine.comm import Collectives
from zerocli.engine.events import Events
from zerocli.engine.parameters import drop_grad, has_grad, take_grad
from zerocli.engine.streams import SideStream, Waits
from zerocli.engine.tensor_parallel import TensorParallel
from zerocli.engine.unit import Flat, Unit
from zerocli.errors import Refused
from zerocli.layout.buffers import bucket_limit, bucket_numel
from zerocli.layout.flats import Sizing
from zerocli.layout.shards import Span

NORM_ROW = 4096


class Reducer:
    """Reduces gradients as autograd accumulates them, so that each rank ends with the sum of its own slices."""

    def __init__(
        self,
        units: list[Unit],
        sizing: Sizing,
        collectives: Collectives,
        device: torch.device,
        waits: Waits,
        events: Events,
        eager: bool,
        together: bool,
        tensor_parallel: TensorParallel,
        unexpected: Callable[[str], None],
    ) -> None:
        self._stage, self._collectives, self._device = sizing.stage, collectives, device
        self._waits, self._events, self._eager, self._together = waits, events, eager, together
        self._reduce_fp32, self._tensor_parallel = sizing.reduce == "fp32", tensor_parallel
        self._unexpected = unexpected
        self._side = SideStream(device)
        self._flats = [flat for unit in units for flat in unit.trainable]
        specs = [flat.spec for flat in self._flats]
        wires = {self._wire(flat) for flat in self._flats}
        self._bucket_numels = {dtype: bucket_numel(specs, sizing, dtype.itemsize) for dtype in wires}
        # Whole gradients are reduced in pieces with the same number of elements in fp32 as in the compute dtype.
        self._limits: dict[torch.dtype, int] = {}
        for flat in self._flats:
            if flat.grad_full is not None:
                elements = max(1, sizing.bucket_nbytes // self._wire(flat).itemsize)
                self._limits[flat.grad_full.dtype] = min(elements, self._limits.get(flat.grad_full.dtype, elements))
        count = bucket_limit(specs, sizing)
        self._buckets, self._lift = Pool(count, device, waits), Pool(count, device, waits)
        self._run: list[torch.Tensor] = []
        """Gradients that are contiguous in memory and still to be all-reduced together."""
        self._newest_in_run: Unit
        """The unit of the last gradient in the run."""
        self._plans: dict[int, list[BucketPlan]] = {}
        self._places: dict[int, list[torch.Tensor]] = {}
        self._order = list(reversed(self._flats))
        self._ordered_by_use = False
        self._arrived: dict[int, set[int]] = {id(flat): set() for flat in self._flats}
        self._nested: set[int] = set()
        """Flats that got a gradient from a nested backward: they are complete only when the outer backward ends."""
        self._graph_task: int | None = None
        self._received: dict[int, set[int]] = {id(flat): set() for flat in self._flats}
        """Parameters of each flat that got a gradient on this rank in any of the step's micro-steps."""
        self._completed: list[Flat] = []
        self._launched: set[int] = set()
        """Flats whose reduction was launched in this pass: no gradient can be added to them any more."""
        self._next = 0
        self._unfinished: list[Completion] = []
        self._first = self._last = True
        self._norms: dict[tuple[int, int], torch.Tensor] = {}
        """Norm of each piece of each gradient that this rank owns, by (flat, first column)."""
        self.active = False
        self.reduced = False
        """Whether gradients that are kept whole have been summed over the ranks."""
        self._handles = [self._register(flat, index) for flat in self._flats for index in range(len(flat.parameters))]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _wire(self, flat: Flat) -> torch.dtype:
        """Return the dtype in which a flat's gradients are reduced."""
        return torch.float32 if self._reduce_fp32 else flat.dtype

    def begin(self, first: bool, last: bool, joining: bool = False) -> None:
        """Begin a backward pass: `first` or `last` of the step's micro-steps; `joining` another engine's pass."""
        self._first, self._last, self.active = first, last, True
        self.reduced = False
        self._next, self._completed = 0, []
        self._launched.clear()
        self._nested.clear()
        self._graph_task = None
        self._norms.clear()
        for arrived in self._arrived.values():
            arrived.clear()
        if first:
            for received in self._received.values():
                received.clear()
        if not joining:
            self.drop_grads()

    def outermost(self) -> None:
        """Record autograd's current graph task as the outermost one; others are nested in it."""
        self._graph_task = torch._C._current_graph_task_id()

    def _register(self, flat: Flat, index: int) -> RemovableHandle:
        """Register the gradient hook of a parameter, even if it is currently frozen."""
        parameter = flat.parameters[index]
        trains = parameter.requires_grad
        handle: RemovableHandle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(
            self._hook(flat, index)
        )
        parameter.requires_grad_(trains)
        return handle

    def _hook(self, flat: Flat, index: int) -> Callable[[nn.Parameter], None]:
        # Python's garbage collector does not traverse a parameter's hooks: a strong reference would leak the reducer.
        reducer, place = weakref.ref(self), self._flats.index(flat)

        def accumulated(parameter: nn.Parameter) -> None:
            alive = reducer()
            if alive is not None:
                alive._accumulated(alive._flats[place], index, parameter)

        return accumulated

    def _accumulated(self, flat: Flat, index: int, parameter: nn.Parameter) -> None:
        if not has_grad(parameter):  # autograd calls the hook for undefined gradients too
            return
        if not self.active:
            try:
                self._unexpected(flat.layout.entries[index].name)
            except BaseException:
                self.drop_grads()
                raise
        arrived = self._arrived[id(flat)]
        if id(flat) in self._launched:
            raise Refused(
                f"a gradient of {flat.layout.entries[index].name} arrived after those of its unit were reduced: its "
                "module runs both inside and outside of a reentrant checkpoint; use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._graph_task is not None and torch._C._current_graph_task_id() != self._graph_task:
            self._nested.add(id(flat))
        if flat.grad_full is not None:
            self._keep(flat, index, parameter, add=not self._first or index in arrived)
        arrived.add(index)
        if self._eager and len(arrived) == len(flat.parameters) and id(flat) not in self._nested:
            self.complete(flat)

    def _keep(self, flat: Flat, index: int, parameter: nn.Parameter, add: bool) -> None:
        """Move a parameter's gradient into the flat's whole gradient."""
        grad = take_grad(parameter)
        assert flat.grad_full is not None and grad is not None
        places = self._places.get(id(flat))
        if places is None:
            places = self._places[id(flat)] = flat.views(flat.grad_full)
        if add:
            places[index].add_(grad)
        else:
            places[index].copy_(grad)

    def drop_grads(self) -> None:
        """Drop all gradients that autograd has accumulated in the parameters."""
        for flat in self._flats:
            for parameter in flat.parameters:
                drop_grad(parameter)

    def complete(self, flat: Flat) -> None:
        """Mark the flat's gradients as complete for this backward; gradients that have not arrived count as zero."""
        if flat.grad_full is not None and self._first and len(self._arrived[id(flat)]) < len(flat.parameters):
            for index, entry in enumerate(flat.layout.entries):
                if index not in self._arrived[id(flat)]:
                    flat.grad_full[entry.offset : entry.offset + entry.numel].zero_()
        self._completed.append(flat)
        if not self._together:
            self.launch(self.ready)

    @property
    def ready(self) -> int:
        """Number of flats, counted from the start of the launch order, whose gradients are complete in this pass."""
        if not self.active:
            return 0
        done = {id(flat) for flat in self._completed}
        waiting = (at for at, flat in enumerate(self._order) if at >= self._next and id(flat) not in done)
        return next(waiting, len(self._order))

    @property
    def newest(self) -> Flat | None:
        """The flat whose reduction was launched last in the current pass."""
        return self._order[self._next - 1] if self.active and self._next else None

    def launch(self, upto: int) -> None:
        """Launch the reductions of the first `upto` flats of the launch order that are not launched yet."""
        while self._next < upto:
            self._launch(self._order[self._next])
            self._next += 1

    def finish(self) -> None:
        """End the backward pass: reduce all remaining gradients, counting those that never arrived as zero."""
        done = {id(flat) for flat in self._completed}
        for flat in [flat for flat in self._order if id(flat) not in done]:
            self.complete(flat)
        self.launch(len(self._order))
        self._reduce_run()
        for cause, rests in itertools.groupby(self._unfinished, key=lambda rest: rest.cause):
            with self._waits.waiting(cause):
                for rest in rests:
                    rest.run()
        self._forget()
        for flat in self._flats:
            self._received[id(flat)] |= self._arrived[id(flat)]
        if self._last:
            self._agree()
            self._measure()
        self.active, self.reduced = False, self._last or self._stage.gradients
        if not self._ordered_by_use:
            self._adopt_order()

    def finish_early(self) -> None:
        """End the step's accumulation early: do the reductions and norms that wait for the last micro-step."""
        if not self._stage.gradients:
            self.begin(first=False, last=True)
            self.finish()
            return
        self._agree()
        self._measure()
        for flat in self._flats:
            if flat.grad_store is not None:
                self._measure_stored(flat)

    def _measure_stored(self, flat: Flat) -> None:
        """Compute the norms of an offloaded gradient, piece by piece."""
        store = flat.grad_store
        assert store is not None
        for plan in self._plans_of(flat):
            piece = torch.empty(plan.columns.numel, dtype=store.dtype, device=self._device)
            store.fetch(plan.columns.start, piece).wait()
            self._measure_piece(flat, plan, piece)
            if flat.own.start + plan.columns.stop > flat.replicated:
                store.put(plan.columns.start, piece).synchronize()

    def _measure_piece(self, flat: Flat, plan: BucketPlan, piece: torch.Tensor) -> None:
        for columns in _measured(flat, plan.columns):
            measured = piece[columns.start - plan.columns.start : columns.stop - plan.columns.start]
            if flat.own.start + columns.start >= flat.replicated:
                self._tensor_parallel.agree_(measured, f"gradients of {flat.unit.title}")
            self._norms[self._flats.index(flat), columns.start] = _norm(measured)

    def received(self, flat: Flat) -> set[int]:
        """Return the indices of the flat's parameters that got a gradient on this rank in this step."""
        return self._received[id(flat)]

    def _agree(self) -> None:
        """Make replicated gradients equal: sums in different data-parallel groups may be rounded differently."""
        for flat in self._flats:
            same = Span(flat.replicated, flat.layout.total).intersect(flat.held).shifted(-flat.held.start)
            if flat.grad is not None and same.numel:
                self._tensor_parallel.agree_(flat.grad[same.start : same.stop], f"gradients of {flat.unit.title}")

    def _measure(self) -> None:
        """Compute the norms of all pieces on the device; offloaded pieces were measured when they were written.

        [Note: one norm for all stages and placements] Every rank computes the norms of its slices in pieces that depend
        only on the layout and the bucket size, and adds their squares in a fixed order: the same bits in every setting.
        """
        pieces: dict[tuple[int, int], torch.Tensor] = {}
        for index, flat in enumerate(self._flats):
            if flat.grad is not None:
                start = flat.own.start - flat.held.start
                for plan in self._plans_of(flat):
                    for columns in _measured(flat, plan.columns):
                        pieces[index, columns.start] = flat.grad[start + columns.start : start + columns.stop]
        if pieces:
            norms = _norms(list(pieces.values()))
            self._norms.update(zip(pieces, norms, strict=True))

    def squared_norm(self) -> torch.Tensor:
        """Return the sum of squares of the gradients this rank owns, in fp64; replicated ones count as 1/tp."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for replicated, copies in ((False, 1), (True, self._tensor_parallel.world)):
            if norms := self._norms_of(replicated):
                squares = squares + torch.stack(norms).double().square().sum() / copies
        return squares

    def _norms_of(self, replicated: bool) -> list[torch.Tensor]:
        found = []
        for index, start in sorted(self._norms):
            flat = self._flats[index]
            if (flat.own.start + start >= flat.replicated) == replicated:
                found.append(self._norms[index, start])
        return found

    def abandon(self) -> None:
        """Drop all gradients after an exception in backward; the step's gradients are lost."""
        for rest in self._unfinished:
            with contextlib.suppress(Exception):  # the original exception is the one to report
                rest.run()
        self._forget()
        self._run = []
        self.drop_grads()
        self.active = False

    def _forget(self) -> None:
        self._unfinished.clear()
        self._buckets.clear()
        self._lift.clear()

    def _adopt_order(self) -> None:
        """Adopt the order in which rank 0's first backward completed the units as the launch order."""
        place = {id(flat): i for i, flat in enumerate(self._flats)}
        order = self._collectives.broadcast_indices([place[id(flat)] for flat in self._completed])
        self._order = [self._flats[i] for i in order]
        self._ordered_by_use = True

    def order(self) -> list[int] | None:
        """Return the launch order as indices of flats; None before the first backward."""
        place = {id(flat): i for i, flat in enumerate(self._flats)}
        return [place[id(flat)] for flat in self._order] if self._ordered_by_use else None

    def adopt(self, order: list[int] | None) -> None:
        """Adopt the launch order of another run: with three or more ranks the rounding of sums depends on it."""
        if order is not None and sorted(order) == list(range(len(self._flats))):
            self._order = [self._flats[i] for i in order]
            self._ordered_by_use = True

    # -- launching one unit ----------------------------------------------------------------------------------------

    def _launch(self, flat: Flat) -> None:
        if flat.grad_full is None:
            self._launched.add(id(flat))
            self._reduce_buckets(flat)
        elif self._last:
            self._launched.add(id(flat))
            self._reduce_whole(flat)

    def _reduce_whole(self, flat: Flat) -> None:
        """Reduce a gradient that is kept whole, in place."""
        assert flat.grad_full is not None and flat.grad is not None
        if self._stage.optimizer:
            with self._side.run(), self._events.reduce(flat.unit):
                pending = self._collectives.reduce_scatter(flat.grad, flat.grad_full, _what(flat))
            self._unfinished.append(Completion(pending.wait))
            return
        if self._run and not _adjoin(self._run[-1], flat.grad_full):
            self._reduce_run()
        self._run.append(flat.grad_full)
        self._newest_in_run = flat.unit
        if sum(part.nbytes for part in self._run) >= self._limits[flat.grad_full.dtype] * flat.grad_full.itemsize:
            self._reduce_run()

    def _reduce_run(self) -> None:
        """All-reduce a run of contiguous gradients in pieces of at most one bucket."""
        if not self._run:
            return
        numel = sum(part.numel() for part in self._run)
        whole = self._run[0].as_strided((numel,), (1,))
        self._run = []
        with self._side.run(), self._events.reduce(self._newest_in_run):
            for piece in Span(0, numel).pieces(self._limits[whole.dtype]):
                pending = self._collectives.all_reduce(whole[piece.start : piece.stop], "gradients")
                self._unfinished.append(Completion(pending.wait))

    def _reduce_buckets(self, flat: Flat) -> None:
        """Reduce-scatter the flat's gradients bucket by bucket, and free them."""
        sources: list[torch.Tensor | None] = []
        for parameter in flat.parameters:
            grad = take_grad(parameter)
            sources.append(None if grad is None else grad.reshape(-1))
        plans = self._plans_of(flat)
        if self._collectives.world == 1 and flat.grad is not None:
            # With one rank the gradient shard itself serves as the bucket.
            for plan in plans:
                part = flat.grad[plan.columns.start : plan.columns.stop]
                fill(part, plan, sources, add=not self._first)
            return
        for plan in plans:
            wire = self._wire(flat)
            bucket = self._buckets.take(self._bucket_numels[wire], wire)
            memory = bucket.memory[: plan.numel]
            fill(memory, plan, sources)
            with self._side.run(), self._events.reduce(flat.unit):
                finish = self._scatter(flat, plan, memory)
            bucket.busy = Completion(finish, "transfers" if flat.grad_store is not None else "collectives")
            self._unfinished.append(bucket.busy)

    def _plans_of(self, flat: Flat) -> list[BucketPlan]:
        plans = self._plans.get(id(flat))
        if plans is None:
            plans = plan_buckets(flat.layout, self._collectives.world, self._bucket_numels[self._wire(flat)])
            self._plans[id(flat)] = plans
        return plans

    def _scatter(self, flat: Flat, plan: BucketPlan, memory: torch.Tensor) -> Callable[[], None]:
        """Reduce-scatter one bucket into its columns of the gradient shard; return the function that completes it."""
        target = flat.grad[plan.columns.start : plan.columns.stop] if flat.grad is not None else None
        if target is not None and self._first and target.dtype == memory.dtype:
            return self._collectives.reduce_scatter(target, memory, _what(flat)).wait
        # The sum goes into the bucket's own slice: the bucket is not read after the reduce-scatter.
        rank = self._collectives.rank
        part = memory[rank * plan.columns.numel : (rank + 1) * plan.columns.numel]
        pending = self._collectives.reduce_scatter(part, memory, _what(flat))

        def merge() -> Callable[[], None]:
            if target is None:
                return self._send(flat, plan, part)
            target.copy_(part) if self._first else target.add_(part)
            return self._collectives.reached().wait

        if self._device.type == "cuda":  # ordered by the stream that this runs on
            return merge()

        def finish() -> None:
            pending.wait()
            merge()()

        return finish

    def _send(self, flat: Flat, plan: BucketPlan, part: torch.Tensor) -> Callable[[], None]:
        """Add a reduced piece to the offloaded gradient; return the function that waits for the write."""
        store = flat.grad_store
        assert store is not None
        if not self._first or part.dtype != store.dtype:
            numel = self._bucket_numels[self._wire(flat)] // self._collectives.world
            lift = self._lift.take(numel, store.dtype)
            piece = lift.memory[: part.numel()]
            if self._first:
                piece.copy_(part)
            else:
                with self._waits.waiting("transfers"):
                    store.fetch(plan.columns.start, piece).wait()
                piece.add_(part)
        else:
            lift, piece = None, part
        if self._last:
            self._measure_piece(flat, plan, piece)
        done = store.put(plan.columns.start, piece).wait
        if lift is not None:
            lift.busy = Completion(done, "transfers")
            self._unfinished.append(lift.busy)
        return done

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the reduction buckets."""
        for bucket in (*self._buckets.all(), *self._lift.all()):
            yield "buffers", "reduction buckets", bucket.memory


def _measured(flat: Flat, columns: Span) -> list[Span]:
    """Split columns of the owned slice at the border between split and replicated parameters."""
    at = min(max(flat.replicated - flat.own.start, columns.start), columns.stop)
    return [span for span in (Span(columns.start, at), Span(at, columns.stop)) if span.numel]


def _norms(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each piece; on a GPU with few kernel launches."""
    if pieces and pieces[0].is_cuda:
        return list(torch._foreach_norm(pieces, 2, torch.float32))
    return [_norm(piece) for piece in pieces]


def _norm(piece: torch.Tensor) -> torch.Tensor:
    """Return the norm of a piece, accurate to fp32 rounding.

    On a CPU torch accumulates a whole piece in a few fp32 sums: with eight million elements the error is 2e-4, so the
    norm is computed over rows of NORM_ROW elements.
    """
    if piece.is_cuda or piece.numel() <= NORM_ROW:
        return torch._foreach_norm([piece], 2, torch.float32)[0]
    whole = piece.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(piece[:whole].view(-1, NORM_ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(piece[whole:], dtype=torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([rows, rest.view(1)]), dtype=torch.float64)
    return norm.float()


def _adjoin(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether `right` starts where `left` ends, in the same storage."""
    same = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return same and right.storage_offset() == left.storage_offset() + left.numel()


def _what(flat: Flat) -> str:
    return f"gradients of {flat.unit.title}"
