"""The layout of one rank's model states, as in the engine, and the bytes that tiers allocate for their pieces."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from offload.placement import KINDS, Spill
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout import buffers, constants
from zerocli.layout.codecs import is_encoded
from zerocli.layout.flats import FlatSpec, Sizing, align_of, flat_spec, in_rooms, place_alike
from zerocli.layout.shards import lay_out
from zerocli.plan.blocks.shape import Parameter, Shape, Unit
from zerocli.plan.memory.replayable import Replayable
from zerocli.plan.setup import Setup

T = TypeVar("T")
WHOLE = 2
"""Added to the optimizer group of parameters that are replicated over tensor-parallel ranks."""


class Flats(list[FlatSpec]):
    """The flats of all units in the engine's order, and the same as runs of equal units.

    Flats of equal units whose pieces are in the same tiers are one object, so a deep model has few.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[tuple[FlatSpec, ...], int]] = []
        """(flats of one unit, number of consecutive units)."""
        self._pieces: dict[Sizing, dict[tuple[str, str], list[int]]] = {}

    def add(self, unit: tuple[FlatSpec, ...], times: int) -> None:
        self.runs.append((unit, times))
        self += unit * times

    @cached_property
    def distinct(self) -> list[FlatSpec]:
        return list({id(flat): flat for unit, _ in self.runs for flat in unit}.values())

    def total(self, size: Callable[[FlatSpec], int]) -> int:
        """Return the sum of a size of every flat."""
        return sum(times * size(flat) for unit, times in self.runs for flat in unit)

    def sizes(self, of: Callable[[FlatSpec], list[T]], most: int = sys.maxsize) -> list[T]:
        """Return sizes of every flat, in order; of each run those of its first `most` units."""
        found: list[T] = []
        for unit, times in self.runs:
            found += [size for flat in unit for size in of(flat)] * min(times, most)
        return found

    def pieces(self, sizing: Sizing, tier: str) -> dict[str, list[int]]:
        """Return the block sizes of model states on a tier by category, in order of allocation."""
        if sizing not in self._pieces:
            found: dict[tuple[str, str], list[int]] = defaultdict(list)
            for unit, times in self.runs:
                own: dict[tuple[str, str], list[int]] = defaultdict(list)
                for spec in (spec for flat in unit for spec in buffers.states(flat, sizing)):
                    own[spec.tier, spec.category].append(spec.nbytes)
                for key, blocks in own.items():
                    found[key] += blocks * times
            for (_, category), blocks in found.items():
                if category == "gradients":
                    blocks.reverse()  # in the order of backward
            self._pieces[sizing] = found
        return {category: blocks for (where, category), blocks in self._pieces[sizing].items() if where == tier}

    def tier_objects(self, sizing: Sizing, tier: str) -> tuple[list[int], list[int]]:
        """Return the block sizes of parameters and of other states on a tier: each have a tier object of their own."""
        found = self.pieces(sizing, tier)
        return found.get("parameters", []), found.get("optimizer_states", []) + found.get("gradients", [])

    @property
    def units(self) -> list[tuple[FlatSpec, ...]]:
        """The flats of each unit, in order."""
        return [unit for unit, times in self.runs for unit in [unit] * times]

    def enough(self, sizing: Sizing) -> list[tuple[FlatSpec, ...]]:
        """Return fewer units of each run, such that buffers for gathering, reducing and updating are the same.

        Their numbers are bounded, and chunks of the update take turns in its slots.
        """
        slots = constants.NUM_SLOTS
        least = -(-max(constants.MAX_BUCKETS, sizing.gather_buffers + 1) // slots) * slots
        chosen: list[tuple[FlatSpec, ...]] = []
        for unit, times in self.runs:
            chosen += [unit] * (times if times < least else least + times % slots)
        return chosen


def plan_flats(model: Shape | Replayable, setup: Setup) -> Flats:
    """Return the first rank's flats of all units in the engine's order; UserError if no budget is left for a piece."""
    sizing = setup.sizing
    placement = setup.placement()
    spills = {kind: Spill(kind, placement.of(kind)) for kind in KINDS}
    flats = Flats()
    members: dict[int, list[FlatSpec]] = {}
    known: dict[tuple[int, str], tuple[FlatSpec, ...]] = {}
    try:
        for unit, times in model.units:  # of equal ones each is the same object
            if id(unit) not in members:
                members[id(unit)] = _flats_of(unit, setup)
            for placed, number in place_alike(members[id(unit)], times, spills, sizing):
                tiers = str([flat.tiers for flat in placed])
                flats.add(known.setdefault((id(unit), tiers), tuple(placed)), number)
    except ValueError as error:
        raise UserError(str(error), hint="a tier without a budget at the end", exit_code=DOES_NOT_FIT) from error
    shared, distinct = Flats(), flats.distinct
    changed = {id(old): new for old, new in zip(distinct, in_rooms(distinct, sizing), strict=True)}
    again = {id(unit): tuple(changed[id(flat)] for flat in unit) for unit, _ in flats.runs}
    for each, times in flats.runs:
        shared.add(again[id(each)], times)
    return shared


def _flats_of(unit: Unit, setup: Setup) -> list[FlatSpec]:
    """Return the flats of one unit: trainable parameters apart from frozen ones, each dtype and codec by itself."""
    kinds: dict[tuple[bool, int, str], list[Parameter]] = {}
    for parameter in unit.parameters:
        block = unit.kind == "block" and not parameter.trainable
        encoded = block and is_encoded(parameter.name, parameter.shape)
        key = (parameter.trainable, parameter.width or setup.width, setup.codec if encoded else "")
        kinds.setdefault(key, []).append(parameter)
    found = []
    for (trainable, width, codec), members in kinds.items():
        places = [(p.name, p.local(setup.tp), _group(p, setup.tp) if trainable else 0) for p in members]
        layout = lay_out(places, setup.shards, align_of(codec))
        found.append(flat_spec(unit.kind, layout, width, setup.zero, setup.shards, 0, trainable, codec))
    return found


def _group(parameter: Parameter, tp: int) -> int:
    """Return the optimizer group: with or without weight decay, split or replicated over tensor-parallel ranks."""
    whole = tp > 1 and parameter.local(tp) == parameter.shape
    return (0 if len(parameter.shape) >= 2 else 1) + WHOLE * whole


def arenas(sizes: list[int]) -> int:
    """Return the bytes that host memory tiers map and pin for blocks of these sizes, taken in this order."""
    mapped = 0
    rests: list[int] = []
    least = min(sizes, default=0)
    for size, alike in itertools.groupby(sizes):
        left = len(list(alike))
        size = -(-size // constants.PAGE_NBYTES) * constants.PAGE_NBYTES
        if not size:
            continue
        for at, rest in enumerate(rests):  # each block goes to the first arena with room: equal ones fill it up
            taken = min(left, rest // size)
            rests[at] -= taken * size
            left -= taken
        if left and 8 * size >= constants.ARENA_NBYTES:
            mapped, left = mapped + left * size, 0
        while left:
            arena = max(size, min(constants.ARENA_NBYTES, max(constants.FIRST_ARENA_NBYTES, mapped)))
            taken = min(left, arena // size)
            mapped += arena
            rests.append(arena - taken * size)
            left -= taken
        rests = [rest for rest in rests if rest >= least]
    return mapped


def pages(sizes: list[int]) -> int:
    """Return the bytes of host memory that blocks of these sizes take where nothing is pinned: the pages they use."""
    return sum(-(-size // constants.PAGE_NBYTES) * constants.PAGE_NBYTES for size in sizes)


def swap(sizes: list[int]) -> int:
    """Return the bytes that a swap file grows to for blocks of these sizes, taken in this order."""
    size = free = 0
    unit, page = constants.UNIT_NBYTES, constants.PAGE_NBYTES
    for nbytes, alike in itertools.groupby(sizes):
        whole, needed = -(-nbytes // unit) * unit, -(-nbytes // page) * page
        for _ in alike:
            missing = whole - free
            if missing > unit:
                size, free = size + missing, free + missing
            if free < needed:
                size, free = size + constants.GROW_NBYTES, free + constants.GROW_NBYTES
            free -= needed
    return size
