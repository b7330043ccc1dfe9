"""The report of `zerocli.check`: one row for each stage and placement. (No torch.)"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from zerocli.check.rows import NONE

GOOD = ("identical", "equal")
WIDTH = 100


@dataclass(frozen=True)
class RowResult:
    """One stage and placement beside plain torch."""

    stage: int
    offload: str
    recompute: bool
    verdict: str
    """identical (bit for bit), equal (up to rounding), differs, refused, error or hung."""
    message: str = ""
    """What differs first, or the sentence of the refusal or error."""
    name: str = ""
    """What differs most: a tensor of the state, or losses, gradient norms or yielded values; with its rank."""
    relative: float | None = None
    """By how much of itself (root mean square); None if it is not finite, or nothing was compared."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """The result of a check; `print` shows it as a table."""

    model: str
    loop: str
    ranks: int
    compared: int
    """Numbers in losses, norms, yielded values and states that were compared in each row."""
    rows: tuple[RowResult, ...]

    @property
    def ok(self) -> bool:
        """Whether every row equals plain torch; a refused row is not wrong, but not certified either."""
        return bool(self.rows) and all(row.verdict in GOOD for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows], "ok": self.ok}

    def __str__(self) -> str:
        lines = [
            f"{self.model}, {self.loop}: {self.compared:,} numbers on {self.ranks} rank{'s' * (self.ranks > 1)}, "
            "compared with plain torch data parallelism",
            "",
            f"stage  {'offload':<12}  {'blocks':<9}  {'difference':>10}  verdict",
        ]
        for row in self.rows:
            said = row.verdict if row.verdict in GOOD else row.verdict.upper()
            off = "" if row.verdict not in (*GOOD, "differs") else number(row.relative)
            blocks = "recompute" if row.recompute else "eager"
            lines.append(f"{row.stage:>5}  {row.offload or NONE:<12}  {blocks:<9}  {off:>10}  {said}")
        said_of: dict[str, list[str]] = {}
        for row in self.rows:
            if row.message:
                said_of.setdefault(f"{row.verdict}: {row.message}", []).append(_label(row))
        for text, labels in said_of.items():
            lines += ["", *textwrap.wrap("; ".join(labels) + ":", WIDTH)]
            lines += textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ")
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        words = {"differs": "differ from it", "refused": "refused", "error": "failed", "hung": "hung"}
        counts = Counter(row.verdict for row in self.rows)
        good = sum(counts[word] for word in GOOD)
        said = [f"{good} of {len(self.rows)} equal plain torch"]
        said += [f"{counts[word]} {meant}" for word, meant in words.items() if counts[word]]

        return f"{'ok' if self.ok else 'FAILED'}: {', '.join(said)}."


def number(value: float | None) -> str:
    return "not finite" if value is None or not math.isfinite(value) else "0" if value == 0 else f"{value:.1e}"


def _label(row: RowResult) -> str:
    more = f", offload {row.offload}" if row.offload else ""
    return f"stage {row.stage}{more}{', recompute' * row.recompute}"
