"""Reducing: gradients are reduced to the ranks that own them, overlapped with the rest of backward.

Gradients that are not partitioned are kept whole in flat buffers and reduced in place on the last micro-step.
Partitioned gradients are reduce-scattered on every micro-step and then freed. If groups of ranks hold the same slices,
their sums are added on the last micro-step. This module follows which gradients have arrived, and when a flat may be
launched; reductions.py reduces it. All ranks launch the units in the same order, even if they use different parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerocli.engine.guards.parameters import drop_grad, has_grad, take_grad
from zerocli.engine.units.buckets import BucketPlans
from zerocli.engine.units.norms import GradientNorms
from zerocli.engine.units.reductions import Reductions
from zerocli.engine.units.unit import Flat, Unit
from zerocli.errors import Refused

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


class Reducer:
    """Reduces gradients as autograd accumulates them, so that each rank ends with the sum of its own slices."""

    def __init__(self, engine: Engine) -> None:
        self._passes, self._channel, self._agrees = engine.passes, engine.channel, engine.agrees
        self._stage, self._collectives, self._device = engine.stage, engine.collectives, engine.device
        # If parameters are gathered, hooks report when a unit's backward is done; otherwise its last gradient does.
        self._eager = not engine.gatherer.moves
        self._together = False
        """Whether reductions of this pass are launched only where ranks agree on them, and at its end."""
        self._flats = list(engine.trainable())
        plans = BucketPlans(self._flats, engine.sizing, engine.shards.world)
        self.norms = GradientNorms(self._flats, plans, engine)
        """Norms of the reduced gradients, measured by the step's last pass."""
        self._reductions = Reductions(self._flats, engine, plans, self.norms)
        self._order = list(reversed(self._flats))
        self._ordered_by_use = False
        self._arrived: dict[int, set[int]] = {id(flat): set() for flat in self._flats}
        self._nested: set[int] = set()
        """Flats that got a gradient from a nested backward: they are complete only when the outer backward ends."""
        self._held: set[int] = set()
        """Flats of units that a reentrant checkpoint ran in this step: some of their gradients come in a nested
        backward, after others that are complete by count."""
        self._graph_task: int | None = None
        self._received: dict[int, set[int]] = {id(flat): set() for flat in self._flats}
        """Parameters of each flat that got a gradient on this rank in any of the step's micro-steps."""
        self._zeros: dict[int, set[int]] = {}
        """Parameters that have a zero gradient in this step even if backward brings none."""
        self._completed: dict[int, Flat] = {}
        """The flats whose gradients are complete in this pass, by id, in the order in which they were."""
        self._launched: set[int] = set()
        """Flats whose reduction was launched in this pass: no gradient can be added to them any more."""
        self._next = 0
        self._first = self._last = True
        self.active = False
        self.reduced = False
        """Whether gradients have been summed over all ranks."""
        # Replicas are summed in a step's last pass.
        self._reduces_each_pass = engine.stage.gradients and engine.replicas.world == 1
        self._handles = [self._register(flat, index) for flat in self._flats for index in range(len(flat.parameters))]

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def begin(self, first: bool, last: bool, joining: bool = False) -> None:
        """Begin a backward pass: `first` or `last` of the step's micro-steps; `joining` another engine's pass."""
        self._first, self._last, self.active = first, last, True
        # Which engines join a pass, and when, may differ between ranks: theirs follow at its end, in one order. The
        # collectives of several engines are launched where their ranks exchange messages, in one order.
        several = self._channel is not None and self._channel.num_slots > 1
        self._together = joining or self._agrees or several
        self.reduced = False
        self._next, self._completed = 0, {}
        self._launched.clear()
        self._nested.clear()
        self._graph_task = None
        self._reductions.begin(first, last)
        self.norms.clear()
        for arrived in self._arrived.values():
            arrived.clear()
        if first:
            for received in self._received.values():
                received.clear()
        if not joining:
            self.drop_grads()

    def hold(self, unit: Unit) -> None:
        """Treat the unit's gradients as complete only when backward ends, in this step."""
        self._held.update(id(flat) for flat in unit.trainable)

    def outermost(self) -> None:
        """Record autograd's current graph task as the outermost one; others are nested in it."""
        self._graph_task = torch._C._current_graph_task_id()

    def _register(self, flat: Flat, index: int) -> RemovableHandle:
        """Register the gradient hook of a parameter, even if it is currently frozen."""
        # Python's garbage collector does not traverse a parameter's hooks: a strong reference would leak the reducer.
        reducer, place = weakref.ref(self), self._flats.index(flat)

        def accumulated(parameter: nn.Parameter) -> None:
            alive = reducer()
            if alive is not None:
                alive._accumulated(alive._flats[place], index, parameter)

        parameter = flat.parameters[index]
        # torch refuses this hook on a tensor that does not require a gradient.
        trains = parameter.requires_grad
        handle: RemovableHandle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(accumulated)
        parameter.requires_grad_(trains)
        return handle

    def _accumulated(self, flat: Flat, index: int, parameter: nn.Parameter) -> None:
        if not has_grad(parameter):  # autograd calls the hook for undefined gradients too
            return
        if not self.active:
            try:
                self._passes.join(flat.layout.entries[index].name)
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
        # A reentrant checkpoint calls backward inside of backward: that is another graph task of autograd's.
        if self._graph_task is not None and torch._C._current_graph_task_id() != self._graph_task:
            self._nested.add(id(flat))
        if flat.gradient.is_whole:
            grad = take_grad(parameter)
            flat.gradient.open(self._device)
            assert grad is not None
            if self._first and index not in arrived:
                flat.gradient.part(index).copy_(grad)
            else:
                flat.gradient.part(index).add_(grad)
        arrived.add(index)
        late = id(flat) in self._nested or id(flat) in self._held
        if self._eager and len(arrived) == len(flat.parameters) and not late:
            self.complete(flat)

    def drop_grads(self) -> None:
        """Drop all gradients that autograd has accumulated in the parameters."""
        for flat in self._flats:
            for parameter in flat.parameters:
                drop_grad(parameter)

    def free_grads(self) -> None:
        """Drop all gradients of the step and free their memory; those that the last step's update still reads stay."""
        self.drop_grads()
        for flat in self._flats:
            if not flat.gradient.awaited:
                flat.gradient.close()

    def complete(self, flat: Flat) -> None:
        """Mark the flat's gradients as complete for this backward; gradients that have not arrived count as zero."""
        if flat.gradient.is_whole and self._first and len(self._arrived[id(flat)]) < len(flat.parameters):
            flat.gradient.open(self._device)
            for index in range(len(flat.parameters)):
                if index not in self._arrived[id(flat)]:
                    flat.gradient.part(index).zero_()
        self._completed[id(flat)] = flat
        if not self._together:
            self.launch(self.ready)

    @property
    def ready(self) -> int:
        """Number of flats, counted from the start of the launch order, whose gradients are complete in this pass."""
        if not self.active:
            return 0
        at = self._next
        while at < len(self._order) and id(self._order[at]) in self._completed:
            at += 1
        return at

    @property
    def newest(self) -> Flat | None:
        """The flat whose reduction was launched last in the current pass."""
        return self._order[self._next - 1] if self.active and self._next else None

    def launch(self, upto: int) -> None:
        """Launch the reductions of the first `upto` flats of the launch order that are not launched yet."""
        while self._next < upto:
            flat = self._order[self._next]
            # Whole gradients are summed over the micro-steps on this rank first, and reduced once.
            if self._last or not flat.gradient.is_whole:
                if self._channel is not None:
                    self._channel.finish_meeting()
                self._launched.add(id(flat))
                self._reductions.launch(flat)
            self._next += 1

    def launch_rest(self) -> None:
        """Launch all remaining reductions unless ranks agree on each: others may wait for them to end their pass."""
        if self.active and not self._together:
            self._launch_all()

    def _launch_all(self) -> None:
        """Launch all remaining reductions; gradients that have not arrived count as zero."""
        for flat in [flat for flat in self._order if id(flat) not in self._completed]:
            self.complete(flat)
        self.launch(len(self._order))

    def finish(self) -> None:
        """End the backward pass: reduce all remaining gradients, counting those that never arrived as zero."""
        self._launch_all()
        self._reductions.finish()
        for flat in self._flats:
            self._received[id(flat)] |= self._arrived[id(flat)]
        if self._last:
            self.norms.measure_on_device()  # offloaded gradients were measured as they were written
            self._held.clear()
        self.active, self.reduced = False, self._last or self._reduces_each_pass
        if not self._ordered_by_use:  # that in which rank 0's first backward completed the units
            completed = [self._flats.index(flat) for flat in self._completed.values()]
            self.adopt(self._collectives.broadcast_indices(completed))

    def finish_early(self) -> None:
        """End the step's accumulation early: do the reductions and norms that wait for the last micro-step."""
        if not self._stage.gradients:
            self.begin(first=False, last=True)
            self.finish()
            return
        self._reductions.sum_replicas()
        self.norms.measure_on_device()
        self.norms.measure_offloaded()

    def received(self, flat: Flat) -> set[int]:
        """Return the indices of the flat's parameters that got a gradient on this rank in this step."""
        return self._received[id(flat)] | self._zeros.get(id(flat), set())

    def keep_zeros(self, keep: bool) -> None:
        """Give parameters that have a gradient now a zero one in the next step; if not `keep`, none."""
        self._zeros = {id(flat): self.received(flat) for flat in self._flats} if keep else {}

    def end_step(self) -> None:
        for key, indices in self._zeros.items():
            self._received[key] |= indices
        self._zeros = {}

    def abandon(self) -> None:
        """Drop all gradients after an exception in backward; the step's gradients are lost."""
        self._reductions.abandon()
        self.free_grads()
        self.active = False

    def order(self) -> list[int] | None:
        """Return the launch order as indices of flats; None before the first backward."""
        return [self._flats.index(flat) for flat in self._order] if self._ordered_by_use else None

    def adopt(self, order: list[int] | None) -> None:
        """Adopt a launch order, or that of another run: with three or more ranks the rounding of sums depends on it."""
        if order is not None and sorted(order) == list(range(len(self._flats))):
            self._order = [self._flats[i] for i in order]
            self._ordered_by_use = True

    def follow(self, other: Reducer) -> None:
        """Take over the launch order, and zero gradients that are kept, from the reducer of the same flats before."""
        self._order, self._ordered_by_use, self._zeros = other._order, other._ordered_by_use, other._zeros

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the reduction buckets."""
        return self._reductions.holdings()
