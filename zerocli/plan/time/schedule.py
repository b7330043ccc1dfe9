"""The schedule of one phase of a step: which collectives the engine issues when, and what of them compute hides.

The engine's own order (`engine/units/gather.py`, `reduce.py`): a unit's gather is issued as soon as a buffer is free,
which is when the unit `buffers` before it has computed; its reduction when it has. Collectives that use the same links
run one after the other, in the order in which they are issued.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of one unit in a phase."""

    compute: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    """Of the sum of its gradients inside its group."""
    across: float = 0.0
    """Of that across groups."""
    renew: float = 0.0
    """Of gathering its changed parameters across groups, before they are gathered inside."""


def replay(units: Sequence[UnitTimes], buffers: int, ahead: float = 0.0, shared: bool = False) -> float:
    """Return when the last compute and the last collective of a phase are done.

    Units are in the order of their use. The first gather began up to `ahead` seconds before the phase, while the unit
    before it computed. `shared`: sums across groups go over the links of the gathers, else over their own.
    """
    inside = -ahead
    across, ends, issued = 0.0, [0.0] * (len(units) + 1), 0
    arrived = [0.0] * len(units)
    for at, unit in enumerate(units):
        while issued < min(len(units), at + buffers):
            free = ends[issued - buffers + 1] if issued >= buffers else inside
            begun = max(inside, free) + units[issued].renew * shared
            if units[issued].renew and not shared:
                across = max(across, free) + units[issued].renew
                begun = max(begun, across)
            inside = arrived[issued] = begun + units[issued].gather
            issued += 1
        ends[at + 1] = max(ends[at], arrived[at]) + unit.compute
        if unit.reduce or unit.across:
            inside = max(inside, ends[at + 1]) + unit.reduce
            across = max(across, inside) + unit.across
            if shared:
                inside = across
    return max(ends[-1], inside, across)


@functools.lru_cache(1024)
def replay_blocks(
    first: UnitTimes, block: UnitTimes, number: int, last: UnitTimes, buffers: int, ahead: float, shared: bool
) -> float:
    """Return the same of a unit, this `number` of equal ones, and another; a search asks for few of them, often."""
    return replay([first, *[block] * number, last], buffers, ahead, shared)
