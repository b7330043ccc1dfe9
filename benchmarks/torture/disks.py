"""Faults of disks and memory, inside a rank: calls that fail, move too little, take long or never end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torture.faults import Fault

if TYPE_CHECKING:
    from torture.processes import Place

WRITES = ("pwrite", "pwritev", "fsync", "ftruncate", "rename", "replace", "mkdir", "open")
READS = ("pread", "preadv", "open")
BY_DESCRIPTOR = ("pwrite", "pwritev", "pread", "preadv", "fsync", "ftruncate")
PAGE_NBYTES = 4096


class Calls:
    """Counts the calls that a fault is about, from several threads, and says which are hit."""

    def __init__(self, fault: Fault, note: Callable[[], None]) -> None:
        self.fault, self._note, self._count, self._lock = fault, note, 0, threading.Lock()

    def hit(self) -> bool:
        fault = self.fault
        with self._lock:
            self._count += 1
            hit = self._count >= fault.at and (not fault.span or self._count < fault.at + fault.span)
        if hit:
            self._note()
        return hit

    def error(self) -> OSError:
        return OSError(self.fault.number, os.strerror(self.fault.number))


def install(fault: Fault, place: Place, note: Callable[[], None]) -> None:
    """Have this process' disk fail as the fault says."""
    calls = Calls(fault, note)
    if fault.where == "nvme":
        from tiers.nvme import NvmeTier

        NvmeTier.worker_class = worker_class(calls)
    elif fault.where == "dram":
        from tiers.copies import Copier

        Copier.copy = host_copies(calls, Copier.copy)  # type: ignore[method-assign]
    else:
        for name in fault.only.split(","):
            setattr(os, name, spoiled(name, getattr(os, name), calls, place.run))


def spoiled(name: str, act: Callable[..., Any], calls: Calls, folder: Path) -> Callable[..., Any]:
    """Return a function of `os` that fails for files of a folder, and for files under its descriptors."""
    fault, inside = calls.fault, str(folder)

    def path_of(first: Any) -> str:
        try:
            return os.readlink(f"/proc/self/fd/{first}") if name in BY_DESCRIPTOR else os.fspath(first)
        except (OSError, TypeError):
            return ""

    def spoil(first: Any, *args: Any, **kwargs: Any) -> Any:
        path = path_of(first)
        if not (path.startswith(inside) and "/checkpoints/" in path) or not calls.hit():
            return act(first, *args, **kwargs)
        if fault.act == "error":
            raise OSError(fault.number, os.strerror(fault.number), None if name in BY_DESCRIPTOR else path)
        if fault.act == "slow":
            time.sleep(fault.seconds)
        elif fault.act == "stuck":
            threading.Event().wait()
        elif fault.act == "short":
            return act(first, *_less(name, args))
        return act(first, *args, **kwargs)

    return spoil


def _less(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a read or write with a part of the bytes only: whole pages, for O_DIRECT."""
    if name in ("preadv", "pwritev"):
        [memory], *rest = args
        return ([memory[: _part(len(memory))]], *rest)
    memory, *rest = args
    return (memory[: _part(len(memory))], *rest) if name == "pwrite" else args


def _part(nbytes: int) -> int:
    return nbytes if nbytes <= PAGE_NBYTES else max(PAGE_NBYTES, nbytes // 2 // PAGE_NBYTES * PAGE_NBYTES)


def worker_class(calls: Calls) -> type:
    """Return workers of the nvme tier that fail; `only` is read, write, or nothing for both."""
    from tiers.file_workers import FileWorker

    fault = calls.fault

    class Faulty(FileWorker):
        async def _write(self, memory: memoryview) -> int | None:
            return await self._spoil("write", super()._write, memory)

        async def _read(self, memory: memoryview) -> int | None:
            return await self._spoil("read", super()._read, memory)

        async def _spoil(self, name: str, act: Callable[..., Any], memory: memoryview) -> int | None:
            if not name.startswith(fault.only) or not calls.hit():
                return await act(memory)
            if fault.act == "error":
                raise calls.error()
            if fault.act == "slow":
                await asyncio.sleep(fault.seconds)
            elif fault.act == "stuck":
                await asyncio.Event().wait()
            elif fault.act == "short":
                return await act(memory[: _part(len(memory))])
            return await act(memory)

    return Faulty


def host_copies(calls: Calls, copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return the copies of host memory, some of which take long or never end."""
    from tiers.transfer import Transfer

    def act(self: Any, source: Any, target: Any, after: Any = (), *events: Any) -> Any:
        if not calls.hit():
            return copy(self, source, target, after, *events)
        if calls.fault.act == "slow":
            time.sleep(calls.fault.seconds)
            return copy(self, source, target, after, *events)
        return Transfer(source.numel(), future=Future(), hold=(source, target), tier="dram")

    return act
