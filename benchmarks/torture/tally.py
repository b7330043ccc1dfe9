"""How cases went: a row for each kind of fault, and for each failure what happened and how to see it again."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass, field
from typing import Any

COLUMNS = ("cases", "struck", "kills", "finished", "resumed", "refused", "wrong", "leftovers", "hangs")


@dataclass
class Result:
    """How one case went."""

    case: str
    kind: str
    about: str
    outcome: str = ""
    """finished (the fault changed nothing), resumed (from a checkpoint, to the same numbers) or refused (clearly)."""
    struck: bool = False
    """Whether the fault happened: some are set for a moment that their run does not come to."""
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.leftovers or self.hangs)

    def report(self) -> str:
        """Return what happened, and the command that runs this case alone."""
        lines = [f"FAILED {self.case}: {self.about}"]
        for name in ("hangs", "wrong", "leftovers", "notes"):
            lines += [f"  {name}: {_indented(text)}" for text in getattr(self, name)]
        return "\n".join([*lines, f"  again: python benchmarks/torture.py --case '{self.case}'"])


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n    ")


class Tally:
    """Counts results; safe from several threads."""

    def __init__(self) -> None:
        self.rows: dict[str, collections.Counter[str]] = {}
        self.failures: list[Result] = []
        self._lock = threading.Lock()

    def add(self, result: Result) -> None:
        with self._lock:
            row = self.rows.setdefault(result.kind, collections.Counter())
            row["cases"] += 1
            row["struck"] += result.struck
            row["kills"] += result.kills
            row[result.outcome] += not result.failed
            for name in ("wrong", "leftovers", "hangs"):
                row[name] += bool(getattr(result, name))
            if result.failed:
                self.failures.append(result)

    @property
    def total(self) -> collections.Counter[str]:
        return sum(self.rows.values(), collections.Counter())

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def table(self) -> str:
        rows = [*sorted(self.rows.items()), ("total", self.total)]
        width = max(len(name) for name, _ in rows)
        lines = [" ".join([" " * width, *(f"{column:>9}" for column in COLUMNS)])]
        lines += [" ".join([f"{name:<{width}}", *(f"{row[column]:>9}" for column in COLUMNS)]) for name, row in rows]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        failures = [{"case": each.case, "report": each.report()} for each in self.failures]
        rows = {name: {column: row[column] for column in COLUMNS} for name, row in sorted(self.rows.items())}
        return {"rows": rows, "total": {column: self.total[column] for column in COLUMNS}, "failures": failures}
