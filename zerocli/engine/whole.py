"""Whole parameters and gradients for user code, gathered from all ranks and tiers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerocli.engine import states
from zerocli.engine.unit import Flat
from zerocli.errors import Refused, closest

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


@contextlib.contextmanager
def gathered(engine: Engine, what: Sequence[str | nn.Parameter | nn.Module], write: bool) -> Iterator[None]:
    """See `Engine.gathered`."""
    flats = _chosen(engine, what)
    gatherer = engine.gatherer
    with contextlib.ExitStack() as stack:
        for unit in dict.fromkeys(flat.unit for flat in flats):
            stack.enter_context(gatherer.pinned(unit))
            gatherer.need(unit)
            if torch.is_grad_enabled():
                engine.hooks.cannot_follow(unit)
        for flat in flats:
            flat.note_values()
        changed: list[str] = []
        try:
            with gatherer.saving():
                yield
            for flat in flats:
                if write:
                    _keep(engine, flat)
                elif flat.resident is None:
                    changed += flat.changed_while_whole()
        finally:
            for flat in flats:
                if flat.resident is None:
                    flat.note_values()
    gatherer.release_all()
    if write:
        engine.hooks.generation += 1
    if changed:
        raise Refused(
            f"{changed[0]} was changed inside engine.gathered(...): pass write=True to keep the change on every rank"
        )


@torch.no_grad()
def _keep(engine: Engine, flat: Flat) -> None:
    """Set a gathered flat on every rank to rank 0's values."""
    values = flat.resident if flat.resident is not None else flat.buffer
    assert values is not None
    engine.collectives.broadcast(values)
    states.adopt(flat, values, engine.device)
    flat.note_values()


def _chosen(engine: Engine, what: Sequence[str | nn.Parameter | nn.Module]) -> list[Flat]:
    """Return the flats that hold the given parameters, in the same order on every rank."""
    if not what:
        return list(engine.flats())
    wanted: set[int] = set()
    named = {
        entry.name: p for flat in engine.flats() for entry, p in zip(flat.layout.entries, flat.parameters, strict=True)
    }
    aliases = dict(engine.model.named_parameters(remove_duplicate=False))
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
    return [flat for flat in engine.flats() if any(id(p) in wanted for p in flat.parameters)]


def _unknown(name: str, known: dict[str, nn.Parameter]) -> str:
    meant = closest(name, known)
    return f"the model has no parameter {name!r}" + (f"; did you mean {meant!r}?" if meant else "")


@torch.no_grad()
def gradient(engine: Engine, name: str) -> torch.Tensor | None:
    """See `Engine.grad`."""
    aliases = dict(engine.model.named_parameters(remove_duplicate=False))
    if name not in aliases:
        raise Refused(_unknown(name, aliases))
    if not engine.has_gradients:
        raise Refused(f"there is no gradient of {name}: it exists between engine.backward(loss) and engine.step()")
    for flat in engine.trainable():
        for entry, parameter in zip(flat.layout.entries, flat.parameters, strict=True):
            if parameter is aliases[name]:
                if not engine.got_gradient(flat, parameter):
                    return None
                whole = _whole_gradient(engine, flat)[entry.offset : entry.offset + entry.numel].view(entry.shape)
                joined = engine.tensor_parallel.join(entry.name, whole.float())
                return joined / float(engine.passes.divisor)
    return None


def _whole_gradient(engine: Engine, flat: Flat) -> torch.Tensor:
    """Return a flat's gradient on the CPU, summed over the ranks but not yet divided."""
    if flat.grad_full is not None and not engine.reducer.reduced:
        total = flat.grad_full.float()
        engine.collectives.all_reduce(total).wait()
        engine.collectives.take_nbytes()
        return total.cpu()
    held = flat.grad
    if held is None:
        assert flat.grad_store is not None
        held = torch.empty(flat.held.numel, dtype=flat.grad_store.dtype, device=engine.device)
        flat.grad_store.fetch(0, held).synchronize()
    found = states.join_parts(engine, flat, held)
    engine.collectives.take_nbytes()
    return found
