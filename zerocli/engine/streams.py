"""Streams: queues of device work beside the compute stream, and the events that order them.

On a GPU these are CUDA streams and events; only `synchronize` and the readings block the host. On a CPU work runs
immediately, streams are no-ops and events are always complete, so the same engine code serves both.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator

import torch

from tiers.events import NOTHING, Scope
from tiers.streams import OnStream, current_stream, record_event
from zerocli.engine.events import SILENT, Events


class StreamEvent:
    """A CUDA event recorded on a stream; `wait` makes another stream wait for it, not the host."""

    _timed = False

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._event = record_event(device, stream, self._timed) if device.type == "cuda" else None

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait for it; by default the current one."""
        if self._event is not None:
            self._event.wait(stream)

    def synchronize(self) -> None:
        """Block the host until the event is complete."""
        if self._event is not None:
            self._event.synchronize()


class SleepEvent(StreamEvent):
    """A stream event for which the host sleeps in `synchronize`: CUDA's default takes a core from other threads."""

    def __init__(self, device: torch.device) -> None:
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(current_stream(device))


class TimedEvent(StreamEvent):
    """A stream event with a timestamp; on a CPU that is the time of its creation."""

    _timed = True

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._clock = time.perf_counter()
        super().__init__(device, stream)

    def since(self, earlier: TimedEvent) -> float:
        """Return the seconds from an earlier event to this one; both must be complete."""
        if self._event is not None and earlier._event is not None:
            milliseconds: float = earlier._event.elapsed_time(self._event)
            return milliseconds / 1e3
        return self._clock - earlier._clock


class Readback:
    """An asynchronous copy of small device values to the host; `values()` waits for it and nothing issued later."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.is_cuda:
            # Pinned: a copy to pageable memory would block the host here instead of in `values`.
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
        else:
            # The caller may change the tensor before the values are read.
            self._host = tensor.clone()
        self.reached = TimedEvent(tensor.device)

    def values(self) -> torch.Tensor:
        self.reached.synchronize()
        return self._host


# Of each thread: on a GPU autograd runs backward in threads of its own.
class _Outside(threading.local):
    """The stream that was current when this thread began to issue work on a side stream."""

    stream: torch.cuda.Stream | None = None


_outside = _Outside()


def compute_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the compute stream, even while work is being issued on a side stream."""
    return _outside.stream or current_stream(device)


class SideStream:
    """A CUDA stream that runs concurrently with the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, after: StreamEvent | None = None) -> Scope:
        """Issue the body's work on this stream, after the event, or without one after all compute issued so far."""
        return NOTHING if self._stream is None else _Aside(self.device, self._stream, after)


class _Aside(OnStream):
    """See `SideStream.run`; a class, as it is entered for every chunk of an update."""

    __slots__ = ("_after", "_device", "_outer")

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, after: StreamEvent | None) -> None:
        super().__init__(stream)
        self._device, self._after = device, after

    def __enter__(self) -> None:
        (self._after or StreamEvent(self._device)).wait(self._stream)
        self._outer, _outside.stream = _outside.stream, compute_stream(self._device)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _outside.stream = self._outer


MAX_PAIRS = 1 << 14
"""Maximum number of event pairs kept until `take`; the oldest are dropped."""


_Pair = tuple[str, str, TimedEvent, TimedEvent]
"""Cause, the cause of the enclosing wait ("" if none), and the events before and after."""


class Waits:
    """Seconds that compute was idle, by cause; on a GPU measured with event pairs on the compute stream.

    If the compute stream waits for another stream, the second event completes late. If the host waits (for a disk), the
    second event is issued late; time in which the stream still has work does not count.
    A wait inside another is charged to its own cause only, so that the causes add up to the total idle time.
    """

    def __init__(self, device: torch.device, events: Events = SILENT) -> None:
        self._device, self._cuda, self._events = device, device.type == "cuda", events
        self._seconds: dict[str, float] = defaultdict(float)
        self._pairs: deque[_Pair] = deque(maxlen=MAX_PAIRS)
        self._around: list[str] = [""]

    @contextlib.contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        """Charge the time that the body delays the compute stream (on a CPU: the host) to `cause`."""
        with self._events.wait(cause):
            # Not the current stream, which may be a side stream: the time that compute stands still is to be measured.
            stream = compute_stream(self._device) if self._cuda else None
            before, around = TimedEvent(self._device, stream), self._around[-1]
            self._around.append(cause)
            try:
                yield
            finally:
                self._around.pop()
            after = TimedEvent(self._device, stream)
            if self._cuda:
                self._pairs.append((cause, around, before, after))
            else:
                seconds = after.since(before)
                self.add(cause, seconds)
                if around:
                    self.add(around, -seconds)

    def add(self, cause: str, seconds: float) -> None:
        self._seconds[cause] += seconds

    def take(self) -> WaitReading:
        """Return the waits since the last call, to be read once the device has passed them."""
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
