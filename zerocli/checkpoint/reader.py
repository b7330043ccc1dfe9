"""The reader: fills parts from a checkpoint's files. Every piece is hashed before a byte of it is used."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from tiers.pages import memory_of
from zerocli.checkpoint.boxes import Box, overlapping
from zerocli.checkpoint.manifest import Damaged, Manifest, Unreadable, open_file, piece_hash, read
from zerocli.checkpoint.sources import Part
from zerocli.files import pread
from zerocli.ranks.startup import STARTUP

T = TypeVar("T")
NUM_THREADS = 4
MAX_READS = 2 * NUM_THREADS
"""Number of boxes that are read concurrently."""


class Reader:
    """Reads one checkpoint; raises Damaged at the first byte that is not what was written."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self.manifest = read(folder) if manifest is None else manifest
        self._fds: dict[str, tuple[int, int | None]] = {}
        """Of each file that something was read from: its descriptor, and one that bypasses the page cache."""
        self._opening = threading.Lock()
        # Adjacent boxes often share a piece.
        self._cached = functools.lru_cache(maxsize=MAX_READS)(self.piece)

    def close(self) -> None:
        for fd in (fd for pair in self._fds.values() for fd in pair if fd is not None):
            os.close(fd)
        self._fds = {}
        self._cached.cache_clear()

    def _opened(self, name: str) -> tuple[int, int | None]:
        """Return the descriptors of a file; refuse anything that is not a regular file in the folder."""
        with self._opening:
            if name not in self._fds:
                fd, direct = open_file(self.folder, name), None
                with contextlib.suppress(OSError, AttributeError):  # reopen the same file, even if it was renamed
                    direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
                self._fds[name] = fd, direct
            return self._fds[name]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- pieces and tensors ----------------------------------------------------------------------------------------

    def piece(self, name: str, index: int) -> torch.Tensor:
        """Return one piece of a tensor, in its own shape."""
        tensor = self.manifest.tensors[name]
        piece = tensor.pieces[index]
        nbytes = piece.numel * tensor.dtype.itemsize
        fd, direct = self._opened(piece.file)
        try:
            memory = pread(fd, nbytes, piece.position, direct, STARTUP.move)
        except OSError as error:
            raise Unreadable(
                f"{self.folder / piece.file} cannot be read at byte {piece.position} ({name}): {error.strerror}"
            ) from None
        about = (name, tensor.dtype, piece.offsets, piece.sizes)
        digest = piece_hash(self.manifest.step, *about, version=self.manifest.version)
        digest.update(memory_of(memory))
        if len(memory) < nbytes or digest.hexdigest() != piece.sha256:
            raise Damaged(
                f"{piece.file} is damaged within bytes {piece.position} to {piece.position + nbytes} ({name})"
            )
        return memory.view(tensor.dtype).view(piece.sizes)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        tensor = self.manifest.tensors[name]
        if len(tensor.pieces) == 1:
            return self.piece(name, 0)
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for index, piece in enumerate(tensor.pieces):
            place = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
            whole[place] = self.piece(name, index)
        return whole

    # -- parts -----------------------------------------------------------------------------------------------------

    def fill(self, parts: Iterable[Part]) -> None:
        """Fill the parts, box by box, through a bounded number of boxes in host memory."""
        reading = STARTUP.by_itself(f"reading the checkpoint of step {self.manifest.step}")
        with reading, ThreadPoolExecutor(NUM_THREADS) as threads:
            for part, start, values in in_order(threads, self._boxes(parts), MAX_READS):
                part.source.write(start, values)
                STARTUP.move()

    def _boxes(self, parts: Iterable[Part]) -> Iterator[Callable[[], tuple[Part, int, torch.Tensor]]]:
        for part in parts:
            pieces = self.manifest.tensors[part.name].pieces
            places = [piece.offsets for piece in pieces], [piece.sizes for piece in pieces]
            for box, found in zip(part.boxes, overlapping(part.boxes, *places), strict=True):
                yield functools.partial(self._assemble, part, box, found)

    def _assemble(self, part: Part, box: Box, pieces: list[int]) -> tuple[Part, int, torch.Tensor]:
        """Return where a box begins, and its elements in the part's dtype, from all pieces that overlap it."""
        made, left = torch.empty(box.sizes, dtype=part.dtype), box.numel
        for index in pieces:
            piece = self.manifest.tensors[part.name].pieces[index]
            firsts = [max(ours, theirs) for ours, theirs in zip(box.offsets, piece.offsets, strict=True)]
            lasts = [
                min(ours + size, theirs + its)
                for ours, size, theirs, its in zip(box.offsets, box.sizes, piece.offsets, piece.sizes, strict=True)
            ]
            values = self._cached(part.name, index)[_within(firsts, lasts, piece.offsets)]
            made[_within(firsts, lasts, box.offsets)] = values
            left -= values.numel()
        if left:
            raise Damaged(f"the pieces of {part.name} do not cover it exactly")
        return part, box.start, made.view(-1)


def _within(firsts: list[int], lasts: list[int], offsets: tuple[int, ...]) -> tuple[slice, ...]:
    """Return the slices of what lies between these corners in a box that begins at `offsets`."""
    return tuple(slice(a - at, b - at) for a, b, at in zip(firsts, lasts, offsets, strict=True))


def in_order(threads: ThreadPoolExecutor, acts: Iterable[Callable[[], T]], most: int) -> Iterator[T]:
    """Yield what these functions return, in their order, at most `most` of them under way; a failure cancels others."""
    under_way: deque[Future[T]] = deque()
    try:
        for act in acts:
            under_way.append(threads.submit(act))
            if len(under_way) >= most:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
