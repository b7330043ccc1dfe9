"""Whole parameters and gradients for user code, gathered from all ranks and tiers, and whole copies of a model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocli.engine.comm import Collectives
from zerocli.engine.states.held import adopt, join_parts
from zerocli.engine.units.unit import Flat
from zerocli.errors import Refused, closest

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


@contextlib.contextmanager
def gathered(engine: Engine, flats: list[Flat], write: bool) -> Iterator[None]:
    """See `Engine.gathered`. After an exception in the body too: what it changed before is there in plain torch."""
    gatherer, error = engine.gatherer, None
    if encoded := [flat for flat in flats if flat.codec and write]:
        raise Refused(
            f"{encoded[0].layout.entries[0].name} is stored as {encoded[0].codec}, and what is written to it would be "
            "rounded: name the parameters to change, engine.gathered(NAME, write=True), or shard without base"
        )
    with contextlib.ExitStack() as stack:
        for unit in dict.fromkeys(flat.unit for flat in flats):
            stack.enter_context(gatherer.pinned(unit))
            gatherer.need(unit)
            if torch.is_grad_enabled():  # the unit's gradients may come from the body
                engine.hooks.cannot_follow(unit)
        for flat in flats:
            flat.note_values()
        changed: list[str] = []
        try:
            try:
                with gatherer.saving():
                    yield
            except Exception as raised:
                error = raised
            for flat in flats:
                if write:
                    _keep(flat, engine.collectives)
                elif flat.resident is None:
                    changed += flat.changed_while_whole()
        finally:
            for flat in flats:
                if flat.resident is None:
                    flat.note_values()
    gatherer.release_all()
    if changed:
        raise Refused(
            f"{changed[0]} was changed inside engine.gathered(...): pass write=True to keep the change on every rank"
        ) from error
    if error is not None:
        raise error


@torch.no_grad()
def _keep(flat: Flat, collectives: Collectives) -> None:
    """Set a gathered flat on every rank to rank 0's values."""
    flat.restore_moved()
    values = flat.resident if flat.resident is not None else flat.buffer
    assert values is not None
    collectives.broadcast(values)
    adopt(flat, values, collectives.device)
    flat.note_values()


def choose(model: nn.Module, flats: list[Flat], what: Sequence[str | nn.Parameter | nn.Module]) -> list[Flat]:
    """Return the flats that hold the given parameters, or all, in the same order on every rank."""
    if not what:
        return flats
    wanted: set[int] = set()
    named = {entry.name: p for flat in flats for entry, p in zip(flat.layout.entries, flat.parameters, strict=True)}
    aliases = dict(model.named_parameters(remove_duplicate=False))
    for each in what:
        if isinstance(each, nn.Module):
            wanted.update(id(p) for p in each.parameters())
        elif isinstance(each, str):
            found = named.get(each, aliases.get(each))
            if found is None:
                raise Refused(_unknown(each, aliases))
            wanted.add(id(found))
        else:
            wanted.add(id(each))
    return [flat for flat in flats if any(id(p) in wanted for p in flat.parameters)]


def _unknown(name: str, known: dict[str, nn.Parameter]) -> str:
    meant = closest(name, known)
    return f"the model has no parameter {name!r}" + (f"; did you mean {meant!r}?" if meant else "")


@torch.no_grad()
def gradient(engine: Engine, name: str) -> torch.Tensor | None:
    """See `Engine.grad`."""
    collectives, reducer = engine.collectives, engine.reducer
    aliases = dict(engine.model.named_parameters(remove_duplicate=False))
    if name not in aliases:
        raise Refused(_unknown(name, aliases))
    if not engine.has_gradients:
        raise Refused(f"there is no gradient of {name}: it exists between engine.backward(loss) and engine.step()")
    for flat in engine.trainable():
        for index, (entry, parameter) in enumerate(zip(flat.layout.entries, flat.parameters, strict=True)):
            if parameter is aliases[name]:
                mine = torch.tensor(float(index in reducer.received(flat)), device=collectives.device)
                if not collectives.sum_control(mine).item():
                    return None
                found = _whole_gradient(engine, flat)
                whole = found[entry.offset : entry.offset + entry.numel].view(entry.shape)
                return engine.tensor_parallel.join(entry.name, whole.float()) / float(engine.passes.divisor)
    return None


def _whole_gradient(engine: Engine, flat: Flat) -> torch.Tensor:
    """Return a flat's gradient on the CPU, summed over the ranks but not yet divided."""
    if flat.gradient.whole is not None and not engine.reducer.reduced:
        total = flat.gradient.whole.to(torch.float32, copy=True)  # later passes add to this rank's own sum
        engine.collectives.all_reduce(total).wait()
        engine.forget_traffic()
        return total.cpu()
    held = flat.gradient.read(engine.device)
    if not engine.reducer.reduced:  # summed in this rank's group only
        held = held.clone()
        engine.replicas.all_reduce(held).wait()
    found = join_parts(engine.shards, flat, held)
    engine.forget_traffic()
    return found


def copy_module(
    model: nn.Module, values: Mapping[int, torch.Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a deep copy of `model` with these parameters, given by id, and without what sharding added to it.

    No parameter's memory is copied: each is replaced by its new one. Ties, requires_grad and hooks are kept. `dtype`
    applies to floating-point parameters and buffers. By default all parameters are fp32, also frozen ones that are kept
    in bf16 or fp16, so that the copy computes in one dtype; buffers keep their dtype.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        value = values.get(id(p), p)  # one that was added after shard is whole
        # Always a copy: the values belong to the caller.
        new = value.detach().to(device, _dtype(value, dtype or torch.float32), copy=True)
        memo[id(p)] = nn.Parameter(new, requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = b.detach().to(device, _dtype(b, dtype), copy=True)
    return copy.deepcopy(model, memo)  # a sharded module's copy has its original class


def _dtype(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype
