"""The placement of training state: parse its text and check it against the stage. (No torch.)"""

from __future__ import annotations

from offload.placement import KINDS, Placement, PlacementError, parse_placement
from zerocli.errors import ConfigError, Problem
from zerocli.layout.sizes import parse_bytes
from zerocli.layout.stage import stage as stage_of

SMALLEST_BUDGET = 4096
"""A budget that is written as a number below this one lacks its unit."""


def read_placement(value: str | Placement | None) -> Placement:
    """Return the placement that the text of `--offload` describes; raise PlacementError, a ValueError, if invalid."""
    return value if isinstance(value, Placement) else parse_placement(value or "", parse_budget)


def parse_budget(text: str) -> int:
    """Return the bytes of a budget; a bare number from 1 to 4095 is refused: its unit is missing."""
    nbytes = parse_bytes(text)
    if 0 < nbytes < SMALLEST_BUDGET and text.strip().isdigit():
        raise ValueError(f"it has no unit: did you mean {nbytes}GiB?")
    return nbytes


def placement_at(placement: Placement, stage: int) -> Placement:
    """Return the tiers of each kind of state at a stage; PlacementError if the stage does not partition a kind."""
    partitions = stage_of(stage)
    try:
        return placement.resolve([kind for kind in KINDS if getattr(partitions, kind)])
    except PlacementError as error:
        error.hint = "--stage 3, with which parameters, gradients and optimizer states may all leave the device"
        raise


def refuse_placement(placement: str | Placement, stage: int | None = None) -> None:
    """Raise ConfigError, worded as for a config file, if a placement is invalid or not allowed at this stage."""
    try:
        read = read_placement(placement)
        if stage is not None:
            placement_at(read, stage)
    except ValueError as error:
        raise ConfigError([Problem(f"--offload {placement}", str(error), hint=getattr(error, "hint", ""))]) from error
