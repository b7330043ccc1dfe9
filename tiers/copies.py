"""`Copier`: asynchronous copies between tensors, on its own CUDA streams or by a few host threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import torch
from torch import Tensor

from tiers.errors import TierError
from tiers.events import SILENT, TierEvents
from tiers.streams import OnStream, current_stream, record_event
from tiers.transfer import Transfer

INLINE_NBYTES = 1 << 20  # a smaller host copy costs less than handing it to a thread
NUM_THREADS = 2


def stream_position(tensor: Tensor) -> torch.cuda.Event | None:
    """Return an event after the caller's queued work that may touch `tensor`'s memory, None if none can.

    This includes pinned host memory: a copy queued on the caller's stream may still be filling it.
    """
    if tensor.is_cuda:
        stream = current_stream(tensor.device)
    elif torch.cuda.is_initialized() and tensor.is_pinned():
        stream = torch.cuda.current_stream()
    else:
        return None
    return None if stream.query() else stream.record_event()


class Copier:
    """Copies flat uint8 tensors; each direction of each device has its own stream, so both can run at once.

    Each stream of the caller has its own pair: a copy waits for the caller's stream, and the next copy in the same
    queue would wait with it. So a gather that waits for an update does not hold up what the next update reads. The
    copies that one stream requests keep their order, whichever tiers they are between: with a stream for each tier, a
    GPU would copy the states of many chunks before the parameters of the first, for which the update waits.
    """

    _streams: ClassVar[dict[tuple[torch.device, str, int], torch.cuda.Stream]] = {}
    """By device, direction and the caller's stream; of all copiers."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=f"{tier}-copy")  # begun when first needed

    def copy(
        self, source: Tensor, target: Tensor, after: Sequence[Transfer] = (), events: TierEvents = SILENT
    ) -> Transfer:
        """Start copying `source` to `target`, after the transfers in `after` and the caller's current stream."""
        if source.is_cuda or target.is_cuda:
            return self._copy_on_stream(source, target, after, events)
        position = stream_position(source) or stream_position(target)
        if source.numel() <= INLINE_NBYTES and position is None and not after:
            target.copy_(source)
            return Transfer.finished(source.numel())
        future = self._threads.submit(_copy_on_host, source, target, position, list(after))
        return Transfer(source.numel(), future=future, hold=(source, target), tier=self._tier)

    def stream(self, caller: torch.cuda.Stream, device: torch.device, direction: str) -> torch.cuda.Stream:
        """Return the stream for copies in a `direction` (up, down or across) that this stream of the caller issues."""
        key = (device, direction, caller.cuda_stream)
        found = self._streams.get(key)
        return self._streams.setdefault(key, torch.cuda.Stream(device)) if found is None else found

    def close(self) -> None:
        """Finish running copies and end the threads."""
        self._threads.shutdown(wait=True)

    def _copy_on_stream(
        self, source: Tensor, target: Tensor, after: Sequence[Transfer], events: TierEvents
    ) -> Transfer:
        for earlier in after:
            _wait_for(earlier)
        direction = "across" if source.is_cuda and target.is_cuda else "up" if target.is_cuda else "down"
        device = target.device if target.is_cuda else source.device
        callers = {device: current_stream(device)}
        if direction == "across" and source.device != device:
            callers[source.device] = current_stream(source.device)
        stream = self.stream(callers[device], device, direction)
        for place, caller in callers.items():
            record_event(place, caller).wait(stream)
        for earlier in after:
            if earlier.event is not None:
                earlier.event.wait(stream)
        with OnStream(stream), events.copy(direction, source.numel()):
            target.copy_(source, non_blocking=True)
        event = record_event(device, stream)
        return Transfer(source.numel(), event=event, callers=callers, hold=(source, target), tier=self._tier)


def _copy_on_host(source: Tensor, target: Tensor, position: torch.cuda.Event | None, after: Sequence[Transfer]) -> None:
    # The queue is FIFO: everything this waits for was submitted earlier, so the threads cannot deadlock.
    for earlier in after:
        _wait_for(earlier)
        if earlier.event is not None:
            earlier.event.synchronize()
    if position is not None:
        position.synchronize()
    target.copy_(source)


def _wait_for(earlier: Transfer) -> None:
    try:
        earlier.wait_for_host()
    except TierError:
        pass  # its own caller gets the error
