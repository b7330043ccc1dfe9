"""A run that goes on after a failure: each distinct failure, made smaller, goes into a report."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from fuzz.check import check
from fuzz.program import Program
from fuzz.server import Ranks

SHRINK_SECONDS = float(os.environ.get("ZEROCLI_FUZZ_SHRINK", "60"))
"""How long one failure is made smaller."""


class Collection:
    """The distinct failures of a run; each is also a line of JSON in the file `ZEROCLI_FUZZ_REPORT`."""

    def __init__(self, ranks: Ranks, report: str = "") -> None:
        self.ranks, self.path = ranks, Path(report) if report else None
        self.found: dict[str, list[Program]] = {}
        self.programs = 0

    def judge(self, program: Program) -> None:
        """Check a program and keep its failure; Invalid is the caller's."""
        try:
            check(program, self.ranks)
        except AssertionError as error:
            self._keep(program, str(error))
        self.programs += 1

    def _keep(self, program: Program, error: str) -> None:
        """Keep a failure; the first of its kind is made smaller."""
        self.ranks.close()  # what went wrong may have spoilt their memory
        kind = kind_of(error, program)
        known = kind in self.found
        self.found.setdefault(kind, []).append(program)
        if known:
            return self._write(kind, error, program, None)
        self._write(kind, error, program, smaller(program, lambda other: self._fails(other, kind)))

    def _fails(self, program: Program, kind: str) -> bool:
        try:
            check(program, self.ranks)
        except AssertionError as error:
            self.ranks.close()
            return kind_of(str(error), program).partition(WITH)[0] == kind.partition(WITH)[0]
        except Exception:  # Invalid, or a program that the drawing would never give
            pass
        return False

    def _write(self, kind: str, error: str, program: Program, shrunk: Program | None) -> None:
        if self.path is not None:
            line = {"kind": kind, "program": repr(program), "shrunk": shrunk and repr(shrunk), "error": error}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def summary(self) -> str:
        lines = [f"{len(each)} x {kind}\n    {each[0]!r}" for kind, each in self.found.items()]
        return f"{sum(map(len, self.found.values()))} of {self.programs} programs fail\n" + "\n".join(lines)


WITH = ", with "


def kind_of(error: str, program: Program) -> str:
    """Return an error without its numbers and names, and what is special in its program: the same for one cause."""
    second = program.second
    special = {
        "an optimizer of its own": program.rule.terms,
        "an optimizer of torch": program.rule.kind and not program.rule.terms,
        "aliases": program.aliases or any(block.caches for block in program.all_blocks),
        "kept outputs": program.returns == "kept" or any(call.style == "kept" for call in program.calls),
        "a list to fill": program.fills,
        "state": any(block.state for block in program.all_blocks),
        "recomputation": program.setting.recompute,
        f"two engines ({second.link if second else ''})": second,
        f"uneven ranks ({program.uneven})": program.uneven,
    }
    return WITH.join([_words(error), *(name for name, there in special.items() if there)])


def _words(error: str) -> str:
    lines = [line for line in error.strip().splitlines() if line.strip()]
    if lines and lines[0].startswith("rank ") and any("Traceback" in line for line in lines):
        lines = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception|Failed|Refused|Boom)\b", line)] or lines
    if lines and all(re.match(r"rank \d+:", line) for line in lines):
        return " / ".join(line.partition(":")[2].strip() for line in lines)
    text = re.sub(r"(rank \d+, )?(step \d+ |end: )(\w+ \d+ )?", "", lines[0] if lines else "")
    text = re.sub(r"-?\d[\d.]*(e-?\d+)?", "#", text)
    return re.sub(r"^\w+: ", "", re.sub(r"(\w+\.)+\w+", "NAME", text))[:160]


def smaller(program: Program, fails: Callable[[Program], bool], seconds: float = SHRINK_SECONDS) -> Program:
    """Return a program that still fails, with as many parts at their defaults or left out as the time allows."""
    end, again = time.monotonic() + seconds, True
    while again:
        again = False
        for other in _simpler(program):
            if time.monotonic() > end:
                return program
            if fails(other):
                program, again = other, True
                break
    return program


def _simpler(value: Any) -> Iterator[Any]:
    """Yield values that are simpler by one change."""
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):  # options, ties: pairs
            return
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
        for index, each in enumerate(value):
            for other in _simpler(each):
                yield (*value[:index], other, *value[index + 1 :])
    elif is_dataclass(value) and not isinstance(value, type):
        own = [field for field in fields(value) if getattr(value, field.name) != field.default]
        for field in own:
            if field.name not in KEPT:
                yield replace(value, **{field.name: field.default})
        for field in own:
            for other in _simpler(getattr(value, field.name)):
                if other or field.name not in NOT_EMPTY:
                    yield replace(value, **{field.name: other})


KEPT = ("children", "options")
"""What no default can stand for."""
NOT_EMPTY = ("blocks", "calls", "steps", "passes", "children", "options", "chosen")
