"""Trace the real engine on fake tensors, as rank 0 of any number of ranks: for models without a formula.

Two steps run under torch's fake tensors, with a process group that moves nothing. Fake tensors have no addresses and no
values; `_without_memory` answers the engine's queries for either: addresses come from a counter, and values are those
of a first step without overflow. The operations are those of a CPU, with the chunk sizes of a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from offload.placement import Placement
from tiers.events import NOTHING, Scope
from zerocli.config import AUTO, Sharding
from zerocli.engine.build import mixes
from zerocli.engine.comm import Collectives
from zerocli.engine.engine import Engine
from zerocli.engine.events import Events
from zerocli.engine.precision import PRECISIONS
from zerocli.engine.settings import Settings
from zerocli.engine.tensor_parallel import TensorParallel, open_axes, planned_cuts
from zerocli.engine.units.unit import Unit as EngineUnit
from zerocli.engine.units.unit import UnitChoice, claim_parameters, find_units, recomputed_units
from zerocli.errors import UserError
from zerocli.layout.recompute import WHOLE, Recompute
from zerocli.models.loss import chunks_of
from zerocli.plan.blocks.shape import Parameter, Unit
from zerocli.plan.measure import LiveBytes, OperationLimit
from zerocli.plan.models.depth import ROUNDED, Measured, extrapolate
from zerocli.plan.models.operations import Operations
from zerocli.plan.models.traced import TRACED, Traced, way
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import Work
from zerocli.ranks.issued import Issued

MAX_RANKS = 4096
MAX_OPERATIONS = 50_000
"""A shallow model with more operations in forward is not traced: a loop over tokens takes minutes on fake tensors."""
Loss = Callable[[Engine, Setup], torch.Tensor]
HELD = ("parameters", "gradients", "optimizer_states", "gathered", "buffers")
"""Categories that an engine holds between steps; an arena of checkpoints counts as activations."""


def trace(name: str, make: Any, setups: list[Setup], loss: Loss | None = None, whole: bool = True) -> Traced:
    """Trace the model that `make()` builds on the meta device, once for each kind of step that the setups have.

    `loss(engine, setup)` runs the engine on a batch; by default `engine(tokens, targets)` gives the loss. If not
    `whole`, shallow models are traced and their bytes extrapolated.
    """
    moving: dict[tuple[bool, Recompute], int] = {}
    work: dict[tuple[bool, Recompute], tuple[Work, Work, Work]] = {}
    kept: dict[tuple[bool, Recompute], int] = {}
    try:
        parts, buffers = units_of(make(), setups[0].tp, PRECISIONS[setups[0].precision].compute)
    except ValueError as error:
        raise UserError(f"--trace: {error}", hint="--tp 1") from error
    for setup in setups:
        if way(setup) not in moving:
            measure = functools.partial(step_bytes, setup=setup, loss=loss, most=0 if whole else MAX_OPERATIONS)
            found = measure(make()) if whole else extrapolate(make, measure)
            moving[way(setup)], work[way(setup)], kept[way(setup)] = found.peak, found.work, found.forward
    return Traced(name, parts, buffers, moving, work, kept, alike_blocks(make()))


def kinds_of_step(setup: Setup, stages: Sequence[int]) -> list[Setup]:
    """Return the setups to trace: the placement of states does not change the temporary memory of a step."""
    ways = TRACED if setup.recompute == AUTO else (setup.recomputed,)
    alike = [dataclasses.replace(setup, offload=Placement(), recompute=each) for each in ways]
    return [dataclasses.replace(each, stage=stage) for each in alike for stage in stages]


def units_of(model: nn.Module, tp: int = 1, compute: torch.dtype = torch.float32) -> tuple[tuple[Unit, ...], int]:
    """Return the units that the engine would make of a model, and the bytes of its buffers.

    Raises ValueError for a model that this tensor-parallel degree does not split.
    """
    found = []
    # As in the engine: parameters take the compute dtype, but fp32 ones (adapters) of a bf16 model stay fp32.
    narrowed = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    narrowed -= {torch.float32} if mixes(model, compute) else set()
    cuts = planned_cuts(model, tp)
    for unit, named in claim_parameters(model, find_units(model, _choice(model))):
        if named:
            parameters = tuple(
                Parameter(
                    name,
                    tuple(p.shape),
                    cuts[name].dim if name in cuts else None,
                    p.requires_grad,
                    0 if p.dtype in narrowed else p.element_size(),
                )
                for name, p in named
            )
            found.append(Unit(unit.name or "rest", parameters))
    return tuple(found), sum(b.numel() * b.element_size() for b in model.buffers())


def alike_blocks(model: nn.Module) -> int:
    """Return how many blocks of a model may be recomputed, if all are of one class with equal parameters; else 0."""
    units = [EngineUnit(number, *found) for number, found in enumerate(find_units(model, _choice(model)))]
    blocks = [unit.module for unit in recomputed_units(units, WHOLE)]
    kinds = {(type(each), *((name, p.shape, p.dtype) for name, p in each.named_parameters())) for each in blocks}
    return len(blocks) if len(kinds) == 1 else 0


def run(model: nn.Module, setup: Setup, recompute: UnitChoice = None) -> int:
    """Return the peak bytes of a step beyond what the engine holds between steps; runs two steps.

    `recompute` is that of `step_bytes`.
    """
    return step_bytes(model, setup, recompute).peak


def step_bytes(
    model: nn.Module, setup: Setup, recompute: UnitChoice = None, loss: Loss | None = None, most: int = 0
) -> Measured:
    """Return the bytes of a step beyond what the engine holds between steps; runs two steps.

    `recompute` chooses the units that are recomputed, as `Settings.recompute` does; by default the setup's policy does.
    `most` limits the operations in forward (0: no limit).
    """
    if setup.ranks > MAX_RANKS:
        raise UserError(f"--trace is rank 0 of at most {MAX_RANKS} ranks, not {setup.ranks}")
    live, operations = LiveBytes(granularity=ROUNDED), Operations()
    sums = _Sums(operations)
    # Only temporary memory of a step is measured. States are computed by arithmetic: here they stay on the device.
    own: dict[str, Any] = {"accumulate": 1, "clip": 1.0, "units": _choice(model), "device": "cpu", "tp": 1}
    asked = setup.recomputed if recompute is None else recompute
    own |= {"recompute": asked, "offload": Placement()}
    own |= {"optimizer": Sharding.optimizer, "options": {}, "update": Sharding.update}
    own |= {"watch": _prepare, "events": sums, "chunk_device": "cuda"}
    settings = Settings(**(setup.shared() | own))
    with _axes(setup.ranks, setup.tp) as axes, chunks_of("cuda"), _without_memory(), live, operations:
        limit = OperationLimit(live, most)
        try:
            engine = Engine(model, dataclasses.replace(settings, **axes))
            for _ in range(2):
                operations.take()
                with limit:
                    value = (loss or _loss)(engine, setup)
                forward, (there, _) = live.nbytes, operations.take()
                engine.backward(value)
                work = there, *operations.take()
                engine.step()
                del value
            held = engine.memory()
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise UserError(
                f"the model did not run on (tokens, targets) of {setup.batch} x {setup.seq}: {error}",
                hint="forward(tokens, targets) gives the loss, and asks no tensor for its value",
            ) from error
    states = sum(held[category] for category in HELD)
    return Measured(live.peak - states + sums.largest, forward - states, work)


def _loss(engine: Engine, setup: Setup) -> torch.Tensor:
    tokens = torch.zeros((2, setup.batch, setup.seq), dtype=torch.int64)
    loss: torch.Tensor = engine(tokens[0], tokens[1])
    return loss


def _choice(model: nn.Module) -> Any:
    """Return the units that a model names itself, or None for the repeated blocks."""
    named = getattr(model, "unit_modules", None)
    return named() if callable(named) else None


class _Sums(Events):
    """Records the largest all-reduce over tensor-parallel ranks: a real one keeps its buffer alive until it is done.

    Here it is done at once.
    """

    def __init__(self, operations: Operations) -> None:
        self.largest = 0
        self._operations = operations

    def loss(self) -> Scope:
        return self._operations.loss()

    def collective(self, axis: Collectives, issued: Issued) -> Scope:
        if isinstance(axis, TensorParallel) and issued.kind == "all_reduce":
            self.largest = max(self.largest, issued.nbytes // 2)  # an all-reduce counts its bytes twice
        return NOTHING


def _prepare(engine: Engine) -> None:
    """Split the model outside fake-tensor mode, and skip comparisons between ranks: there are no values."""
    engine.tensor_parallel.trust()
    with unset_fake_temporarily():  # a model on the meta device has no memory, and cannot hold fake parts
        engine.tensor_parallel.split(engine.model)


@contextlib.contextmanager
def _axes(ranks: int, tp: int) -> Iterator[dict[str, Any]]:
    """Act as rank 0 of a fake process group; yield the settings of its two axes, made outside fake-tensor mode."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():  # a user's own: its ranks, as many and at once, each as itself
        if tp > 1 or ranks != dist.get_world_size():
            raise UserError(f"a trace of {ranks} ranks cannot run inside a process group of {dist.get_world_size()}")
        own = dist.new_group(backend="fake")
        try:
            yield {"group": own}
        finally:
            dist.destroy_process_group(own)
        return
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        group, mesh = open_axes(tp, None, torch.device("cpu"))
        yield {"group": group, "tp": mesh} if mesh is not None else {}
    finally:
        if ranks > 1:
            dist.destroy_process_group()


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """While the body runs, new tensors are fake, and queries for values are answered as in a first step."""
    addresses: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
    fresh = itertools.count(1 << 40, 1 << 44)
    real = torch.Tensor.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> int:
        if storage not in addresses:
            addresses[storage] = next(fresh)
        return addresses[storage]

    def of_tensor(tensor: torch.Tensor) -> int:
        # A parameter of a fake flat is not a FakeTensor: it is on the meta device, in the flat's storage.
        if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
            return real(tensor)
        return of_storage(tensor.untyped_storage()) + int(tensor.storage_offset()) * tensor.element_size()

    def numbers(tensor: torch.Tensor) -> Any:
        # The engine asks which flats any rank has gradients of: all.
        return [1.0] * len(tensor) if tensor.is_floating_point() and tensor.dim() == 1 else to_list(tensor)

    to_list: Any = FakeTensor.tolist
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.Tensor, "data_ptr", of_tensor),
            (torch.UntypedStorage, "data_ptr", of_storage),
            (FakeTensor, "__bool__", lambda tensor: False),
            (FakeTensor, "tolist", numbers),
        ):
            stack.enter_context(_attribute(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


@contextlib.contextmanager
def _attribute(owner: type, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a torch class while the body runs.

    There is no other way: a fake tensor raises when it is asked for an address or a value, and torch has no hook for
    that.
    """
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if own else delattr(owner, name)
