"""The configurations that a check compares, and their results. (No torch.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerocli.config import placement_at, read_placement
from zerocli.layout.stage import STAGES

FACTOR = 8
"""Tolerance as a multiple of the effect of rounding; see [Note: tolerance] in compare.py."""
COMPILED_FACTOR = 32
"""The same for compiled blocks, whose fused kernels also round differently within a block."""
NONE, MIX = "none", "mix"


@dataclass(frozen=True)
class Row:
    """One configuration."""

    stage: int
    offload: str = ""
    """The placement, as `--offload` takes it."""
    label: str = NONE
    """The placement's short name in the table."""
    recompute: bool = False
    compiled: bool = False

    @property
    def blocks(self) -> str:
        """How blocks run: `eager`, `recompute`, `compiled`, or the last two."""
        words = [word for word, given in (("recompute", self.recompute), ("compiled", self.compiled)) if given]
        return "+".join(words) or "eager"

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.offload:
            parts.append(f"offload {self.label}")
        if self.recompute or self.compiled:
            parts.append(self.blocks)
        return ", ".join(parts)


@dataclass(frozen=True)
class Checklist:
    """Everything that the ranks of a check need besides the config."""

    rows: tuple[Row, ...]
    steps: int
    first: int = 0
    """The first row to run: restarted ranks continue after the row that ended them."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Checklist:
        rows = tuple(Row(**row) for row in values["rows"])
        return cls(rows, values["steps"], values["first"])


def choose_rows(
    stages: Sequence[int],
    offloads: Sequence[str],
    numel: int,
    ranks: int,
    nvme: bool,
    compiler: bool,
    everything: bool = False,
) -> tuple[Row, ...]:
    """Return every stage with every placement, each without and with recomputation, and compiled rows at the end.

    `offloads` narrows the placements down to those it names; `nvme` says whether a disk can be used, `compiler` whether
    blocks can be compiled. One eager row is compiled too by default, all of them with `everything`. A placement that a
    stage cannot have is left out, unless both were asked for.
    """
    eager = [
        Row(stage, offload, label, recompute)
        for stage in sorted(set(stages)) or range(len(STAGES))
        for label, offload in _placements(stage, offloads, numel, ranks, nvme)
        for recompute in (False, True)
        if stages or allows(stage, offload)
    ]
    if everything and not offloads:
        eager += [Row(stage, "activations=cpu", "act=cpu", True) for stage in sorted({row.stage for row in eager})]
    plain = [row for row in eager if not row.recompute]
    chosen = eager if everything else plain[-1:] if offloads else [row for row in plain if not row.offload][-1:]
    compiled = [dataclasses.replace(row, compiled=True) for row in chosen] if compiler else []
    return tuple(eager + compiled)


def _placements(stage: int, offloads: Sequence[str], numel: int, ranks: int, nvme: bool) -> list[tuple[str, str]]:
    """Return (label, placement) of each placement to try at a stage; stage 0 can offload nothing."""
    if offloads:
        return [(NONE, "") if text in ("", NONE) else (text, text) for text in offloads]
    found = [(NONE, "")]
    if stage > 0:
        found += [("cpu", "cpu"), *([("nvme", "nvme")] if nvme else []), (MIX, mix(stage, numel, ranks, nvme))]
    return found


def allows(stage: int, offload: str) -> bool:
    """Return whether a stage allows a placement: what it does not partition stays on the device."""
    try:
        placement_at(read_placement(offload), stage)
    except ValueError:
        return False
    return True


def mix(stage: int, numel: int, ranks: int, nvme: bool) -> str:
    """Return a placement with budgets that spreads each kind of state over all tiers."""
    share = max(1, numel // ranks // (3 if nvme else 2))  # elements of each rank on each tier
    last = "+nvme" if nvme else ""

    def size(nbytes: int) -> str:
        return f"{max(1, share * nbytes >> 10)}KiB"

    def spread(nbytes: int) -> str:  # hbm budgets are per rank, others per node
        return f"hbm:{size(nbytes)}+cpu{f':{size(nbytes * ranks)}' if nvme else ''}{last}"

    kinds = {"optimizer": spread(8)}
    if stage >= 2:
        kinds["grads"] = "cpu"
    if stage >= 3:
        kinds["params"] = spread(4)
    return ",".join(f"{kind}={places}" for kind, places in kinds.items())
