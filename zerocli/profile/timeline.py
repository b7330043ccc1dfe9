"""The timeline of one step: memory by category and tier, phases and units, and lanes, on one time axis."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerocli.layout.categories import CATEGORIES
from zerocli.profile.clock import BETWEEN, COMPUTE, LANES, WAIT, Segment, Span
from zerocli.profile.ledger import UNATTRIBUTED, Ledger

MAX_LIVES = 20_000
"""Maximum number of allocations in a timeline; the smallest beyond it are only counted."""


def make_timeline(
    step: int,
    segments: Sequence[Segment],
    spans: Sequence[Span],
    ledger: Ledger,
    window: tuple[int, int],
    followed: Sequence[Segment],
    offloaded: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return the timeline of a timed step, with the memory of a followed step.

    Both go through the same phases and units in the same order, so points in one can be mapped to the other; `window`
    is the followed step's events in the ledger.
    """
    begin, end = segments[0].begin, segments[-1].end
    place = _aligned(followed, segments)

    def at(moment: float) -> float:
        return round(min(max(place(moment), begin), end) - begin, 7)

    compute = [[*s.label, _us(s.begin - begin), _us(s.end - begin)] for s in _merge(segments)]
    lanes = [
        [span.lane, span.name, _us(max(0.0, span.begin - begin)), _us(min(end, span.end) - begin), span.nbytes]
        for span in sorted(spans, key=lambda span: (LANES.index(span.lane), span.begin))
    ]
    points = ledger.series(*window)
    lives = sorted(ledger.lives(*window), key=lambda each: -each.nbytes)
    return {
        "step": step,
        "seconds": end - begin,
        "lanes": [lane for lane in LANES if lane == COMPUTE or any(span.lane == lane for span in spans)],
        "compute": compute,
        "spans": lanes,
        "memory": {
            "hbm": {
                "times": [at(moment) for moment, _ in points],
                "bytes": {
                    name: [held.get(name, 0) for _, held in points]
                    for name in (*CATEGORIES, UNATTRIBUTED)
                    if any(name in held for _, held in points)
                },
            },
            **{
                tier: {"times": [0.0, _us(end - begin)], "bytes": {name: [n, n] for name, n in rows.items() if n}}
                for tier, rows in offloaded.items()
                if any(rows.values())
            },
        },
        "lives": [
            [life.name, life.category, life.nbytes, at(life.born), at(life.died) if life.died else None, life.made]
            for life in lives[:MAX_LIVES]
            if life.nbytes
        ],
        "lives_left_out": max(0, len(lives) - MAX_LIVES),
    }


def _us(seconds: float) -> float:
    return round(seconds, 7)


def _merge(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments without empty ones, adjacent segments of one label merged."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and merged[-1].label == segment.label:
            merged[-1] = Segment(segment.label, merged[-1].begin, segment.end)
        elif segment.end > segment.begin:
            merged.append(segment)
    return merged


def _turns(segments: Sequence[Segment]) -> list[tuple[tuple[str, str], float]]:
    """Return when each change to another phase or unit happened; waits are left out, as they vary between steps."""
    turns: list[tuple[tuple[str, str], float]] = []
    for segment in segments:
        if segment.label[0] != WAIT and segment.label != BETWEEN and (not turns or turns[-1][0] != segment.label):
            turns.append((segment.label, segment.begin))
    return turns


def _aligned(source: Sequence[Segment], target: Sequence[Segment]) -> Callable[[float], float]:
    """Return the function that maps a time in one step to the corresponding time in another."""
    one, other = _turns(source), _turns(target)
    ends = ((source[0].begin, source[-1].end), (target[0].begin, target[-1].end))
    xs, ys = [ends[0][0]], [ends[1][0]]
    if [label for label, _ in one] == [label for label, _ in other]:
        xs += [at for _, at in one]
        ys += [at for _, at in other]
    xs.append(ends[0][1])
    ys.append(ends[1][1])

    def place(moment: float) -> float:
        i = min(max(bisect.bisect_right(xs, moment) - 1, 0), len(xs) - 2)
        width = xs[i + 1] - xs[i]
        share = (moment - xs[i]) / width if width > 0 else 0.0
        return ys[i] + min(max(share, 0.0), 1.0) * (ys[i + 1] - ys[i])

    return place
