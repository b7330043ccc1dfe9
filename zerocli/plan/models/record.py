"""Trace a model on tensors without memory: what each of its blocks allocates, saves and computes.

The model runs on torch's fake tensors, without an engine: forward once with nothing saved, which tells when Python
drops each tensor, and once with its backward, which tells when autograd does. Of equal blocks four run: the first, one
that stands for all up to the last two, and these. The operations are those of a CPU, with the chunk sizes of the device
that is planned.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerocli.engine.precision import PRECISIONS
from zerocli.engine.tensor_parallel import TensorParallel, open_axes, planned_cuts
from zerocli.engine.units.divide import claim_parameters, find_units
from zerocli.models.loss import chunks_of
from zerocli.plan.blocks.program import ALLOCATE, SAVE, Event, Part, Program
from zerocli.plan.blocks.shape import Parameter, Unit
from zerocli.plan.blocks.work import Work
from zerocli.plan.models.fake_run import (
    Loss,
    Run,
    Trace,
    blocks_of,
    kind_of,
    loss_of_tokens,
    quiet,
    values_unknown,
    widths_of,
)
from zerocli.plan.setup import Setup

TRACED_PER_KIND = 4
"""Blocks of each kind that run: the first, the last two, and one that stands for all between them."""


def record(name: str, model: nn.Module, setup: Setup, loss: Loss | None = None) -> Program:
    """Trace a model on the meta device, which is used up, with the setup's batch, precision and device.

    `loss(model, setup)` runs it on a batch; by default `model(tokens, targets)` gives the loss. ValueError for a model
    that this tensor-parallel degree does not split; else whatever the model raises on tensors without values.
    """
    units, places, buffers = units_of(model, setup.tp, PRECISIONS[setup.precision].compute)
    blocks = blocks_of(model)
    kinds = [kind_of(*block) for block in blocks]
    full = [places.get(block, 0) for block, _ in blocks]  # the rest has what several blocks share
    if any(number > TRACED_PER_KIND for number in Counter(kinds).values()):
        model = shallow(model)
    with _ranks(setup) as mesh, chunks_of(setup.device), values_unknown(), quiet():
        if mesh is not None:
            axis = TensorParallel(mesh, torch.device("cpu"))
            axis.trust()
            axis.split(model)
        trace = Trace(model, setup, loss or loss_of_tokens, places)
        dropped, kept = trace.run_forward(), trace.run(backward=True)
    parts, order = _assemble(dropped, kept, trace, kinds, full)
    return Program(name, units, buffers, tuple(parts), tuple(order), len(blocks))


def units_of(model: nn.Module, tp: int, compute: torch.dtype) -> tuple[tuple[Unit, ...], dict[str, int], int]:
    """Return the units that the engine would make of a model, the place of each by name, and the bytes of its buffers.

    Raises ValueError for a model that this tensor-parallel degree does not split.
    """
    found: list[Unit] = []
    places: dict[str, int] = {}
    same: dict[Unit, Unit] = {}
    widths, cuts = widths_of(model, compute), planned_cuts(model, tp)
    for unit, named in claim_parameters(model, find_units(model)):
        if named:
            parameters = []
            for name, p in named:
                own, cut = name.removeprefix(f"{unit.name}."), cuts[name].dim if name in cuts else None
                parameters.append(Parameter(own, tuple(p.shape), cut, p.requires_grad, widths[p.dtype]))
            places[unit.name] = len(found)
            made = Unit("block" if unit.name else "rest", tuple(parameters))
            found.append(same.setdefault(made, made))
    return tuple(found), places, sum(b.numel() * b.element_size() for b in model.buffers())


# -- blocks ------------------------------------------------------------------------------------------------------------


def shallow(model: nn.Module) -> nn.Module:
    """Return the model with only the first blocks of each kind, in each list of modules; it is changed in place."""
    for name, blocks in list(_lists(model)):
        seen: Counter[Any] = Counter()
        kept = []
        for at, block in enumerate(blocks):
            kind = kind_of(f"{name}.{at}", block)
            seen[kind] += 1
            if seen[kind] <= TRACED_PER_KIND:
                kept.append(block)
        if len(kept) < len(blocks):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.ModuleList(kept))
    return model


def _lists(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    """Yield the outermost lists of modules: those inside a block belong to it."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield f"{prefix}{name}", child
        else:
            yield from _lists(child, f"{prefix}{name}.")


@contextlib.contextmanager
def _ranks(setup: Setup) -> Iterator[Any]:
    """Yield the mesh of tensor-parallel ranks, in a process group that moves nothing; None without."""
    if setup.tp == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setup.ranks)
    try:
        yield open_axes(setup.tp, None, torch.device("cpu"))[1]
    finally:
        dist.destroy_process_group()


# -- the whole model ---------------------------------------------------------------------------------------------------


def _assemble(
    dropped: Run, kept: Run, trace: Trace, kinds: list[Any], units: list[int]
) -> tuple[list[Part], list[tuple[int, int, int]]]:
    """Return the different parts, and of each block of the whole model its unit, its part and what comes after it."""
    if _allocated(dropped) != _allocated(kept):
        raise RuntimeError("two runs of its forward allocate differently")
    last = 2 * len(kept.called)
    parts = [_part(dropped, kept, number) for number in range(last + 1)]
    if not last:  # no block: the first part has all, and nothing comes after it
        return [*parts, Part()], []
    number = Counter(kinds)
    if max(number.values()) <= TRACED_PER_KIND:  # all of them ran, in whatever order
        place = dict(zip(trace.kinds, units, strict=True))
        return parts, [(place[name], 2 * call + 1, 2 * call + 2) for call, name in enumerate(kept.called)]
    traced: defaultdict[Any, list[int]] = defaultdict(list)
    for call, name in enumerate(kept.called):
        traced[trace.kinds[name]].append(call)
    seen: Counter[Any] = Counter()
    order = []
    for kind, unit in zip(kinds, units, strict=True):
        calls, at = traced[kind], seen[kind]
        seen[kind] += 1
        if not calls:  # it has no part in this loss, as images have none in that of a text
            continue
        if len(calls) != min(TRACED_PER_KIND, number[kind]):
            raise RuntimeError("its blocks are not called once each, in the order in which it has them")
        # The one before the last stands apart: a sum of gradients, such as that of a table which all blocks add, begins
        # in the last block, and those before add to what another has added.
        left = number[kind] - 1 - at
        call = calls[at] if number[kind] <= TRACED_PER_KIND or at == 0 else calls[-1 - left if left < 2 else 1]
        order.append((unit, 2 * call + 1, 2 * call + 2))
    return parts, order


def _allocated(run: Run) -> list[tuple[int, Event]]:
    return [(part, event) for part, events in sorted(run.forward.items()) for event in events if event[0] == ALLOCATE]


def _part(dropped: Run, kept: Run, number: int) -> Part:
    work = dropped.work[number]
    saves = sum(event[0] == SAVE for event in dropped.forward[number])
    again = [(keeps, counts) for before, keeps, counts in work if before < saves]
    return Part(
        forward=tuple(dropped.forward[number]),
        backward=tuple(kept.backward[number]),
        input=kept.inputs.get(number),
        output=kept.outputs.get(number),
        arguments=kept.arguments.get(number, ()),
        copied_nbytes=kept.copied_nbytes.get(number, 0),
        long_lived=tuple(sorted(dropped.long_lived[number] | kept.long_lived[number])),
        gradient=kept.gradients.get(number),
        computed=sum((counts for _, _, counts in work), Work()),
        computed_back=kept.work_back[number],
        repeated=sum((counts for _, counts in again), Work()),
        cheap=sum((counts for keeps, counts in again if not keeps), Work()),
    )
