"""Hooks: what happens around a unit's forward and backward.

The forward of each unit gathers its parameters and releases them afterwards. The unit's backward starts when its output
gets a gradient and ends when its input does. In between its parameters are gathered again; afterwards its gradients are
complete.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves
from torch.utils.checkpoint import CheckpointError, checkpoint

from tiers.events import NOTHING
from zerocli.engine import agreement
from zerocli.engine.events import BACKWARD, FORWARD, RUNNING
from zerocli.engine.recompute.compiled import NOT_RUN, SELECTIVE, WHOLE, CompiledBlocks
from zerocli.engine.recompute.recomputed_call import ReachableState, RecomputedCall
from zerocli.engine.recompute.selective import KeptOutputs, paused
from zerocli.engine.units.casts import InputCasts, change_tensors
from zerocli.engine.units.divide import outside
from zerocli.engine.units.ends import Ends
from zerocli.engine.units.modules import Entry, outside_of_units, unwrap, wrap
from zerocli.engine.units.saved_views import STALE, allow_hooks, disables_hooks
from zerocli.engine.units.unit import Flat, Unit
from zerocli.errors import Refused, raise_caught

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


_VERSIONS = re.compile(r"is at version (\d+); expected version \d+")


class Hooks:
    """Runs the calls of a sharded model's modules, and follows backward through its units."""

    def __init__(self, engine: Engine, recomputed: Mapping[Unit, bool], blocks: CompiledBlocks) -> None:
        self.engine, self.blocks = engine, blocks
        self._depth = 0
        self._records = False
        """Whether autograd records the outermost call."""
        self._recomputing = 0
        """Number of nested recomputed units that are running."""
        self._backward_units: set[int] = set()
        self._open: Counter[int] = Counter()
        """Number of calls of each unit whose input has not got its gradient yet."""
        self._unsure: set[int] = set()
        """Units with a call that cannot be tracked: their gradients are complete only when backward ends."""
        self.generation = 0
        """Incremented when parameters change: backward through a graph of an earlier generation is refused."""
        self.ends = Ends()
        self._casts = InputCasts(engine.model, engine.precision.compute, engine.settings.cast_inputs)
        self._modules = [unit.module for unit in engine.units]
        self._outside = list(outside(engine.model, {id(unit.module) for unit in engine.units[1:]}))
        """The modules outside of all units but the rest; recomputed units may change their state."""
        entries = {unit: wrap(unit.module, unit, self) for unit in engine.units}
        self._bodies = {unit: (entry, entry.body) for unit, entry in entries.items()}
        """The entry of each unit, and its module's own forward."""
        self.recompute(recomputed)
        for module in outside_of_units(engine.model, engine.units):
            wrap(module, engine.units[0], self)
            self._modules.append(module)
        # flatten_parameters would move the weights into memory that the engine does not know.
        self._recurrent = [module for module in engine.model.modules() if isinstance(module, nn.RNNBase)]
        for module in self._recurrent:
            module.__dict__["flatten_parameters"] = _leave_in_place

    def recompute(self, recomputed: Mapping[Unit, bool]) -> None:
        """Recompute these units, each whole or selectively, from the next forward on."""
        for unit, (entry, body) in self._bodies.items():
            chosen = unit in recomputed
            entry.body = self._recomputed(unit, body, recomputed[unit]) if chosen else self._compiled(unit, body)

    def close(self) -> None:
        """Restore the modules' original classes and methods."""
        for module in self._modules:
            unwrap(module)
        for module in self._recurrent:
            module.__dict__.pop("flatten_parameters", None)
        self._casts.close()

    # -- forward ---------------------------------------------------------------------------------------------------

    def run(self, entry: Entry, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of a sharded module."""
        engine, unit = self.engine, entry.unit
        if not entry.own and engine.gatherer.in_use(unit):  # inside a call of the model itself
            return function(*args, **kwargs)
        run = self._run_reported if engine.events.on else self._run_unit
        if self._depth > 0 or engine.precision.compute == torch.float32 or engine.reducer.active:
            return run(unit, function, args, kwargs)
        args, kwargs = self._casts.prepare(args, kwargs)  # see [Note: inputs under bf16 and fp16]
        try:
            return run(unit, function, args, kwargs)
        except RuntimeError as error:
            if reason := self._casts.explain(error):
                raise Refused(reason) from error
            raise

    def _run_reported(self, unit: Unit, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """As `_run_unit`, reported to the engine's subscribers."""
        events, again = self.engine.events, self.engine.reducer.active
        outermost = self._depth == 0 and not again
        with events.phase(FORWARD) if outermost else NOTHING, RUNNING.of(events):
            with events.unit(unit, BACKWARD if again else FORWARD, (args, kwargs)):
                output = self._run_unit(unit, function, args, kwargs)
            events.output(unit, output)
        return output

    def _run_unit(self, unit: Unit, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function with the unit's parameters gathered."""
        engine, gatherer, grad = self.engine, self.engine.gatherer, torch.is_grad_enabled()
        outermost = self._depth == 0 and not engine.reducer.active  # else a recomputation in backward
        made = Refused.latest
        if outermost:
            engine.before_forward()
            # before_forward may have made new flats for unfrozen parameters, with another gatherer.
            gatherer, self._records = engine.gatherer, grad
            if grad and engine.loss_scale.active:
                self.ends.note_inputs((args, kwargs))
        elif self._records and not grad:  # a reentrant checkpoint
            engine.reducer.hold(unit)
        # A gather is the engine's own work: neither the caller's transforms nor selective recomputation may see it.
        with _plain_tensors(), paused():
            gatherer.enter(unit, record=grad)
        self._depth += 1
        finished = False
        try:
            with gatherer.pinned(unit), gatherer.saving():
                if gatherer.moves and grad:
                    self._watch_input(unit, args, kwargs)
                output = function(*args, **kwargs)
                raise_caught(made)
                if gatherer.moves or (outermost and grad):
                    output = change_tensors(output, lambda value: self._watch(unit, value, outermost))
            finished = True
        except RuntimeError as error:
            if gatherer.moves and grad and disables_hooks(error):
                raise Refused(
                    f"{unit.title} disables saved-tensor hooks, by which its partitioned parameters are gathered again "
                    "in backward: leave torch.autograd.graph.disable_saved_tensors_hooks out of it, or use stage=2"
                ) from error
            raise
        finally:
            self._depth -= 1
            if outermost and not (finished and grad):
                gatherer.release_all(quietly=not finished)  # no backward follows, or none that is known
                gatherer.reset_prefetch_order()
        if outermost:  # all ranks leave the call together, because the user may issue a collective next
            if gatherer.deferred:  # a rank may not have used all units
                engine.updater.issue_updates()
            engine.agreement.agree(agreement.FORWARD)
        if not engine.reducer.active:  # else this is a recomputation, and backward comes next
            gatherer.release(unit)
        return output

    def _compiled(self, unit: Unit, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` compiled if its unit is compiled, else `body` itself."""
        if not self.blocks.includes(unit):
            return body
        return lambda *args, **kwargs: self.blocks.run(unit, body, args, kwargs)

    def _recomputed(self, unit: Unit, eager: Callable[..., Any], selective: bool) -> Callable[..., Any]:
        """Return `eager` with activation checkpointing: only its input is kept, and backward runs it again.

        With `selective` the outputs of its expensive operations are kept too. It then runs as one compiled graph or
        eagerly: torch would not compile parts of it under the mode that keeps outputs.
        """
        engine, body = self.engine, eager if selective else self._compiled(unit, eager)

        reach = ReachableState(unit.title, unit.module, self._outside)

        def inner(kept: KeptOutputs | None, call: RecomputedCall, where: tuple[TreeSpec, list[int]], *each: Any) -> Any:
            args, kwargs = call.arguments(where[0], [each[at] for at in where[1]])
            # In backward its buffer may have gone to another unit since.
            engine.gatherer.need(unit)
            self._recomputing += 1
            made = Refused.latest
            outputs = NOTHING if kept is None else kept.running()
            try:
                # Inside the checkpoint's own hooks.
                with call.running(), outputs, engine.gatherer.pinned(unit), engine.gatherer.saving():
                    output = call.returned(body(*args, **kwargs))
                raise_caught(made)
                return output
            except RuntimeError as error:
                if disables_hooks(error):
                    raise Refused(
                        f"{unit.title} is recomputed, and disables saved-tensor hooks, which recomputation needs: "
                        "leave torch.autograd.graph.disable_saved_tensors_hooks out of it, or exclude the block with "
                        "shard(..., recompute=...)"
                    ) from error
                raise
            finally:
                self._recomputing -= 1

        def outer(*args: Any, **kwargs: Any) -> Any:
            # Inside another recomputed unit, or a checkpoint of the user's own, a checkpoint saves nothing; the user's
            # runs the unit again itself, with all that it changes. torch.func allows none, nor may the caller.
            if self._recomputing or not torch.is_grad_enabled() or _is_transformed() or not allow_hooks():
                return body(*args, **kwargs)
            if engine.gatherer.saved.inside_checkpoint():
                return body(*args, **kwargs)
            leaves, spec = tree_flatten((args, kwargs))
            if not engine.activations.takes(unit.name, leaves):
                return body(*args, **kwargs)
            with engine.activations.keeping(unit.name, leaves):
                if self.blocks.includes(unit):  # see [Note: recomputation of compiled blocks]
                    recompute = SELECTIVE if selective else WHOLE
                    output = self.blocks.attempt(unit, eager, args, kwargs, fullgraph=True, recompute=recompute)
                    if output is not NOT_RUN:
                        return output
                call = RecomputedCall(reach, functools.partial(self._check, self.generation), args, kwargs, leaves)
                kept = KeptOutputs(lambda: call.ended) if selective else None
                # Each object once: attention projects its inputs together where query, key and value are one tensor.
                once = {id(leaf): leaf for leaf in leaves}
                places = {key: place for place, key in enumerate(once)}
                where = (spec, [places[id(leaf)] for leaf in leaves])
                with call.to_its_end():
                    return checkpoint(inner, kept, call, where, *once.values(), use_reentrant=False)

        return outer

    # -- backward --------------------------------------------------------------------------------------------------

    def _watch_input(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """Register a hook for the gradient of the unit's input: when it runs, this call's backward is over.

        Autograd runs nodes in reverse order, so all nodes of the call run before the node that produced its input. A
        call whose input has no such node (raw data) cannot be tracked.
        """
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                self._open[unit.index] += 1
                value.register_hook(lambda grad: self._leave_backward(unit))
                return
        self._unsure.add(unit.index)

    def _watch(self, unit: Unit, value: torch.Tensor, outermost: bool) -> torch.Tensor:
        """Register hooks that report when backward reaches an output; one that is a view of a buffer is cloned."""
        engine, generation = self.engine, self.generation
        if engine.gatherer.moves and engine.gatherer.saved.locate(value) is not None:
            value = value.clone()
        if value.grad_fn is not None and torch.is_grad_enabled():  # a hook on a leaf would outlive the call
            if outermost:
                value.register_hook(lambda grad: self._check(generation))
                if engine.loss_scale.active:
                    self.ends.note_output(value)
            if engine.gatherer.moves:
                value.register_hook(lambda grad: self._enter_backward(unit))
        return value

    def explained(self, error: BaseException) -> Refused | None:
        """Return the reason for torch's error in backward if it is a matter of the engine; None for any other."""
        text = str(error)
        if isinstance(error, CheckpointError):
            return Refused(
                "a recomputed block's forward did other operations in backward than before, so its gradients would be "
                f"wrong: it must do the same each time, or be excluded with shard(..., recompute=...). {text[:300]}"
            )
        if reason := self._casts.explain(error):
            return Refused(reason)
        if "modified by an inplace operation" in text and (found := _VERSIONS.search(text)):
            for flat in self.engine.trainable():
                if flat.resident is not None and flat.num_changes:
                    if any(p._version == int(found[1]) for p in flat.parameters):
                        return Refused(f"{STALE}, or keep the graph's parameters unchanged. {text[:300]}")
        return None

    def _check(self, generation: int) -> None:
        if generation != self.generation:
            raise Refused(STALE)

    def parameters_changed(self, flats: Iterable[Flat]) -> None:
        """Refuse backward through graphs that were made before these parameters were changed."""
        self.generation += 1
        for flat in flats:
            flat.note_change()

    def _enter_backward(self, unit: Unit) -> None:
        gatherer = self.engine.gatherer
        if unit.index not in self._backward_units or not gatherer.holds(unit):
            self._backward_units.add(unit.index)
            gatherer.enter(unit, record=True)

    def _leave_backward(self, unit: Unit) -> None:
        """Mark the unit's gradients as complete and release it, once the backward of its last call is over."""
        if not self.engine.reducer.active:  # torch.autograd.grad: another backward of the same calls may follow
            self._unsure.add(unit.index)
            return
        self._open[unit.index] -= 1
        if self._open[unit.index] == 0 and unit.index not in self._unsure:
            self._backward_units.discard(unit.index)
            for flat in unit.trainable:
                self.engine.reducer.complete(flat)
            self.engine.gatherer.release(unit)
            if not self.engine.gatherer.prefetch():  # a prefetch includes an agreement, which launches reductions
                self.engine.agreement.agree(agreement.NOTHING)

    def cannot_follow(self, unit: Unit) -> None:
        """Treat the unit's gradients as complete only when backward ends: its parameters are used elsewhere too."""
        self._unsure.add(unit.index)

    def end_backward(self, retained: bool) -> None:
        if retained:  # other calls of the graph than in this pass may follow, or the same ones again
            self._unsure.update(self._open)
        self._backward_units.clear()
        self.ends.clear()

    def abandon(self) -> None:
        """Drop the tracked calls after a failed backward."""
        self.end_backward(retained=False)
        self._open.clear()
        self._unsure.update(unit.index for unit in self.engine.units)  # until the step ends

    def end_step(self) -> None:
        """Drop tracked calls that had no backward, and refuse graphs made before this."""
        self._backward_units.clear()
        self._open.clear()
        self._unsure.clear()
        self.parameters_changed(self.engine.trainable())


def _leave_in_place() -> None:
    """Do nothing; replaces RNNBase.flatten_parameters."""


def _plain_tensors() -> contextlib.AbstractContextManager[object]:
    """Disable the caller's inference mode and torch.func transforms, so that training can use tensors made inside."""
    return _disabled_transforms() if torch.is_inference_mode_enabled() or _is_transformed() else NOTHING


def _is_transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextlib.contextmanager
def _disabled_transforms() -> Iterator[None]:
    with torch._C._DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
        yield
