"""Sets of layers as text: `0-3,7` names five layers. (No torch.)"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

RANGES = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


def parse_ranges(text: str) -> frozenset[int]:
    """Return the numbers that a text of the form `RANGES` names; `format_ranges` is the inverse."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def format_ranges(numbers: Iterable[int]) -> str:
    """Return the shortest text that names these numbers, in order."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts)
