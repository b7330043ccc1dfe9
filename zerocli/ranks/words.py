"""Ranks in words: those of which the same is true are named together, so that a message is as short for many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

MOST_RUNS = 8
"""Runs of consecutive ranks that a message names."""


def runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each run of consecutive ranks."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found


def ranks_of(found: Iterable[Sequence[int]]) -> list[int]:
    """Return the ranks of these runs, which `runs` returned."""
    return [rank for first, last in found for rank in range(first, last + 1)]


def named(ranks: Iterable[int]) -> str:
    """Return ranks in words: `rank 3`, or `ranks 0, 2 to 7 and 9`; the first runs of many."""
    found = runs(ranks)
    parts = [f"{first}" if first == last else f"{first} to {last}" for first, last in found]
    if len(found) == 1:
        return f"rank{'s' if found[0][0] != found[0][1] else ''} {parts[0]}"
    left = sum(last - first + 1 for first, last in found[MOST_RUNS:])
    shown, end = (parts[:MOST_RUNS], f"{left} more") if left else (parts[:-1], parts[-1])
    return f"ranks {', '.join(shown)} and {end}"


def by_words(facts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of which the same words are true, by those words."""
    found: dict[str, list[int]] = {}
    for rank, words in facts.items():
        found.setdefault(words, []).append(rank)
    return found


def said_of(facts: Mapping[int, str], between: str = "; ") -> str:
    """Return what is true of which ranks, as one line."""
    return between.join(f"{named(ranks)} {words}" for words, ranks in by_words(facts).items())


STOPPED = "was told to stop"


def stopped(rank: int, signal_name: str) -> str:
    """Return in words that a rank was told to stop too early to have anything to save."""
    return f"rank {rank} {STOPPED} ({signal_name}) before all ranks had come: no step was made"
