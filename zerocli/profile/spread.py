"""How far ranks are apart: the slowest ones of a run, from the lines of its metrics that name one. Needs no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_RANKS = 3
"""The ranks that are named: those that were slowest most often."""


def spread(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the ranks' own seconds per step, and which ranks were slowest in how many intervals; None without any."""
    found = [line["slowest"] for line in lines if line.get("slowest")]
    if not found:
        return None
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for each in found:
        by_rank[each["rank"]].append(each)
    ranks = sorted(by_rank, key=lambda rank: (-len(by_rank[rank]), rank))[:MOST_RANKS]
    values = {"slowest": _mean(found, "seconds"), "median": _mean(found, "median"), "fastest": _mean(found, "fastest")}
    return {"intervals": len(found), **values, "ranks": [_of_rank(rank, by_rank[rank]) for rank in ranks]}


def _of_rank(rank: int, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    median = _mean(found, "median")
    over = (_mean(found, "seconds") - median) / median if median else 0.0
    cause = Counter(each["cause"] for each in found).most_common(1)[0][0]
    return {"rank": rank, "node": found[-1]["node"], "intervals": len(found), "over": over, "cause": cause}


def _mean(found: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(each[name] for each in found)) / len(found)
