"""The ZeRO stages: three booleans that one engine reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Which model states are partitioned over the data-parallel ranks; the rest is replicated."""

    number: int
    optimizer: bool
    """Optimizer states (and the fp32 master) are partitioned: each rank updates only the slice it owns."""
    gradients: bool
    """Gradients are partitioned: each is reduced to its owner as backward produces it, and freed elsewhere."""
    parameters: bool
    """Parameters are partitioned: a unit is gathered just before it computes and released after."""


STAGES = (
    Stage(0, optimizer=False, gradients=False, parameters=False),
    Stage(1, optimizer=True, gradients=False, parameters=False),
    Stage(2, optimizer=True, gradients=True, parameters=False),
    Stage(3, optimizer=True, gradients=True, parameters=True),
)


def stage(number: int) -> Stage:
    """Return the stage of this number, or raise ValueError that names the four there are."""
    if isinstance(number, bool) or number not in range(len(STAGES)):
        raise ValueError(f"stage {number} is not one of 0, 1, 2, 3")
    return STAGES[number]
