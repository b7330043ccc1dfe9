"""`Plan`: what a run needs on every tier, in rows; a profile measures the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from zerocli.layout.sizes import format_bytes
from zerocli.plan.setup import Setup

TIERS = ("hbm", "dram", "nvme")
WORDS = {"hbm": "GPU", "dram": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class Row:
    """Bytes of one category on one tier (hbm: per GPU; dram and nvme: per node), and their formula."""

    category: str
    tier: str
    nbytes: int
    formula: str

    def as_dict(self) -> dict[str, Any]:
        return {"category": self.category, "tier": self.tier, "bytes": self.nbytes, "formula": self.formula}


@dataclass(frozen=True)
class Plan:
    """The rows of one setup, the device's peaks by phase, and the moment of the highest."""

    setup: Setup
    numel: int
    rows: tuple[Row, ...]
    peaks: dict[str, int] = field(default_factory=dict)
    """Bytes on the device that torch allocates: at initialisation, in the first step, in later ones."""
    moment: str = ""
    whole: bool = True
    """False for a bare parameter count: model states alone."""
    saved: Row | None = None
    """Checkpoints in the run folder (see saves.py); also one of the rows unless nodes share the folder."""
    loading: dict[str, int] = field(default_factory=dict)
    """Peak of a node's host memory while the model is loaded: `random`, or `init_from` (see loading.py)."""
    trained: int = 0
    """Parameters that are trained, of `numel`; 0: all."""
    fragments: int = 0
    """Device memory that the allocator reserves beyond what is live at the peak; also in the rows."""
    activations: str = ""
    """What `activations.policy=auto` chose, and why; empty for another policy."""

    @property
    def num_trained(self) -> int:
        return self.trained or self.numel

    @property
    def tiers(self) -> tuple[str, ...]:
        """The three built-in tiers, then those of other packages that hold something."""
        return tuple(dict.fromkeys((*TIERS, *(row.tier for row in self.rows))))

    def needed(self, tier: str) -> int:
        return sum(row.nbytes for row in self.rows if row.tier == tier)

    def of(self, category: str, tier: str = "hbm") -> int:
        return sum(row.nbytes for row in self.rows if row.tier == tier and row.category == category)

    @property
    def allocated(self) -> int:
        """Return the device bytes that torch's allocator would report as its peak."""
        return max(self.peaks.values(), default=0)

    @property
    def loading_words(self) -> str:
        """Return a line on host memory while the model is loaded."""
        random, read = self.loading["random"], self.loading["init_from"]
        return f"host memory while loading: {format_bytes(random)} per node, {format_bytes(read)} with --init-from"

    def as_dict(self) -> dict[str, Any]:
        return {
            "needed": {tier: self.needed(tier) for tier in self.tiers},
            "peaks": self.peaks,
            "moment": self.moment,
            "rows": [row.as_dict() for row in self.rows],
            "checkpoints": self.saved.as_dict() if self.saved else None,
            "activations": self.activations or None,
            "loading": self.loading or None,
        }

    def lines(self) -> list[str]:
        """Return every row with its formula, and the peaks, as readable lines."""
        return [f"{text}  {formula}" if formula else text for text, formula in self.table()]

    def table(self) -> Iterator[tuple[str, str]]:
        """Yield the lines in two parts, of which the second is a row's formula."""
        width = 1 + max(len(WORDS.get(tier, tier)) for tier in self.tiers)
        for tier in self.tiers:
            rows = [row for row in self.rows if row.tier == tier and row.nbytes]
            word = WORDS.get(tier, tier) if self.setup.device == "cuda" or tier != "hbm" else "CPU"
            for row in rows:
                category = row.category.replace("_", " ")
                yield f"  {word:<{width}}{category:<18}{format_bytes(row.nbytes):>11}", row.formula
            if rows:
                yield f"  {word:<{width}}{'in all':<18}{format_bytes(self.needed(tier)):>11}", ""
        if self.saved is not None and self.saved not in self.rows:
            size = format_bytes(self.saved.nbytes)
            yield f"  {'disk':<{width}}{self.saved.tier:<18}{size:>11}", f"{self.saved.formula} (on no tier)"
        if self.activations:
            yield f"  activations: {self.activations}", ""
        if self.loading:
            yield f"  {self.loading_words}", ""
        if self.peaks:
            phases = ", ".join(f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in self.peaks.items())
            yield f"  peak of torch's allocations by phase: {phases}; highest at: {self.moment}", ""
