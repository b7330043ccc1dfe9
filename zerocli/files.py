"""Files around the page cache, where the file system can: bytes that pass once would evict others' from it.

O_DIRECT asks for whole pages of page-aligned memory at page-aligned places; what is not so is made so here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import torch

from tiers.base import PAGE_NBYTES, round_up
from tiers.pages import Pages, memory_of

BLOCK_NBYTES = 16 << 20
"""What a `BlockFile` writes at once."""


class DirectFile:
    """An existing file, written whole pages at a time; safe from several threads."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def write(self, memory: memoryview, at: int) -> None:
        """Write whole pages of page-aligned memory."""
        if self._direct is not None:
            try:
                pwrite_all(self._direct, memory, at)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # this is how some file systems say that they cannot
                    raise
        pwrite_all(self._fd, memory, at)

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        os.fsync(self._fd)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self._direct is not None:
            os.close(self._direct)


class _Block:
    """A page-aligned part of a file on its way together; `missing` bytes have not come yet."""

    def __init__(self, pages: Pages, missing: int) -> None:
        self.memory, self.pages, self.missing = pages.memory, pages, missing


class BlockFile:
    """A new file of known size, every byte given once, in any order and by several threads.

    A block is written by whoever brings its last byte. Memory is that of the blocks which are begun and not whole.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
        self._file, self._nbytes = DirectFile(path), nbytes
        self._blocks: dict[int, _Block] = {}
        self._free: list[Pages] = []
        self._lock = threading.Lock()

    def write(self, data: memoryview, at: int) -> None:
        """Take bytes for the place `at` of the file."""
        done = 0
        while done < len(data):
            index, inside = divmod(at + done, BLOCK_NBYTES)
            count = min(len(data) - done, BLOCK_NBYTES - inside)
            block = self._begun(index)
            block.memory[inside : inside + count] = data[done : done + count]
            self._came(index, block, count)
            done += count

    def _begun(self, index: int) -> _Block:
        with self._lock:
            if index not in self._blocks:
                pages = self._free.pop() if self._free else Pages(BLOCK_NBYTES)
                self._blocks[index] = _Block(pages, min(BLOCK_NBYTES, self._nbytes - index * BLOCK_NBYTES))
            return self._blocks[index]

    def _came(self, index: int, block: _Block, count: int) -> None:
        with self._lock:
            block.missing -= count
            if block.missing:
                return
        start = index * BLOCK_NBYTES
        whole = round_up(min(BLOCK_NBYTES, self._nbytes - start), PAGE_NBYTES)
        self._file.write(block.memory[:whole], start)
        with self._lock:
            del self._blocks[index]
            self._free.append(block.pages)

    def finish(self) -> None:
        """Have all of it on the disk."""
        assert not self._blocks, "bytes of the file were never given"
        self._file.truncate(self._nbytes)
        self._file.sync()

    def close(self) -> None:
        self._file.__exit__()


def pread(fd: int, nbytes: int, at: int, direct: int | None = None) -> torch.Tensor:
    """Return bytes of a file, fewer where it ends; through the descriptor `direct`, if given, around the page cache."""
    before = at % PAGE_NBYTES if direct is not None else 0
    room = round_up(before + nbytes, PAGE_NBYTES) if direct is not None else nbytes
    memory = torch.empty(room + PAGE_NBYTES, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % PAGE_NBYTES :][:room]
    view, done = memory_of(memory), 0
    while done < before + nbytes:
        try:
            got = os.preadv(fd if direct is None else direct, [view[done:]], at - before + done)
        except OSError as error:
            if direct is None or error.errno != errno.EINVAL:
                raise
            return pread(fd, nbytes, at)
        if not got:
            break
        done += got
    return memory[before : min(done, before + nbytes)]


def pwrite_all(fd: int, memory: memoryview, at: int) -> None:
    """Write all of the memory at a place of the file."""
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], at + done)
