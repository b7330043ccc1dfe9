"""Relayout: parameters that are unfrozen after `shard` get gradients and optimizer states, and move to another flat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from offload.store import Store
from zerocli.engine.grouped import Shards
from zerocli.engine.guards.aliases import Aliases
from zerocli.engine.states.held import joined, whole_array, whole_parameters, write_held
from zerocli.engine.units.unit import Flat, Unit
from zerocli.errors import Refused

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


def unfrozen(units: list[Unit]) -> list[Unit]:
    """Return the units with a parameter that was frozen when it was laid out and now requires a gradient."""
    with torch._C.DisableTorchFunctionSubclass():  # released parameters dispatch to Python, which is slow
        return [
            unit
            for unit in units
            if any(p.requires_grad for flat in unit.flats if not flat.trainable for p in flat.parameters)
        ]


@torch.no_grad()
def refit(engine: Engine, changed: list[Unit]) -> None:
    """Lay out the `changed` units again; values and states stay, states of unfrozen parameters start at zero.

    Every rank calls this before the same forward. Parameters that were trained before keep their states, even while
    they are frozen.
    """
    if engine.has_gradients:
        raise Refused(
            "a parameter was unfrozen between two backward passes of one step: switch requires_grad after step()"
        )
    frozen = [flat for unit in changed for flat in unit.flats if not flat.trainable]
    names = [e.name for f in frozen for e, p in zip(f.layout.entries, f.parameters, strict=True) if p.requires_grad]
    engine.agreement.meet(
        "forward with unfrozen parameters",
        lambda: names,
        lambda: f"called forward after unfreezing {names[0]} ({len(names)} parameters in all)",
    )
    engine.synchronize()
    engine.reducer.close()
    _lay_out_again(engine, changed)
    engine.counts.add(entry.name for unit in changed for flat in unit.trainable for entry in flat.layout.entries)


def _lay_out_again(engine: Engine, changed: list[Unit]) -> None:
    model, builder, state_names, shards = engine.model, engine.builder, engine.rule.state_names, engine.shards
    saved: _Saved = {}
    aliases = Aliases(model, engine.device)
    aliases.find_in(flat for unit in changed for flat in unit.flats)
    for unit in changed:
        for flat in unit.flats:
            saved.update(_whole_values(flat, state_names, shards))
            _give_back(flat)
        trained = {id(p) for flat in unit.trainable for p in flat.parameters}
        names = {
            id(p): e.name for flat in unit.flats for e, p in zip(flat.layout.entries, flat.parameters, strict=True)
        }
        named = [(names[id(p)], p) for p in model.parameters() if id(p) in names]
        unit.flats.clear()
        builder.lay_out(unit, named, lambda p, trained=trained: p.requires_grad or id(p) in trained)  # type: ignore[misc]

    def values(flat: Flat) -> torch.Tensor:
        return joined(flat, [saved[id(p)][0] for p in flat.parameters], shards.device)

    builder.place(engine.units, [flat for unit in changed for flat in unit.flats], values)
    for unit in changed:
        for flat in unit.trainable:
            for name in state_names:
                parts = [saved[id(p)][1].get(name) for p in flat.parameters]
                whole = joined(flat, parts, shards.device)
                write_held(flat, name, whole[flat.held.start : flat.held.stop])
    aliases.redirect(engine.flats())


_Saved = dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]]


def _whole_values(flat: Flat, state_names: Sequence[str], shards: Shards) -> _Saved:
    """Return each parameter's whole value and optimizer states, on the CPU, by the parameter's id. Collective."""
    values = flat.views(whole_parameters(shards, flat))
    kept = state_names if flat.trainable else ()
    arrays = {name: flat.views(whole_array(shards, flat, name)) for name in kept}
    return {
        id(parameter): (values[i].clone(), {name: views[i].clone() for name, views in arrays.items()})
        for i, parameter in enumerate(flat.parameters)
    }


def _give_back(flat: Flat) -> None:
    """Free a flat's memory on other tiers; its device memory is freed with the last reference."""
    stores: list[Store | None] = [flat.param_store, flat.gradient.store, flat.record.store if flat.record else None]
    for store in stores:
        if store is not None:
            store.free()
