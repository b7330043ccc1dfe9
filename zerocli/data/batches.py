"""Batches as a pure function of (seed, step), and a thread that prepares the next ones.

[Note: sample order] Samples have a global index, counted over the whole run. An epoch is W = (tokens - 1) // seq
windows that do not overlap; (seed, epoch) determine their order and the first token. Index g is therefore window
permutation(g mod W) of epoch g div W on every rank: the order does not depend on how a global batch is split into
ranks, micro-steps and sequences, and resuming needs no stored data state. Documents are packed into W windows once, and
the same permutation orders those.

[Note: weights] The engine averages the losses of a step's micro-steps on all ranks, each of which is a mean over its
own counted targets. With documents these are not equally many, so a micro-step's loss is multiplied by its share of the
step's counted targets: the sum is then the mean over all of them, however the step is split. The index of the windows
says how many each has, so no rank has to ask another.

[Note: weights of files] Of a file with weight w and W windows an epoch has T = round(w x W) places, and place p of
epoch e is window (e x T + p) mod W. A weight of 3 gives every window three times per epoch; one of 0.5 gives half of
them in one epoch and the other half in the next. All places of all files are permuted together.
"""

import functools
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from zerocli.data.held_out import HeldOut, SamplePass, TokenPass
from zerocli.data.packing import Windows
from zerocli.data.tokens import TokenSource

if TYPE_CHECKING:
    import torch

Batch = tuple["torch.Tensor", ...]
"""(tokens, targets) or (tokens, targets, positions): int64 of shape (batch, seq); a target of -100 is not counted."""

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
    keys = _round_keys(seed, epoch)
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mix(key ^ right) & mask)
        index = left << half | right
        if index < size:
            return index


@functools.lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> list[int]:
    return [_draw(seed, epoch, stream) for stream in range(_ROUNDS)]


def steps_of_epochs(epochs: float, num_windows: int, per_step: int, begun: tuple[int, int] = (0, 0)) -> int:
    """Return the last step of a run over `epochs` times `num_windows` samples, `per_step` of them in each step.

    `begun` is (step, samples seen by its end) of a resumed run. The last step may go beyond the last epoch's end.
    """
    step, seen = begun
    wanted = math.ceil(round(epochs * num_windows, 6))
    return max(1, step + max(0, -(-(wanted - seen) // per_step)))


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
        self.lines: list[str] = []
        """What the run says about its data."""
        self.notes: list[str] = []
        """What of it was cut or left out, said again when the run ends."""
        self.kind = ""
        """What the rows of documents have, such as messages; empty for a stream of tokens."""
        self.num_windows = (len(source) - 1) // seq
        assert self.num_windows > 0, f"{len(source)} tokens hold no window of {seq} + 1"

    def batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        """Return a rank's micro-batch. Steps count from 1."""
        return self.take(self.samples(step, micro, rank, world))

    def take(self, samples: range) -> Batch:
        """Return the samples with these global indices: (tokens, the tokens that follow them), int64."""
        import torch

        starts = [self.window_start(index) for index in samples]
        windows = np.stack([self.source.slice(start, self.seq + 1) for start in starts])
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())

    def samples(self, step: int, micro: int, rank: int, world: int) -> range:
        """Return the global indices of a micro-batch's samples."""
        assert step > self.begun[0] and 0 <= micro < self.accumulate and 0 <= rank < world
        micro_batch = self.sequences * world
        steps, seen = self.begun
        first = seen + ((step - 1 - steps) * self.accumulate + micro) * micro_batch + rank * self.sequences
        return range(first, first + self.sequences)

    def weight(self, step: int, micro: int, rank: int, world: int) -> float | None:
        """Return what a micro-step's loss is multiplied by, None for nothing: see [Note: weights]."""
        return None

    @property
    def positions(self) -> bool:
        """Whether batches have positions, which restart where attention must not cross."""
        return False

    def one_pass(self, batch: int) -> HeldOut:
        """Return all of this data in order, each target once, `batch` sequences at a time."""
        return TokenPass(self.source, batch, self.seq)

    def held_out(self, batch: int) -> HeldOut | None:
        """Return one pass over what this data leaves out, if it does."""
        rest = self.source.rest()
        return TokenPass(rest, batch, self.seq) if len(rest) else None

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


class DocumentBatches(Batches):
    """Batches of windows of documents; with `positions`, several documents share a window.

    `takes` has, for each of several sources, how many of its windows an epoch has: see [Note: weights of files].
    """

    def __init__(
        self,
        windows: Windows | Sequence[Windows],
        batch: int,
        seq: int,
        accumulate: int = 1,
        seed: int = 0,
        begun: tuple[int, int] = (0, 0),
        positions: bool = True,
        takes: Sequence[int] = (),
    ):
        self.parts = [windows] if isinstance(windows, Windows) else windows
        self._takes = takes or [len(part) for part in self.parts]
        self.left_out: DocumentBatches | None = None
        """Batches of the documents that are not trained on."""
        self.lines, self.notes = [], []
        self.kind = "+".join(dict.fromkeys(part.documents.kind for part in self.parts))
        self.sequences, self.seq, self.accumulate, self.seed, self.begun = batch, seq, accumulate, seed, begun
        self.num_windows = sum(self._takes)
        self._positions = positions
        self._totals: dict[tuple[int, int], int] = {}
        assert self.num_windows > 0, "no window has a target that counts"

    @property
    def positions(self) -> bool:
        return self._positions

    def take(self, samples: range) -> Batch:
        import torch

        rows = [part.window(at) for part, at in map(self.window_of, samples)]
        columns = [torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)]
        return tuple(columns if self._positions else columns[:2])

    def one_pass(self, batch: int) -> HeldOut:
        return SamplePass(self, batch)

    def held_out(self, batch: int) -> HeldOut | None:
        return self.left_out.one_pass(batch) if self.left_out is not None else None

    def window_of(self, index: int) -> tuple[Windows, int]:
        """Return the source of the sample with global `index`, and which of its windows that is."""
        epoch, place = divmod(index, self.num_windows)
        place = permute(place, self.num_windows, self.seed, epoch)
        for part, taken in zip(self.parts, self._takes, strict=True):
            if place < taken:
                return part, (epoch * taken + place) % len(part)
            place -= taken
        raise AssertionError("a place beyond the epoch")

    def num_counted(self, samples: range) -> int:
        """Return how many targets of these samples count for the loss."""
        return sum(int(part.counts[at]) for part, at in map(self.window_of, samples))

    def weight(self, step: int, micro: int, rank: int, world: int) -> float:
        passes = self.accumulate * world
        total = self._totals.get((step, world))
        if total is None:
            first = self.samples(step, 0, 0, world).start
            total = self.num_counted(range(first, first + self.sequences * passes))
            if len(self._totals) > 16:
                self._totals.clear()
            self._totals[step, world] = total
        return self.num_counted(self.samples(step, micro, rank, world)) * passes / total


class Prefetcher:
    """Hands out a rank's micro-batches in order, from `start_step` on, while a thread prepares the next three.

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
    ):
        import torch

        self._batches = batches
        self._rank, self._world = rank, world
        self._device = torch.device(device)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._made = self._prepare(start_step, steps)
        self._thread = ThreadPoolExecutor(1, "zerocli-data")
        self._ready: deque[Future[Batch | None]] = deque(self._next() for _ in range(3))
        """The next batches, some of them not prepared yet; None after the last one. Empty once it is closed."""
        self._waited = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            raise RuntimeError("the prefetcher is closed")
        started = time.perf_counter()
        batch = self._ready[0].result()  # stays the first if there is none or an error: the next call says so again
        self._waited += time.perf_counter() - started
        if batch is None:
            raise StopIteration
        self._ready.popleft()
        self._ready.append(self._next())
        if self._device.type == "cpu":
            return batch
        return tuple(part.to(self._device, non_blocking=True) for part in batch)

    @property
    def waited_seconds(self) -> float:
        """Seconds that callers waited for data since this was last read; reading resets it to zero."""
        waited, self._waited = self._waited, 0.0
        return waited

    def close(self) -> None:
        """End the thread and drop what it prepared; a second call does nothing."""
        self._thread.shutdown(cancel_futures=True)
        self._ready.clear()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> "Future[Batch | None]":
        return self._thread.submit(next, self._made, None)

    def _prepare(self, step: int, last: int | None) -> Iterator[Batch]:
        if self._device.type == "cuda":
            import torch

            torch.cuda.set_device(self._device)  # a new thread's current device is 0, and it would pin for that one
        while last is None or step <= last:
            for micro in range(self._batches.accumulate):
                batch = self._batches.batch(step, micro, self._rank, self._world)
                self._batches.weight(step, micro, self._rank, self._world)  # remembers the step's sum for the caller
                yield tuple(part.pin_memory() for part in batch) if self._device.type == "cuda" else batch
            step += 1
