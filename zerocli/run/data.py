"""Batches as a pure function of (seed, step), and a thread that prepares the next ones.

[Note: sample order] Samples have a global index, counted over the whole run. An epoch is W = (tokens - 1) // seq
windows that do not overlap; (seed, epoch) determine their order and the first token. Index g is therefore window
permutation(g mod W) of epoch g div W on every rank: the order does not depend on how a global batch is split into
ranks, micro-steps and sequences, and resuming needs no stored data state.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from zerocli.run.tokens import TokenSource, open_source

if TYPE_CHECKING:
    import torch

__all__ = ["Batches", "Prefetcher", "TokenSource", "open_source", "permute"]

_MASK = 2**64 - 1
_ROUNDS = 6
_PHASE = _ROUNDS  # the draw of an epoch's first token; lower numbers are round keys


def _mix(value: int) -> int:
    """Return 64 bits that each depend on every bit of `value` (multiply and shift, twice)."""
    value = (value ^ (value >> 32)) * 0xD6E8FEB86659FD93 & _MASK
    value = (value ^ (value >> 32)) * 0xD6E8FEB86659FD93 & _MASK
    return value ^ (value >> 32)


def _draw(seed: int, epoch: int, stream: int) -> int:
    """Return 64 random bits, a pure function of the three."""
    bits = 0x9E3779B97F4A7C15
    for part in (seed, epoch, stream):
        bits = _mix((bits + part + 0x9E3779B97F4A7C15) & _MASK)
    return bits


def permute(index: int, size: int, seed: int, epoch: int) -> int:
    """Return where the epoch's permutation of 0..size-1 sends `index`; nothing of length `size` is built.

    A Feistel network permutes the next power of four; an index beyond `size` is permuted again until it falls within
    (on average fewer than four times), which still is a permutation.
    """
    assert 0 <= index < size
    half = ((size - 1).bit_length() + 1) // 2 or 1
    mask = (1 << half) - 1
    keys = [_draw(seed, epoch, stream) for stream in range(_ROUNDS)]
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(key ^ right) & mask)
        index = left << half | right
        if index < size:
            return index


class Batches:
    """The micro-batches of a run, each a pure function of seed, step and position; see [Note: sample order]."""

    def __init__(
        self,
        source: TokenSource,
        batch: int,
        seq: int,
        accumulate: int = 1,
        seed: int = 0,
        begun: tuple[int, int] = (0, 0),
    ):
        self.source = source
        self.sequences = batch
        self.seq = seq
        self.accumulate = accumulate
        self.seed = seed
        self.begun = begun
        """(step, samples seen by its end): a resumed run continues there, with a global batch of any size."""
        self.num_windows = (len(source) - 1) // seq
        assert self.num_windows > 0, f"{len(source)} tokens hold no window of {seq} + 1"

    def batch(self, step: int, micro: int, rank: int, world: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Return (tokens, the tokens that follow them), int64 of shape (batch, seq). Steps count from 1."""
        import torch

        assert step > self.begun[0] and 0 <= micro < self.accumulate and 0 <= rank < world
        micro_batch = self.sequences * world
        steps, seen = self.begun
        first = seen + ((step - 1 - steps) * self.accumulate + micro) * micro_batch + rank * self.sequences
        starts = [self.window_start(first + i) for i in range(self.sequences)]
        windows = np.stack([self.source.slice(start, self.seq + 1) for start in starts])
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def seen(self, step: int, world: int) -> int:
        """Return the samples that all ranks have seen at the end of a step."""
        steps, seen = self.begun
        return seen + (step - steps) * self.accumulate * self.sequences * world

    def window_start(self, index: int) -> int:
        """Return the first token of the sample with global `index`."""
        epoch, place = divmod(index, self.num_windows)
        spare = len(self.source) - 1 - self.num_windows * self.seq
        phase = _draw(self.seed, epoch, _PHASE) % (spare + 1)
        return phase + permute(place, self.num_windows, self.seed, epoch) * self.seq


class Prefetcher:
    """Hands out a rank's micro-batches in order, from `start_step` on, while a thread prepares the next `depth`.

    With a CUDA device the thread pins them, and the copy is queued on the caller's stream. `steps`, where given, is
    the last step; after it the iteration ends. An error in the thread is raised to the caller.
    """

    def __init__(
        self,
        batches: Batches,
        start_step: int = 1,
        rank: int = 0,
        world: int = 1,
        device: "str | torch.device" = "cpu",
        steps: int | None = None,
        depth: int = 2,
    ):
        import torch

        self._batches = batches
        self._rank, self._world = rank, world
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._depth = depth
        self._ready: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = False  # the thread adds nothing more
        self._closed = False
        self._waited = 0.0
        self._thread = threading.Thread(target=self._run, args=(start_step, steps), name="zerocli-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
        return self

    def __next__(self) -> tuple["torch.Tensor", "torch.Tensor"]:
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            self._waited += time.perf_counter() - started
            if self._closed:
                raise RuntimeError("the prefetcher is closed")
            if not self._ready:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            tokens, targets = self._ready.popleft()
            self._changed.notify_all()
        if self._device.type == "cpu":
            return tokens, targets
        return tokens.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)

    @property
    def waited_seconds(self) -> float:
        """Seconds that callers waited for data since this was last read; reading resets it to zero."""
        with self._changed:
            waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """End the thread and drop what it prepared; a second call does nothing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, step: int, last: int | None) -> None:
        try:
            self._prepare(step, last)
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _prepare(self, step: int, last: int | None) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.set_device(self._device)  # a new thread's current device is 0, and it would pin for that one
        while last is None or step <= last:
            for micro in range(self._batches.accumulate):
                tokens, targets = self._batches.batch(step, micro, self._rank, self._world)
                if self._device.type == "cuda":
                    tokens, targets = tokens.pin_memory(), targets.pin_memory()
                with self._changed:
                    self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
                    if self._closed:
                        return
                    self._ready.append((tokens, targets))
                    self._changed.notify_all()
            step += 1
