"""The clock: divides compute time into segments without gaps, and records what ran concurrently, by lane.

On a GPU points in time are events on the compute stream, read after it has passed them; on a CPU they are the host's
clock. A segment is labelled with the innermost activity: a unit's forward or backward, the optimizer, or a wait with
its cause.
"""

from __future__ import annotations

import bisect
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from zerocli.engine.streams import TimedEvent, compute_stream

LANES = ("compute", "gather", "reduce", "host to device", "device to host", "disk read", "disk write", "update")
COMPUTE, GATHER, REDUCE, UP, DOWN, DISK_READ, DISK_WRITE, UPDATE = LANES
MOVES = LANES[1:7]
"""Lanes of transfers and collectives, whose overlap with compute is measured."""
WAIT = "wait"
BETWEEN = ("between steps", "")

Stamp = float | TimedEvent
"""Seconds of the host's clock, or a CUDA event."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Segment:
    """An interval of the compute stream's time, labelled (phase, unit) or (wait, cause)."""

    label: tuple[str, str]
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Span:
    """Work that ran concurrently with compute: its lane, its name, and the bytes that it moved."""

    lane: str
    name: str
    begin: float
    end: float
    nbytes: int = 0
    bounded: bool = False
    """Whether `end` is an upper bound: the time at which a wait for it returned."""


class Clock:
    """Records points in time during a run; segments and spans are computed afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._labels: list[tuple[str, str]] = [BETWEEN]
        self._marks: list[tuple[Stamp, tuple[str, str]]] = []
        """When each segment began, and its label."""
        self._spans: list[tuple[str, str, Stamp, Stamp, int, bool]] = []
        self._read: dict[int, list[Span]] = defaultdict(list)
        """Spans by step number."""
        self._num_read = 0
        self.cuts: list[int] = []
        """Indices of the marks at which a step ended."""
        self._first: int | None = None
        """Index of the mark at which the first step began."""
        base = TimedEvent(self._device)
        base.synchronize()
        self._base = base, time.perf_counter()
        self._mark()

    def stamp(self, stream: torch.cuda.Stream | None = None) -> Stamp:
        """Return an event at this point of a stream (default: the current one); on a CPU, the host's time."""
        if not self._cuda:
            return time.perf_counter()
        return TimedEvent(self._device, stream or torch.cuda.current_stream(self._device))

    def _mark(self) -> None:
        stream = compute_stream(self._device) if self._cuda else None
        self._marks.append((self.stamp(stream), self._labels[-1]))

    @property
    def label(self) -> tuple[str, str]:
        return self._labels[-1]

    def push(self, label: tuple[str, str]) -> None:
        """Begin an activity nested in the current one."""
        self._labels.append(label)
        self._mark()

    def pop(self) -> None:
        """End the current activity and return to the enclosing one."""
        self._labels.pop()
        self._mark()

    def turn(self, label: tuple[str, str]) -> None:
        """Replace the current activity with another."""
        self._labels[-1] = label
        self._mark()

    def begin(self) -> None:
        """Begin the first step here: earlier work (reading a checkpoint) belongs to no step. Later calls do nothing."""
        if self._first is None:
            self._first = len(self._marks)
            self._mark()

    def cut(self) -> None:
        """End a step here."""
        self.cuts.append(len(self._marks))
        self._mark()

    def add(self, lane: str, name: str, begin: Stamp, end: Stamp, nbytes: int = 0, bounded: bool = False) -> None:
        """Record work that ran on a lane; safe from any thread."""
        self._spans.append((lane, name, begin, end, nbytes, bounded))

    # -- reading ---------------------------------------------------------------------------------------------------

    def seconds(self, stamp: Stamp) -> float:
        """Return a point as seconds of the host's clock; waits for the device to pass it."""
        if isinstance(stamp, float):
            return stamp
        base, at = self._base
        stamp.synchronize()
        return at + stamp.since(base)

    def step(self, number: int) -> tuple[list[Segment], list[Span]]:
        """Return the segments and spans between the ends of step `number` - 1 and `number` (from 1)."""
        first = self.cuts[number - 2] if number > 1 else self._first or 0
        last = self.cuts[number - 1]
        points = [(self.seconds(stamp), label) for stamp, label in self._marks[first : last + 1]]
        segments = [
            Segment(label, begin, max(begin, end)) for (begin, label), (end, _) in zip(points, points[1:], strict=False)
        ]
        begin, end = points[0][0], points[-1][0]
        self._read_spans()
        return segments, [span for span in self._read.get(number, ()) if span.end > begin and span.begin < end]

    def _read_spans(self) -> None:
        """Assign the spans added since the last call to the steps that they touch."""
        new = self._spans[self._num_read :]
        self._num_read += len(new)
        ends = [self.seconds(self._marks[cut][0]) for cut in self.cuts] if new else []
        for lane, name, first, last, nbytes, bounded in new:
            span = Span(lane, name, self.seconds(first), self.seconds(last), nbytes, bounded)
            for number in range(bisect.bisect_right(ends, span.begin), bisect.bisect_left(ends, span.end) + 1):
                self._read[number + 1].append(span)


def split(segments: Iterable[Segment]) -> tuple[float, dict[str, float]]:
    """Return (seconds of compute, seconds of waits by cause)."""
    compute = 0.0
    waits: dict[str, float] = defaultdict(float)
    for segment in segments:
        if segment.label[0] == WAIT:
            waits[segment.label[1]] += segment.seconds
        else:
            compute += segment.seconds
    return compute, dict(waits)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order, merging those that touch."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return joined


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def common(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the seconds that two unions have in common."""
    starts = [begin for begin, _ in other]
    total = 0.0
    for begin, end in one:
        at = max(0, bisect.bisect_right(starts, begin) - 1)
        while at < len(other) and other[at][0] < end:
            total += max(0.0, min(end, other[at][1]) - max(begin, other[at][0]))
            at += 1
    return total


def overlap(segments: Sequence[Segment], spans: Sequence[Span]) -> float | None:
    """Return the share of transfer and collective time that overlapped with compute; None if nothing moved."""
    moves = union((span.begin, span.end) for span in spans if span.lane in MOVES)
    total = length(moves)
    if not total:
        return None
    busy = union((s.begin, s.end) for s in segments if s.label[0] != WAIT and s.label != BETWEEN)
    return common(moves, busy) / total
