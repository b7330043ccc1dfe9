"""The engine: one ZeRO runtime for all stages, around any nn.Module, from a user's own loop.

The life of a step: `forward` of each unit makes its parameters whole (gather.py) and lets them go; `backward` does so
again in reverse while gradients are reduced to their owners (reduce.py); `step` takes the exact global norm, updates
the slices this rank holds (optim.py) and spreads them. What is partitioned is the stage's three booleans; a world of
one and parameters that stay resident are the same code with trivial values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from zerocli import materialise
from zerocli.comm import Collectives
from zerocli.gather import Gatherer
from zerocli.lanes import Mark, Waits
from zerocli.optim import FlatOptimizer, Group, StepValues, make_optimizer
from zerocli.precision import LossScale, precision
from zerocli.reduce import Reducer
from zerocli.stage import stage as stage_of
from zerocli.unit import Flat, Unit, UnitChoice, build_flats, claim_parameters, find_units

UPDATE_CHUNK = {"cpu": 1 << 18, "cuda": 2 << 20}
"""Elements updated at a time where gradients need an fp32 copy: that copy, and what it meets, stay in cache."""


@dataclass(frozen=True)
class StepResult:
    """What a step did; the tensors are still on the device, so reading them is when the host waits."""

    step: int
    lr: float
    grad_norm: torch.Tensor
    """Norm of the whole averaged gradient, before clipping."""
    skipped: torch.Tensor
    """1.0 if the gradients were not finite and nothing was updated."""


class Engine:
    """A sharded model with its optimizer: call it, then `backward(loss)`, then `step()`."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.device = torch.device(settings.device) if settings.device is not None else _default_device(model)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.stage = stage_of(settings.stage)
        self.precision, _ = precision(settings.precision, self.device)
        if settings.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {settings.accumulate}")
        if settings.reduce not in ("compute", "fp32"):
            raise ValueError(f"reduce {settings.reduce!r} is not one of compute, fp32")
        self.collectives = Collectives(settings.group, self.device)
        self.waits = Waits(self.device)
        self.groups = (Group(weight_decay=settings.weight_decay), Group(weight_decay=0.0))
        self.optimizer: FlatOptimizer = make_optimizer(settings.optimizer, settings.options)
        self.loss_scale = LossScale(self.precision.scales, self.device)
        self.steps = 0
        self._updates = torch.zeros((), device=self.device)
        self._micro = 0
        self._backward_units: set[int] = set()
        self._open_inputs: dict[int, int] = {}

        self.units = self._build_units()
        self.gatherer = Gatherer(
            self.units, self.collectives, self.device, self.waits, settings.probe, settings.gather_buffers
        )
        self.reducer = Reducer(
            self.units,
            self.stage,
            self.collectives,
            self.device,
            self.waits,
            settings.probe,
            settings.bucket_nbytes,
            torch.float32 if settings.reduce == "fp32" else self.precision.compute,
            # Where parameters move, the engine says when a unit is through; elsewhere its last gradient does.
            eager=not self.gatherer.moves,
        )
        self._scratch: torch.Tensor | None = None
        for unit in self.units:
            self._wrap_forward(unit)
        self.collectives.take_nbytes()

    # -- building --------------------------------------------------------------------------------------------------

    def _build_units(self) -> list[Unit]:
        fresh = materialise.replace_meta(self.model, self.device)
        materialise.place_buffers(self.model, fresh, self.collectives, self.device)
        claimed = claim_parameters(self.model, find_units(self.model, self.settings.units))
        units = [unit for unit, _ in claimed]
        for unit, named in claimed:
            build_flats(unit, named, _decay_group, self.precision.compute, self.stage, self.collectives)
        # A slice that is the whole buffer needs no gathering: one rank is the general case with a trivial slice.
        keep_whole = not self.stage.parameters or self.collectives.world == 1
        for unit in units:
            for flat in unit.flats:
                self._fill(flat, fresh, keep_whole)
        self._allocate_gradients(units)
        materialise.reset_buffer_owners(self.model, fresh, set(), self.settings.seed, self.device)
        return units

    def _fill(self, flat: Flat, fresh: set[int], keep_whole: bool) -> None:
        """Give a flat its initial values and the states this rank holds of it."""

        def initialise() -> None:
            materialise.initialise_modules(self.model, flat.unit, flat, self.settings.seed, self.device)

        with torch.no_grad():
            whole = materialise.whole_values(flat, fresh, initialise, self.collectives, self.device)
            materialise.cut(flat, whole, keep_whole)
        if not flat.trainable:
            return
        assert flat.master is not None
        for name in self.optimizer.state_names:
            flat.states[name] = torch.zeros_like(flat.master)

    def _allocate_gradients(self, units: list[Unit]) -> None:
        """Give each trainable flat its gradient: a shard, or a part of one arena in the order backward fills it.

        In one arena neighbours are reduced together, however small they are.
        """
        single = self.settings.accumulate == 1 and self.settings.reduce == "compute"
        dtype = self.precision.compute if single else torch.float32
        flats = [flat for unit in reversed(units) if (flat := unit.trainable) is not None]
        if self.stage.gradients:
            for flat in flats:
                flat.grad = torch.zeros(flat.held.numel, dtype=dtype, device=self.device)
            return
        arena = torch.zeros(sum(flat.layout.total for flat in flats), dtype=dtype, device=self.device)
        at = 0
        for flat in flats:
            flat.grad_full = arena[at : at + flat.layout.total]
            flat.grad = flat.grad_full[flat.held.start : flat.held.stop]
            at += flat.layout.total

    def _wrap_forward(self, unit: Unit) -> None:
        module, root = unit.module, unit.index == 0
        body = module.forward
        if self.settings.compile and not root:
            body = torch.compile(body)
        if self.settings.recompute and not root:
            body = self._recomputed(unit, body)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if root and self.precision.compute != torch.float32:
                args, kwargs = tree_map(self._cast_input, (args, kwargs))
            return self._run_unit(unit, body, args, kwargs)

        module.forward = forward  # type: ignore[method-assign]

    def _recomputed(self, unit: Unit, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` with only its input kept for backward, where it runs again."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            self.gatherer.need(unit)
            with self.gatherer.pinned(unit), self.gatherer.saving():  # inside the checkpoint's own hooks
                return body(*args, **kwargs)

        def outer(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return body(*args, **kwargs)
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

        return outer

    def _cast_input(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self.precision.compute)
        return value

    # -- forward and backward --------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _run_unit(self, unit: Unit, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a unit's forward with its parameters whole."""
        gatherer = self.gatherer
        gatherer.enter(unit)
        finished = False
        try:
            with gatherer.pinned(unit), gatherer.saving():
                if gatherer.moves and torch.is_grad_enabled():
                    self._watch_input(unit, args, kwargs)
                output = body(*args, **kwargs)
                if gatherer.moves:
                    output = tree_map(lambda value: self._watch_output(unit, value), output)
            finished = True
        finally:
            if unit.index == 0 and not (finished and torch.is_grad_enabled()):
                gatherer.settle()  # no backward follows, or none that is known
                gatherer.lose_place()
        if not self.reducer.active:  # else this is a recomputation, and backward comes next
            gatherer.release(unit)
        self.settings.probe("forward")
        return output

    def _watch_input(self, unit: Unit, args: Any, kwargs: Any) -> None:
        """Ask autograd to say when the unit's input has its gradient: the unit's backward is then over.

        Autograd runs what was recorded last first, so all of the unit's nodes run before the one that made its input.
        """
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                self._open_inputs[unit.index] = self._open_inputs.get(unit.index, 0) + 1
                value.register_hook(lambda grad: self._leave_backward(unit))
                return

    def _watch_output(self, unit: Unit, value: Any) -> Any:
        """Ask autograd to say when backward reaches the unit; an output that is a bare parameter leaves as a copy."""
        if not isinstance(value, torch.Tensor):
            return value
        if self.gatherer.locate(value) is not None:
            value = value.clone()
        if value.requires_grad:
            value.register_hook(lambda grad: self._enter_backward(unit))
        return value

    def _enter_backward(self, unit: Unit) -> None:
        if unit.index not in self._backward_units or not self.gatherer.holds(unit):
            self._backward_units.add(unit.index)
            self.gatherer.enter(unit, in_backward=True)

    def _leave_backward(self, unit: Unit) -> None:
        """Reduce and release a unit whose last call has passed its input's gradient on.

        Every rank comes here at the same place of its backward, whichever parameters it used: so gathers and reductions
        are issued in one order everywhere.
        """
        self._open_inputs[unit.index] -= 1
        if self.reducer.active and self._open_inputs[unit.index] == 0:
            self._backward_units.discard(unit.index)
            if unit.trainable is not None:
                self.reducer.complete(unit.trainable)
            self.gatherer.release(unit)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of the mean of `loss` over the ranks and the step's backward passes."""
        accumulate = self.settings.accumulate
        if loss.numel() != 1:
            raise ValueError(f"backward needs a loss of one element, not of shape {tuple(loss.shape)}")
        if self._micro >= accumulate:
            raise RuntimeError(
                f"backward was called {self._micro + 1} times before step(); shard(..., accumulate={self._micro + 1}) "
                "adds the gradients of several backward passes"
            )
        self.reducer.begin(first=self._micro == 0, last=self._micro == accumulate - 1)
        seed = self.loss_scale.value / (self.collectives.world * accumulate)
        try:
            (loss * seed).backward()
            self.reducer.finish()
        except BaseException:
            self.reducer.abandon()
            self._micro = 0
            raise
        else:
            self._micro += 1
        finally:
            self._backward_units.clear()
            self._open_inputs.clear()
            self.gatherer.settle()

    # -- the optimizer step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clip by the exact global norm, update what this rank holds, and spread it; a non-finite step is skipped."""
        if self._micro == 0:
            raise RuntimeError("step() needs a backward(loss) before it")
        if self._micro < self.settings.accumulate and not self.stage.gradients:
            self.reducer.begin(first=False, last=True)  # the last micro-step never came: reduce what there is
            self.reducer.finish()
        self.settings.probe("optimizer")
        self.steps += 1
        lr = self.settings.lr(self.steps) if callable(self.settings.lr) else self.settings.lr
        with self.waits.waiting("optimizer"):
            values, norm = self._step_values(lr)
            for unit in self.gatherer.forward_order():
                self._update(unit, values)
                self.gatherer.refresh(unit)
            # Each spread ran beside the next update; a user who reads a parameter after this finds it whole.
            self.gatherer.settle()
        self.loss_scale.update(values.skip)
        self.gatherer.end_step()
        self._micro = 0
        return StepResult(self.steps, lr, norm, values.skip)

    def _step_values(self, lr: float) -> tuple[StepValues, torch.Tensor]:
        # [Note: one norm for all stages] Every rank sums the squares of the slices it owns, unit by unit, and the
        # ranks' sums are added by one collective, at stage 0 too: the same terms in the same order everywhere.
        parts = [self._owned_grad(flat) for flat in self._trainable()]
        if parts:
            norms = torch.stack(torch._foreach_norm(parts, 2, torch.float32)).double()
        else:
            norms = torch.zeros(1, dtype=torch.float64, device=self.device)
        squares = self.collectives.sum_control(norms.square().sum())
        share = self._micro / self.settings.accumulate
        scale = self.loss_scale.value * share
        norm = squares.sqrt().float() / scale
        finite = torch.isfinite(norm)
        skip = (~finite).float()
        factor = torch.ones_like(norm)
        if self.settings.clip is not None:
            factor = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
        # A skipped step must not divide by a NaN on its way to being ignored.
        grad_scale = torch.where(finite, scale / factor, torch.ones_like(norm))
        self._updates += 1 - skip
        inverse = grad_scale.reciprocal().view(1)  # one dimension: products with bf16 are then fp32
        return StepValues(lr, self._updates, grad_scale, inverse, skip), norm

    def _owned_grad(self, flat: Flat) -> torch.Tensor:
        assert flat.grad is not None
        start = flat.own.start - flat.held.start
        return flat.grad[start : start + flat.own.numel]

    def _update(self, unit: Unit, values: StepValues) -> None:
        flat = unit.trainable
        if flat is None:
            return
        assert flat.grad is not None and flat.master is not None
        target = flat.shard if flat.held == flat.own else flat.resident
        chunk = UPDATE_CHUNK[self.device.type]
        for group, segment in flat.layout.segments(flat.held):
            for span in segment.shifted(-flat.held.start).pieces(chunk):
                part = slice(span.start, span.stop)
                master = flat.master[part]
                states = {name: array[part] for name, array in flat.states.items()}
                grad, scale = self._fp32(flat.grad[part], values)
                self.optimizer.update(master, grad, scale, states, self.groups[group], values)
                if target is not None and target.data_ptr() != flat.master.data_ptr():
                    target[part].copy_(master)
        flat.written = Mark(self.device)

    def _fp32(self, grad: torch.Tensor, values: StepValues) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradient in fp32 and what the kernel still has to divide it by.

        Itself, or a chunk's copy in a buffer that is made once, scaled on the way: the kernel then writes none back.
        """
        if grad.dtype == torch.float32:
            if self.device.type == "cuda":
                return grad, values.grad_scale
            # The CPU kernel is a third slower when it scales; the chunk is in cache, and the host may look at the scale.
            return (grad if values.grad_scale == 1 else grad.mul_(values.inverse_scale)), None
        if self._scratch is None:
            self._scratch = torch.empty(UPDATE_CHUNK[self.device.type], device=self.device)
        return torch.mul(grad, values.inverse_scale, out=self._scratch[: grad.numel()]), None

    # -- looking in ------------------------------------------------------------------------------------------------

    def _trainable(self) -> Iterator[Flat]:
        for unit in self.units:
            if unit.trainable is not None:
                yield unit.trainable

    def flats(self) -> Iterator[Flat]:
        for unit in self.units:
            yield from unit.flats

    def memory(self) -> dict[str, int]:
        """Return the bytes this rank holds on its device, by category; activations are not among them."""
        seen: dict[int, str] = {}
        nbytes = dict.fromkeys(("parameters", "gradients", "optimizer_states", "gathered", "buffers"), 0)

        def count(category: str, tensor: torch.Tensor | None) -> None:
            if tensor is not None and tensor.numel():
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen[storage.data_ptr()] = category
                    nbytes[category] += storage.nbytes()

        for flat in self.flats():
            count("parameters", flat.resident)
            count("parameters", flat.shard)
            count("gradients", flat.grad_full)
            count("gradients", flat.grad)
            count("optimizer_states", flat.master)
            for state in flat.states.values():
                count("optimizer_states", state)
        for buffer in self.model.buffers():
            count("buffers", buffer)
        count("buffers", self._scratch)
        nbytes["gathered"] = self.gatherer.nbytes
        nbytes["buffers"] += self.reducer.nbytes
        return nbytes

    @property
    def numel(self) -> int:
        """Parameters of the whole model, padding left out."""
        return sum(flat.layout.numel for flat in self.flats())

    # -- whole states, under the model's own names: see states.py --------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the full, unsharded parameters (fp32) and buffers on the CPU, under the model's own names.

        Collective: every rank calls it, and every rank gets all of it.
        """
        return states.model_state(self)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load full, unsharded tensors under the model's own names; every rank passes the same."""
        states.load_model_state(self, state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's full states on the CPU, by parameter name, with its counters. Collective."""
        return states.optimizer_state(self)

    def load_optimizer_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `optimizer_state_dict` gave, at any stage, placement and world size."""
        states.load_optimizer_state(self, saved)


def _decay_group(name: str, parameter: nn.Parameter) -> int:
    return 0 if parameter.dim() >= 2 else 1


def _default_device(model: nn.Module) -> torch.device:
    for p in model.parameters():
        if p.device.type not in ("meta", "cpu"):
            return p.device
    if torch.cuda.is_available():
        import os

        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
