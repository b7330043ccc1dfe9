"""Moves: states go to other tiers between two steps, one piece at a time, and every value stays what it is.

A piece is written to its new tier before it leaves its old one, so a tier holds at most one piece beside what the
placement before or the one after puts there. A piece for which one rank has no room stays where it was on all ranks:
the order in which they gather updated parameters depends on which states are offloaded. What was made for the tiers of
the flats (gather buffers, buckets, slots of the update) is made again afterwards, and keeps the orders that the ranks
have agreed on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from offload.placement import HBM, KINDS, Placement, per_rank
from offload.store import Store
from tiers.errors import TierFull
from zerocli.config.placement import placement_at, read_placement
from zerocli.engine.guards.accept import refuse_scripts
from zerocli.engine.guards.aliases import Aliases
from zerocli.engine.states.held import read_held
from zerocli.engine.units.master import REMAINDER
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.errors import Refused
from zerocli.layout.flats import FlatSpec, in_rooms, place
from zerocli.layout.moves import Move, moves_between
from zerocli.layout.recompute import Recompute
from zerocli.ranks.exchange import gather_padded

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


@torch.no_grad()
def move(engine: Engine, placement: Placement | str, recompute: Recompute | None) -> list[str]:
    """See `Engine.move`; all ranks have met, and no update is pending."""
    if engine.has_gradients:
        raise Refused("states were to move between backward and step(): call engine.move(...) after step()")
    if recompute is not None and engine.hooks.blocks.on:
        raise Refused("compiled blocks keep what they recompute: engine.move(placement) without recompute")
    offload = read_placement(placement)
    placed = per_rank(placement_at(offload, engine.settings.stage), engine.local_world)
    flats = list(engine.flats())
    before = [dataclasses.replace(flat.spec, room=0) for flat in flats]
    after = place(before, placed, engine.sizing)
    _refuse_scripts(engine, flats, after)
    engine.agreement.refuse()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    moves = moves_between(before, after, engine.sizing)
    for number in sorted({each.flat for each in moves}):
        engine.updater.chunks.before_update(flats[number])  # a checkpoint may still be reading it
    aliases = Aliases(engine.model, engine.device)
    aliases.find_in([flats[each.flat] for each in moves if each.kind == "parameters"])
    before_update, gatherer, reducer = engine.updater.chunks.before_update, engine.gatherer, engine.reducer
    engine.hooks.parameters_changed(flats)  # a loss that was computed before cannot gather them where they were
    engine.activations.stack.close()
    reducer.close()
    refused: dict[Move, str] = {}
    try:
        for each in moves:
            flat = flats[each.flat]
            try:
                with engine.events.move(flat.unit):
                    _MOVE[each.kind](engine, flat, each.target)
            except (TierFull, torch.OutOfMemoryError) as error:
                refused[each] = str(error).partition("\n")[0]
        for each in _refused_elsewhere(engine, moves, refused):
            _MOVE[each.kind](engine, flats[each.flat], each.source)
            refused[each] = "another rank has no room for them"
    finally:
        _settle(engine, flats)
        aliases.redirect(flats)
        engine.placement = engine.builder.placement = placed
        asked = engine.settings.recompute if recompute is None else recompute
        engine.settings = dataclasses.replace(engine.settings, offload=offload, recompute=asked)
        engine.tiers.close_unused()
        engine.connect()
        engine.gatherer.follow(gatherer)
        engine.reducer.follow(reducer)
        engine.updater.close()
        engine.open_updater()
        engine.updater.chunks.before_update = before_update
        recomputed = engine.recomputed_units()
        engine.open_activations(recomputed)
        engine.hooks.recompute(recomputed)
    return [f"the {m.kind} of {flats[m.flat].unit.title} stay on {m.source}: {why}" for m, why in refused.items()]


def _refused_elsewhere(engine: Engine, moves: Sequence[Move], refused: Collection[Move]) -> list[Move]:
    """Return the moves that this rank has made and another rank had no room for. Collective."""
    codes = torch.tensor([-1, *map(_code, refused)], dtype=torch.int64, device=engine.device)
    everyone, _ = gather_padded(codes, engine.gather_control, padding=-1)
    anywhere = set(everyone.flatten().tolist())
    return [each for each in moves if each not in refused and _code(each) in anywhere]


def _code(move: Move) -> int:
    """Return a number that stands for the piece, the same on all ranks."""
    return move.flat * len(KINDS) + KINDS.index(move.kind)


def _refuse_scripts(engine: Engine, flats: list[Flat], after: list[FlatSpec]) -> None:
    """Raise Refused if parameters would be released that compiled TorchScript reads."""
    released = {flat.unit for flat, spec in zip(flats, after, strict=True) if not spec.resident(engine.sizing)}
    refuse_scripts([(unit.name, unit.module) for unit in engine.units if unit in released])


def _settle(engine: Engine, flats: list[Flat]) -> None:
    """Give each flat the gather buffers of its size, now that all are where they stay."""
    specs = in_rooms([dataclasses.replace(flat.spec, room=0) for flat in flats], engine.sizing)
    for flat, spec in zip(flats, specs, strict=True):
        flat.spec = spec


def _move_parameters(engine: Engine, flat: Flat, tier: str) -> None:
    old = flat.param_store
    if tier == HBM:
        assert old is not None
        kept = torch.empty(old.numel, dtype=old.dtype, device=engine.device)
        old.fetch(0, kept).synchronize()
        _placed(flat, "parameters", tier)
        flat.param_store, flat.shard = None, kept
        if flat.spec.resident(engine.sizing):
            flat.resident = kept
            flat.shard = kept[flat.own.start : flat.own.stop]
            flat.attach(kept, flat.views(kept))
            flat.note_values()
    else:
        about = old if old is not None else flat.shard
        assert about is not None
        numel = about.numel if isinstance(about, Store) else about.numel()
        store = engine.builder.open_parameters(flat, tier, numel, about.dtype)
        with _freed_on_error(store):
            if isinstance(about, Store):
                store.copy_from(about, engine.sizing.chunk)
            else:
                store.put(0, about).synchronize()
        _placed(flat, "parameters", tier)
        if flat.resident is not None:
            flat.detach()
        flat.param_store, flat.resident, flat.shard = store, None, None
    if old is not None:
        old.free()
    if flat.trainable and flat.dtype == torch.float32:  # the parameters are the master
        flat.master = flat.held_parameters


def _move_states(engine: Engine, flat: Flat, tier: str) -> None:
    old, device = flat.record, engine.device
    if tier == HBM:
        assert old is not None
        states = {name: old.read(name, device) for name in old.arrays}
        _placed(flat, "optimizer", tier)
        flat.record = None
        flat.master = states.pop(MASTER, flat.master)
        flat.remainder = states.pop(REMAINDER, None)
        flat.states = states
    else:
        record = engine.builder.open_states(flat, tier)
        with _freed_on_error(record.store):
            if old is not None:
                record.copy_from(old)
            else:
                record.fill({name: read_held(flat, name, device) for name in record.arrays})
        _placed(flat, "optimizer", tier)
        flat.record, flat.states, flat.remainder = record, {}, None
        if MASTER in record.arrays:
            flat.master = None
    if old is not None:
        old.store.free()


def _move_gradient(engine: Engine, flat: Flat, tier: str) -> None:
    store = None if tier == HBM else engine.builder.open_gradient(flat, tier)
    flat.gradient.move(store, engine.device)
    _placed(flat, "gradients", tier)


@contextlib.contextmanager
def _freed_on_error(store: Store) -> Iterator[None]:
    """Free a new store whose filling failed: what it was to hold stays where it was."""
    try:
        yield
    except BaseException:
        store.free()
        raise


def _placed(flat: Flat, kind: str, tier: str) -> None:
    flat.spec = dataclasses.replace(flat.spec, tiers={**flat.spec.tiers, kind: tier})


_MOVE: dict[str, Callable[[Engine, Flat, str], None]] = {
    "parameters": _move_parameters,
    "optimizer": _move_states,
    "gradients": _move_gradient,
}
