"""The layout of one rank's model states, as in the engine, and the bytes that tiers allocate for their pieces."""

from __future__ import annotations

import itertools

from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout import constants
from zerocli.layout.flats import FlatSpec, flat_spec, place
from zerocli.layout.shards import lay_out
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Parameter, Shape, Unit
from zerocli.plan.traced import Traced

WHOLE = 2
"""Added to the optimizer group of parameters that are replicated over tensor-parallel ranks."""


def plan_flats(shape: Shape | Traced, setup: Setup) -> list[FlatSpec]:
    """Return the flats of all units in the engine's order; raise UserError if no budget is left for a piece."""
    flats = [flat for unit, times in shape.units() for flat in _flats_of(unit, setup) * times]
    try:
        return place(flats, setup.placement(), setup.sizing)
    except ValueError as error:
        raise UserError(str(error), hint="a tier without a budget at the end", exit_code=DOES_NOT_FIT) from error


def by_unit(shape: Shape, flats: list[FlatSpec], setup: Setup) -> list[list[FlatSpec]]:
    """Return the flats of `plan_flats` unit by unit: the first unit, each block, and a head of its own."""
    found, left = [], iter(flats)
    for unit, times in shape.units():
        number = len(_kinds(unit, setup))
        found += [list(itertools.islice(left, number)) for _ in range(times)]
    return found


def _kinds(unit: Unit, setup: Setup) -> dict[tuple[bool, int], list[Parameter]]:
    """Return a unit's parameters by (trainable, bytes per element): each kind has a flat."""
    kinds: dict[tuple[bool, int], list[Parameter]] = {}
    for parameter in unit.parameters:
        kinds.setdefault((parameter.trainable, parameter.width or setup.width), []).append(parameter)
    return kinds


def _flats_of(unit: Unit, setup: Setup) -> list[FlatSpec]:
    """Return the flats of one unit: trainable parameters apart from frozen ones, each dtype by itself."""
    found = []
    for (trainable, width), members in _kinds(unit, setup).items():
        places = [(p.name, p.local(setup.tp), _group(p, setup.tp) if trainable else 0) for p in members]
        layout = lay_out(places, setup.dp)
        found.append(flat_spec(unit.kind, layout, width, setup.zero, setup.dp, trainable=trainable))
    return found


def _group(parameter: Parameter, tp: int) -> int:
    """Return the optimizer group: with or without weight decay, split or replicated over tensor-parallel ranks."""
    whole = tp > 1 and parameter.local(tp) == parameter.shape
    return (0 if len(parameter.shape) >= 2 else 1) + WHOLE * whole


def arenas(sizes: list[int]) -> int:
    """Return the bytes that host memory tiers map and pin for blocks of these sizes, taken in this order."""
    mapped, rests = 0, [0]
    for size in sizes:
        size = -(-size // constants.PAGE_NBYTES) * constants.PAGE_NBYTES
        found = next((at for at, rest in enumerate(rests) if rest >= size), None)
        if found is not None:
            rests[found] -= size
            continue
        if 8 * size >= constants.ARENA_NBYTES:
            mapped += size
            continue
        arena = max(size, min(constants.ARENA_NBYTES, max(constants.FIRST_ARENA_NBYTES, mapped)))
        mapped += arena
        rests.append(arena - size)
    return mapped


def pages(sizes: list[int]) -> int:
    """Return the bytes of host memory that blocks of these sizes take where nothing is pinned: the pages they use."""
    return sum(-(-size // constants.PAGE_NBYTES) * constants.PAGE_NBYTES for size in sizes)


def swap(sizes: list[int]) -> int:
    """Return the bytes that a swap file grows to for blocks of these sizes, taken in this order."""
    size = free = 0
    unit, page = constants.UNIT_NBYTES, constants.PAGE_NBYTES
    for nbytes in sizes:
        missing = -(-nbytes // unit) * unit - free
        if missing > unit:
            size, free = size + missing, free + missing
        needed = -(-nbytes // page) * page
        if free < needed:
            size, free = size + constants.GROW_NBYTES, free + constants.GROW_NBYTES
        free -= needed
    return size
