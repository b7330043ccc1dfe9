"""Disk I/O in flight: one event loop in a thread, and workers, each an aiofiles handle with its own thread.

aiofiles has no positioned read, so each operation in flight needs a handle of its own: a worker.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import aiofiles

from tiers.base import PAGE_NBYTES

T = TypeVar("T")
Move = Callable[[memoryview], Coroutine[Any, Any, int | None]]


class LoopThread:
    """An event loop that runs in a daemon thread until closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start `work` on the loop; any thread can wait for its future."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class FileWorker:
    """One handle on a file, for one operation at a time; fault tests replace `_write` and `_read`."""

    def __init__(self, name: str, direct: bool) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._direct = direct
        self._file: Any = None

    async def open(self, path: str) -> None:
        """Open the worker's own handle."""
        extra = os.O_DIRECT if self._direct else 0
        self._file = await aiofiles.open(
            path,
            "r+b",
            buffering=0,
            opener=lambda name, flags: os.open(name, flags | extra | os.O_CLOEXEC),
            executor=self._executor,
        )

    async def write(self, offset: int, memory: memoryview) -> None:
        """Write all of `memory` at `offset`, however many calls that takes."""
        await self._move_all(self._write, offset, memory, "written, and no more will be")

    async def read(self, offset: int, memory: memoryview) -> None:
        """Fill all of `memory` from `offset`, however many calls that takes."""
        await self._move_all(self._read, offset, memory, "there to read")

    async def _move_all(self, move: Move, offset: int, memory: memoryview, words: str) -> None:
        done = 0
        while done < len(memory):
            # The handle is unbuffered, so its position is the kernel's and need not be set in the thread.
            os.lseek(self._file.fileno(), offset + done, os.SEEK_SET)
            progress = await move(memory[done:]) or 0
            if self._direct and progress < len(memory) - done:  # the remainder must start on a page
                progress = progress // PAGE_NBYTES * PAGE_NBYTES
            if progress == 0:
                raise OSError(f"only {done} of {len(memory)} bytes were {words}")
            done += progress

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run host work (a copy, a checksum) on the worker's thread, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def close(self) -> None:
        """Close the handle and end the thread."""
        if self._file is not None:
            await self._file.close()  # on the worker's thread, so after what it was doing
        self._executor.shutdown(wait=True)

    async def _write(self, memory: memoryview) -> int | None:
        done: int | None = await self._file.write(memory)
        return done

    async def _read(self, memory: memoryview) -> int | None:
        done: int | None = await self._file.readinto(memory)
        return done
