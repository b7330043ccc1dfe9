"""One row per unit: its parameters, what it holds, and its seconds per step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from zerocli.engine.engine import Engine
from zerocli.profile import places
from zerocli.profile.clock import DISK_READ, DISK_WRITE, DOWN, GATHER, REDUCE, UP, UPDATE, Segment, Span

PHASES = ("forward", "backward")
_LANES = {
    **dict.fromkeys((GATHER, REDUCE), "collectives"),
    **dict.fromkeys((UP, DOWN, DISK_READ, DISK_WRITE), "transfers"),
    UPDATE: "update",
}
SECONDS = (*PHASES, "collectives", "transfers", "update")


def unit_rows(
    engine: Engine, steps: Sequence[tuple[Sequence[Segment], Sequence[Span]]], names: Mapping[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """Return the rows of this rank's units, in the model's order.

    Seconds and moved bytes are means over `steps`; forward and backward are compute alone, the others ran beside it.
    `names` is what the device held at its peak, by (name, category).
    """
    titles = [unit.title for unit in engine.units]
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    moved: Counter[str] = Counter()
    for segments, spans in steps:
        for segment in segments:
            phase, unit = segment.label
            if phase in PHASES:
                seconds[unit][phase] += segment.seconds / len(steps)  # type: ignore[assignment]
        for span in spans:
            owner = owner_of(span.name, titles)
            seconds[owner][_LANES.get(span.lane, "update")] += (span.end - span.begin) / len(steps)  # type: ignore[assignment]
            if span.lane != UPDATE:
                moved[owner] += span.nbytes
    held, activations = _held(engine, names, titles)
    return [
        {
            "unit": unit.title,
            "parameters": sum(entry.numel for flat in unit.flats for entry in flat.layout.entries),
            **{name: float(seconds[unit.title][name]) for name in SECONDS},
            "moved": moved[unit.title] // max(1, len(steps)),
            "activations": activations[unit.title],
            "held": dict(held[unit.title]),
        }
        for unit in engine.units
    ]


def owner_of(name: str, titles: Sequence[str]) -> str:
    """Return the unit that a part's name starts with: `blocks.1 parameters` is of blocks.1, not of blocks.10."""
    return next((title for title in titles if name == title or name.startswith(f"{title} ")), "")


def _held(
    engine: Engine, names: Mapping[tuple[str, str], int], titles: Sequence[str]
) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Return the bytes of each unit by tier, and its activations at the device's peak."""
    held: dict[str, Counter[str]] = defaultdict(Counter)
    activations: Counter[str] = Counter()
    for (name, category), nbytes in names.items():
        owner = owner_of(name, titles)
        held[owner]["hbm"] += nbytes
        if category == "activations":
            activations[owner] += nbytes
    for piece in places.pieces(engine):
        tier = engine.tiers.name_of(piece.block.tier)
        held[owner_of(piece.name, titles)][tier] += piece.block.nbytes
    return held, activations
