"""`nvme`: blocks striped over swap files in one or more directories, moved by workers that bypass the page cache.

A block is cut into stripe units of 8 MiB, assigned round robin to the directories. A unit moves directly between disk
and the caller's memory if that is page-aligned. All else passes through staging buffers: GPU memory, odd addresses, the
last partial page, and (with `verify`) parts of a unit, because a checksum covers a whole one.

A block's true length, generation and checksums are in memory only. The file needs no header, as it cannot be read after
its process has ended.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tiers.base import PAGE_NBYTES, Tier, round_up
from tiers.copies import Copier, stream_position
from tiers.errors import TierError, TierFull, format_nbytes
from tiers.file_workers import FileWorker, LoopThread
from tiers.pages import Registrar, memory_of
from tiers.staging import Staging
from tiers.streams import current_stream
from tiers.stripes import Piece, Record, Unit, cut
from tiers.swapfile import SwapFile, disk_error, free_nbytes
from tiers.transfer import Transfer

UNIT_NBYTES = 8 << 20
_open_tiers: set[NvmeTier] = set()
_NUM_TAIL_PAGES = 32


class NvmeTier(Tier):
    """Swap on disk: `paths` are the directories, `verify` checks every read against a checksum from the write.

    Each directory has `workers` workers that read and as many that write, so a read never queues behind writes. That is
    twice as many as keep a disk busy: a worker is idle while the event loop finishes one unit and assigns the next.
    """

    name = "nvme"
    alignment = PAGE_NBYTES
    _full_hint = "free space there, add a directory on another disk, or place less on nvme"
    worker_class: type[FileWorker] = FileWorker

    def __init__(
        self,
        capacity: int | None = None,
        *,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        workers: int = 16,
        unit_nbytes: int = UNIT_NBYTES,
        direct: bool | Literal["auto"] = "auto",
        verify: bool = False,
        grow_nbytes: int = 64 << 20,
        staging_nbytes: int = 64 << 20,
        registrar: Registrar | None = None,
    ) -> None:
        directories = [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]
        if not directories:
            raise ValueError("nvme needs at least one directory")
        if workers < 1:
            raise ValueError(f"nvme needs at least one worker, not {workers}")
        if unit_nbytes <= 0 or unit_nbytes % PAGE_NBYTES:
            raise ValueError(f"a stripe unit is a multiple of {PAGE_NBYTES} bytes, not {unit_nbytes}")
        super().__init__(capacity)
        self._unit_nbytes = unit_nbytes
        self._verify = verify
        self._hazard_nbytes = unit_nbytes if verify else PAGE_NBYTES
        self._next_file = 0
        self._aborted = False
        registrar = registrar or Registrar()
        self._staging = Staging(max(staging_nbytes // unit_nbytes, 2), unit_nbytes, registrar)
        self._tails = Staging(_NUM_TAIL_PAGES, PAGE_NBYTES, registrar)
        self._copier = Copier(self.name)
        self._files: list[SwapFile] = []
        self._loop = LoopThread("nvme-loop")
        try:
            for directory in directories:
                file = SwapFile(directory, direct, grow_nbytes)
                self._files.append(file)
                self._open_workers(file, workers)
        except BaseException:
            self._closed = True
            self._close()
            raise
        self.notes = [note for file in self._files for note in file.notes]
        if capacity is None:
            self.capacity = self._room()
        _open_tiers.add(self)

    @property
    def footprint(self) -> int:
        return sum(file.extents.size for file in self._files)

    @property
    def file_nbytes(self) -> int:
        """Return the bytes that the swap files take on disk, as the system counts them: in blocks of 512."""
        return sum(512 * os.fstat(file.fd).st_blocks for file in self._files)

    def host_memory(self) -> list[Tensor]:
        return [pages.bytes for staging in (self._staging, self._tails) for pages in staging.made]

    @property
    def direct(self) -> bool:
        """Whether every directory supports O_DIRECT."""
        return all(file.direct for file in self._files)

    def describe(self) -> str:
        """Return what was found: `74.1 GiB free in /scratch (O_DIRECT)`."""
        mode = "O_DIRECT" if self.direct else "buffered"
        return "; ".join([f"{format_nbytes(self._room())} free in {self._where()} ({mode})", *self.notes])

    def _allocate(self, nbytes: int) -> Record:
        needed, room = round_up(nbytes, PAGE_NBYTES), self._room()
        if needed > room:
            raise self._full(needed, room)
        self._grow_for(nbytes)
        record = Record([])
        try:
            for start in range(0, nbytes, self._unit_nbytes):
                record.units.append(self._take(min(self._unit_nbytes, nbytes - start)))
        except TierError:
            self._free(record)
            raise
        return record

    def _free(self, handle: Record) -> None:
        for unit in handle.units:
            unit.file.extents.give(unit.start, round_up(unit.nbytes, PAGE_NBYTES))

    def _write(self, handle: Record, source: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        work = self._move_all(handle, source, offset, after, stream_position(source), writes=True)
        return Transfer(source.numel(), future=self._loop.run(work), hold=(source,), tier=self.name)

    def _read(self, handle: Record, target: Tensor, offset: int, after: Sequence[Transfer]) -> Transfer:
        work = self._move_all(handle, target, offset, after, stream_position(target), writes=False)
        return Transfer(target.numel(), future=self._loop.run(work), hold=(target,), tier=self.name)

    def _abort(self) -> None:
        self._aborted = True

    def _close(self) -> None:
        _open_tiers.discard(self)
        for file in self._files:
            self._loop.run(file.close()).result()
        self._loop.close()
        self._staging.release()
        self._tails.release()
        self._copier.close()
        self._files = []

    # Space

    def _open_workers(self, file: SwapFile, count: int) -> None:
        try:
            self._loop.run(file.open_workers(self.worker_class, count, count)).result()
        except OSError as error:
            raise disk_error(error, file.directory, "open a swap file") from error

    def _take(self, nbytes: int) -> Unit:
        """Reserve one unit in the file whose turn it is, or in the next that has room."""
        rounded = round_up(nbytes, PAGE_NBYTES)
        growth_limit = (self.capacity or 0) - self.footprint
        full: TierFull | None = None
        for _ in self._files:
            file = self._files[self._next_file]
            self._next_file = (self._next_file + 1) % len(self._files)
            try:
                return Unit(file, file.take(rounded, growth_limit), nbytes)
            except TierFull as error:
                full = error
        assert full is not None
        raise full

    def _grow_for(self, nbytes: int) -> None:
        """Grow each file once for its share of a large block, not unit by unit."""
        units_each = -(-nbytes // self._unit_nbytes) // len(self._files)
        for file in self._files:
            missing = units_each * self._unit_nbytes - file.extents.free
            if missing > self._unit_nbytes:
                try:
                    file.grow(missing, at_least=PAGE_NBYTES)
                except TierFull:
                    pass  # another file may have room; reserving the units will show

    def _room(self) -> int:
        """Return the bytes that can still be reserved; directories on one file system share its space."""
        disks = {os.stat(file.directory).st_dev: free_nbytes(file.directory) for file in self._files}
        return sum(file.extents.free for file in self._files) + sum(disks.values())

    def _where(self) -> str:
        return ", ".join(str(file.directory) for file in self._files)

    # Moving bytes (runs on the event loop's thread; the workers' threads do the work)

    async def _move_all(
        self,
        record: Record,
        data: Tensor,
        offset: int,
        after: Sequence[Transfer],
        position: torch.cuda.Event | None,
        writes: bool,
    ) -> None:
        for earlier in after:
            await _over(earlier)
        if position is not None and not data.is_cuda:
            await _reached(position)
        pieces = cut(record, data, offset, self._unit_nbytes)
        # Wait for all of them, even after a failure: the caller's memory must not be touched after this returns.
        results = await asyncio.gather(
            *(self._move_piece(record, piece, position, writes) for piece in pieces), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _move_piece(self, record: Record, piece: Piece, position: torch.cuda.Event | None, writes: bool) -> None:
        directory = piece.unit.file.directory
        if not writes and piece.index in record.broken:
            why = record.broken[piece.index]
            fact = f"{format_nbytes(piece.nbytes)} in {directory} cannot be read: their last write failed ({why})"
            raise TierError(fact, tier=self.name, path=str(directory))
        try:
            if not piece.in_place or (self._verify and not piece.whole):
                await self._move_staged(piece, position, writes)
            else:
                await self._move_in_place(piece, writes)
        except OSError as error:
            if writes:
                record.broken[piece.index] = str(error.strerror or error)
            raise disk_error(error, directory, "write" if writes else "read", piece.nbytes) from error
        if writes and piece.whole:
            record.broken.pop(piece.index, None)

    async def _move_in_place(self, piece: Piece, writes: bool) -> None:
        """Move whole pages from or to the caller's memory, and what is left of the last one through a page."""
        unit, memory, body = piece.unit, memory_of(piece.data), piece.body_nbytes
        queue, start = unit.file.writers if writes else unit.file.readers, unit.start + piece.start
        if body < len(memory):
            async with self._tails.buffer(PAGE_NBYTES) as page, self._turn(queue) as worker:
                tail = page.bytes[: len(memory) - body]
                if writes:
                    tail.copy_(piece.data[body:])
                    await worker.write(start + body, page.memory)
                else:
                    await worker.read(start + body, page.memory)
                    piece.data[body:].copy_(tail)
        async with self._turn(queue) as worker:
            if self._verify and writes:
                unit.checksum = await worker.call(zlib.crc32, memory)
            if body:
                await (worker.write if writes else worker.read)(start, memory[:body])
            if self._verify and not writes:
                await self._compare(worker, unit, memory)

    async def _move_staged(self, piece: Piece, position: torch.cuda.Event | None, writes: bool) -> None:
        """Move the whole pages around a piece through a buffer, or its whole unit if a checksum needs it."""
        unit, queue = piece.unit, piece.unit.file.writers if writes else piece.unit.file.readers
        first = 0 if self._verify else piece.start // PAGE_NBYTES * PAGE_NBYTES
        last = round_up(unit.nbytes if self._verify else piece.end, PAGE_NBYTES)
        async with (
            self._staging.buffer(last - first, piece.data.is_cuda) as pages,
            self._turn(queue) as worker,
        ):
            window = pages.bytes[: last - first]
            part = window[piece.start - first : piece.end - first]
            if not writes or piece.start > first or piece.end < min(last, unit.nbytes):
                await worker.read(unit.start + first, memory_of(window))
            if writes:
                await worker.call(self._copy, piece.data, part, position)
                if self._verify:
                    unit.checksum = await worker.call(zlib.crc32, memory_of(window[: unit.nbytes]))
                await worker.write(unit.start + first, memory_of(window))
            else:
                if self._verify:
                    await self._compare(worker, unit, memory_of(window[: unit.nbytes]))
                await worker.call(self._copy, part, piece.data, position)

    @contextlib.asynccontextmanager
    async def _turn(self, queue: asyncio.Queue[FileWorker]) -> AsyncIterator[FileWorker]:
        """Lend a worker; buffers are always taken before a worker, so that there is no deadlock."""
        worker = await queue.get()
        try:
            if self._aborted:
                raise TierError("nvme was closed with this transfer in flight", tier=self.name)
            yield worker
        finally:
            queue.put_nowait(worker)

    async def _compare(self, worker: FileWorker, unit: Unit, memory: memoryview) -> None:
        if unit.checksum is not None and await worker.call(zlib.crc32, memory) != unit.checksum:
            raise TierError(
                f"nvme read other bytes than it wrote: {format_nbytes(len(memory))} in {unit.file.directory} "
                f"at {unit.start} fail their checksum",
                tier=self.name,
                path=str(unit.file.directory),
                hint="the disk or its controller is faulty: give another directory, and resume from a checkpoint",
            )

    def _copy(self, source: Tensor, target: Tensor, position: torch.cuda.Event | None) -> None:
        """Copy to or from staging, synchronously, on the calling worker's thread."""
        if not (source.is_cuda or target.is_cuda):
            target.copy_(source)
            return
        device, direction = (target.device, "up") if target.is_cuda else (source.device, "down")
        stream = self._copier.stream(current_stream(device), device, direction)
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            if position is not None:
                stream.wait_event(position)
            target.copy_(source, non_blocking=True)
            event.record(stream)
        event.synchronize()


def _close_at_exit() -> None:
    for tier in list(_open_tiers):
        try:
            tier.close()
        except Exception:
            pass


# Open tiers are closed before the interpreter exits, so that their loop threads are not inside torch at that time.
# This private hook runs while executors still work; the public `atexit` runs after they have shut down.
getattr(threading, "_register_atexit", atexit.register)(_close_at_exit)


async def _over(transfer: Transfer) -> None:
    """Wait for an earlier transfer of the same block, however it ends."""
    if transfer.future is not None:
        await asyncio.gather(asyncio.wrap_future(transfer.future), return_exceptions=True)


async def _reached(position: torch.cuda.Event) -> None:
    """Wait until the caller's stream has reached `position`, without blocking a thread."""
    pause = 1e-4
    while not position.query():
        await asyncio.sleep(pause)
        pause = min(2 * pause, 2e-3)
