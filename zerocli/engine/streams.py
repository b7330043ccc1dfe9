"""Streams: queues of device work beside the compute stream, and the events that order them.

On a GPU these are CUDA's streams and events, and nothing here ever blocks the host. On a CPU work runs where it is
issued, streams are empty and events are always reached, so the same engine code serves both.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator

import torch

from zerocli.engine.events import SILENT, Events


class StreamEvent:
    """A point in a stream's work; `wait` holds the current stream, not the host, until the point is reached."""

    _timed = False

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._event = torch.cuda.Event(enable_timing=self._timed) if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(stream)

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Stop the host until the point is reached."""
        if self._event is not None:
            self._event.synchronize()


class TimedEvent(StreamEvent):
    """A stream event that knows when it was reached; on a CPU that is when it was made."""

    _timed = True

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._clock = time.perf_counter()
        super().__init__(device, stream)

    def since(self, earlier: TimedEvent) -> float:
        """Return the seconds from an earlier event to this one, both of them reached."""
        if self._event is not None and earlier._event is not None:
            milliseconds: float = earlier._event.elapsed_time(self._event)
            return milliseconds / 1e3
        return self._clock - earlier._clock


class Readback:
    """Small device values on their way to the host; `values()` waits for them and for nothing issued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        else:
            self._host = tensor.clone()
        self.reached = TimedEvent(tensor.device)

    def values(self) -> torch.Tensor:
        self.reached.synchronize()
        return self._host


class _Outside(threading.local):
    """The stream that was current when this thread began to issue work on a side stream."""

    stream: torch.cuda.Stream | None = None


_outside = _Outside()


def compute_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that computes, also while work is being issued on a side stream."""
    return _outside.stream or torch.cuda.current_stream(device)


class SideStream:
    """An ordered queue of device work that runs beside the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def run(self, after: StreamEvent | None = None) -> Iterator[None]:
        """Issue the body's work on this stream, after the event, or else after all compute issued so far."""
        if self._stream is None:
            yield
            return
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        outer, _outside.stream = _outside.stream, compute_stream(self.device)
        try:
            with torch.cuda.stream(self._stream):
                if after is not None:
                    after.wait()
                yield
        finally:
            _outside.stream = outer


MAX_PAIRS = 1 << 14
"""Event pairs kept for a reader; where nobody reads, the oldest go."""


_Pair = tuple[str, str, TimedEvent, TimedEvent]
"""Cause, the cause of the wait around it ("" where there is none), and the two ends."""


class Waits:
    """Seconds the compute stood still, by cause; on a GPU read from event pairs once they are reached.

    On a GPU that is the time between two points of the stream that computes. Where it waits for another stream the
    second is reached late; where the host waits (for a disk), it is issued late, and what of the wait passes while the
    stream still has work does not count.
    A wait inside another is charged to its own cause alone, so that the causes add up to the time stood still.
    """

    def __init__(self, device: torch.device, events: Events = SILENT) -> None:
        self._device, self._cuda, self._events = device, device.type == "cuda", events
        self._seconds: dict[str, float] = defaultdict(float)
        self._pairs: deque[_Pair] = deque(maxlen=MAX_PAIRS)
        self._around: list[str] = [""]

    @contextlib.contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Charge the time the body holds up the stream that computes (CPU: the host) to `cause`."""
        with self._events.wait(cause):
            stream = compute_stream(self._device) if self._cuda else None
            before = TimedEvent(self._device, stream)
            with self._inside(cause) as around:
                yield
            after = TimedEvent(self._device, stream)
            if self._cuda:
                self._pairs.append((cause, around, before, after))
            else:
                self._charge(cause, around, after.since(before))

    @contextlib.contextmanager
    def _inside(self, cause: str) -> Iterator[str]:
        self._around.append(cause)
        try:
            yield self._around[-2]
        finally:
            self._around.pop()

    def _charge(self, cause: str, around: str, seconds: float) -> None:
        self._seconds[cause] += seconds
        if around:
            self._seconds[around] -= seconds

    def add(self, cause: str, seconds: float) -> None:
        self._seconds[cause] += seconds

    def take(self) -> WaitReading:
        """Hand over what was gathered since the last call; read it when the device has passed it."""
        reading = WaitReading(dict(self._seconds), list(self._pairs))
        self._seconds = defaultdict(float)
        self._pairs.clear()
        return reading


class WaitReading:
    """One step's waits; `seconds()` blocks the host until the device has passed the last of them."""

    def __init__(self, seconds: dict[str, float], pairs: list[_Pair]) -> None:
        self._base, self._pairs = seconds, pairs

    def seconds(self) -> dict[str, float]:
        total = {cause: self._base.get(cause, 0.0) for cause in ("collectives", "transfers", "optimizer", "data")}
        for cause, around, before, after in self._pairs:
            after.synchronize()
            seconds = after.since(before)
            total[cause] += seconds
            if around:
                total[around] -= seconds
        return total
