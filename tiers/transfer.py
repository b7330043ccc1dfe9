"""`Transfer`: bytes in flight between a tier and a tensor, the only asynchronous type of this package.

A transfer ends in one of two ways. A host transfer (a disk, a memory copy by a thread) ends with its future. A CUDA
copy ends with its event, long after the host has continued. `wait()` orders the caller's work after the transfer, on
the stream or on the host; `synchronize()` always blocks the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future

import torch
from torch import Tensor

from tiers.errors import TierError
from tiers.streams import current_stream

WAITED_FOR: dict[int, tuple[Transfer, float]] = {}
"""By thread: the transfer that it is blocked on, and since when (time.monotonic); read by a watchdog."""
NO_STREAMS: Mapping[torch.device, torch.cuda.Stream] = {}


class Transfer:
    """Bytes in flight; holds its source and target until they are no longer touched.

    After `wait()` the caller may use the target and reuse the source in the order of its current CUDA stream. Host
    code that touches host memory of a CUDA copy (a pinned buffer just filled) needs `synchronize()` instead: the
    stream does not order the host.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        future: Future[None] | None = None,
        event: torch.Event | None = None,
        callers: Mapping[torch.device, torch.cuda.Stream] = NO_STREAMS,
        hold: Sequence[Tensor] = (),
        tier: str = "tier",
    ) -> None:
        self.nbytes = nbytes
        self.what = ""
        """A description of the bytes for messages, if their owner has set it."""
        self.event = event
        """The event at the end of a CUDA copy; None for any other transfer."""
        self.tier = tier
        """The name of the tier that it reads or writes."""
        self.future = future
        """The future of the host's part; None if there is none, or it ended immediately."""
        self._hold = tuple(hold)
        self._callers = callers
        """The streams that were current when it was requested: it counts as a use of its tensors on them."""
        if future is not None:
            future.add_done_callback(self._drop_tensors)

    @classmethod
    def finished(cls, nbytes: int) -> Transfer:
        """Return a transfer that is complete already."""
        return cls(nbytes)

    def wait(self) -> None:
        """Order the caller's next work after this transfer: its current stream for a CUDA copy, the host otherwise."""
        self.wait_for_host()
        if self.event is None:
            return
        if self.event.query():
            self._hold = ()
            return
        same_streams = True
        for device, caller in self._callers.items():
            current = current_stream(device)
            self.event.wait(current)
            same_streams = same_streams and current == caller
        if same_streams:
            # Device memory is reused in stream order, which now runs after the copy; host memory is not.
            self._hold = tuple(tensor for tensor in self._hold if not tensor.is_cuda)

    def synchronize(self) -> None:
        """Block the host until the transfer is complete; raise its error if it failed."""
        self.wait_for_host()
        if self.event is not None:
            self.event.synchronize()
        self._hold = ()

    def wait_for_host(self) -> None:
        """Block the host until its own part has ended (a CUDA copy may still run); raise the error if it failed."""
        if self.future is not None:
            if not self.future.done():
                WAITED_FOR[threading.get_ident()] = (self, time.monotonic())
            try:
                self.future.result()
            except CancelledError:
                raise self._cancelled() from None
            finally:
                WAITED_FOR.pop(threading.get_ident(), None)

    @property
    def holds_host(self) -> bool:
        """Whether `wait_for_host` would block the host now."""
        return self.future is not None and not self.future.done()

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, with or without an error; never waits.

        Whoever asks frees what an ended one holds: a tier unmaps memory once its transfers are done, while their owners
        may keep them for long.
        """
        if self.future is not None and not self.future.done():
            return False
        if self.event is not None and not self.event.query():
            return False
        self._hold = ()
        return True

    @property
    def released(self) -> bool:
        """Whether device memory is no longer held: done, or ordered before the caller's next work."""
        return not any(tensor.is_cuda for tensor in self._hold)

    @property
    def error(self) -> BaseException | None:
        """Return the error, None if there is none so far; never waits."""
        if self.future is None or not self.future.done():
            return None
        return self._cancelled() if self.future.cancelled() else self.future.exception()

    def _cancelled(self) -> TierError:
        return TierError(f"{self.tier} was closed before {self.nbytes} bytes had moved", tier=self.tier)

    def _drop_tensors(self, _: Future[None]) -> None:
        if self.event is None:
            self._hold = ()

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "in flight"
        return f"Transfer({self.nbytes} bytes, {state})"


class JointTransfer(Transfer):
    """Several transfers of the same bytes; it ends when all of them have."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        super().__init__(parts[0].nbytes, tier=parts[0].tier)
        self._parts = tuple(parts)

    def wait(self) -> None:
        for part in self._parts:
            part.wait()

    def synchronize(self) -> None:
        for part in self._parts:
            part.synchronize()

    def wait_for_host(self) -> None:
        for part in self._parts:
            part.wait_for_host()

    @property
    def holds_host(self) -> bool:
        return any(part.holds_host for part in self._parts)

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    @property
    def released(self) -> bool:
        return all(part.released for part in self._parts)

    @property
    def error(self) -> BaseException | None:
        return next((part.error for part in self._parts if part.error is not None), None)
