"""Relayout: parameters that are unfrozen after `shard` get gradients and optimizer states, and move to another flat."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offload import Store
from zerocli.engine import states
from zerocli.engine.unit import Flat, Unit
from zerocli.errors import Refused

if TYPE_CHECKING:
    from zerocli.engine.build import Builder
    from zerocli.engine.engine import Engine


def unfrozen(engine: Engine) -> list[Unit]:
    """Return the units with a parameter that was frozen when it was laid out and now requires a gradient."""
    with torch._C.DisableTorchFunctionSubclass():  # released parameters dispatch to Python, which is slow
        return [
            unit
            for unit in engine.units
            if any(p.requires_grad for flat in unit.flats if not flat.trainable for p in flat.parameters)
        ]


@torch.no_grad()
def refit(engine: Engine, builder: Builder) -> None:
    """Lay out units with unfrozen parameters again; values and states stay, states of unfrozen ones start at zero.

    Every rank calls this before the same forward. Parameters that were trained before keep their states, even while
    they are frozen.
    """
    changed = unfrozen(engine)
    if engine.has_gradients:
        raise Refused(
            "a parameter was unfrozen between two backward passes of one step: switch requires_grad after step()"
        )
    engine.synchronize()
    saved = {}
    for unit in changed:
        for flat in unit.flats:
            saved.update(_whole_values(engine, flat))
            _give_back(flat)
        trained = {id(p) for flat in unit.trainable for p in flat.parameters}
        names = {
            id(p): e.name for flat in unit.flats for e, p in zip(flat.layout.entries, flat.parameters, strict=True)
        }
        named = [(names[id(p)], p) for p in engine.model.parameters() if id(p) in names]
        unit.flats.clear()
        builder.lay_out(unit, named, lambda p, trained=trained: p.requires_grad or id(p) in trained)  # type: ignore[misc]
    engine.reducer.close()
    builder.place(
        engine.units, [flat for unit in changed for flat in unit.flats], lambda flat: _fill(engine, flat, saved)
    )
    for unit in changed:
        for flat in unit.trainable:
            for name in engine.rule.state_names:
                whole = _joined(flat, [state.get(name) for state in (saved[id(p)][1] for p in flat.parameters)], engine)
                states.write_held(flat, name, whole[flat.held.start : flat.held.stop])
    engine.counts.add(entry.name for unit in changed for flat in unit.trainable for entry in flat.layout.entries)
    engine.connect()


_Saved = dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]]


def _whole_values(engine: Engine, flat: Flat) -> _Saved:
    """Return each parameter's whole value and optimizer states, on the CPU, by the parameter's id."""
    values = flat.views(states.whole_parameters(engine, flat))
    arrays: dict[str, list[torch.Tensor]] = {}
    if flat.trainable:
        for name in engine.rule.state_names:
            arrays[name] = flat.views(states.join_parts(engine, flat, states.read_held(flat, name, engine.device)))
    return {
        id(parameter): (values[i].clone(), {name: views[i].clone() for name, views in arrays.items()})
        for i, parameter in enumerate(flat.parameters)
    }


def _fill(engine: Engine, flat: Flat, saved: _Saved) -> torch.Tensor:
    return _joined(flat, [saved[id(p)][0] for p in flat.parameters], engine)


def _joined(flat: Flat, values: list[torch.Tensor | None], engine: Engine) -> torch.Tensor:
    """Return a whole flat of these values, in fp32 if floating-point; zero for missing values."""
    dtype = torch.float32 if flat.dtype.is_floating_point else flat.dtype
    whole = torch.zeros(flat.layout.total, dtype=dtype, device=engine.device)
    for view, value in zip(flat.views(whole), values, strict=True):
        if value is not None:
            view.copy_(value)
    return whole


def _give_back(flat: Flat) -> None:
    """Free a flat's memory on other tiers; its device memory is freed with the last reference."""
    stores: list[Store | None] = [flat.param_store, flat.grad_store, flat.record.store if flat.record else None]
    for store in stores:
        if store is not None:
            store.free()
