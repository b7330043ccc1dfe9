"""The reader: DCP's storage for loading. Every piece is hashed before a byte of it is used; nothing is unpickled."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import defaultdict, deque
from collections.abc import Generator
from concurrent.futures import Future as HostFuture
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.futures import Future

from tiers.pages import memory_of
from zerocli.checkpoint.manifest import Damaged, Manifest, Piece, Tensor, Unreadable, open_file, piece_hash, read
from zerocli.checkpoint.parts import LoadPlanner, Part
from zerocli.files import pread
from zerocli.ranks.startup import STARTUP

NUM_THREADS = 4
MAX_READS = 2 * NUM_THREADS
"""Number of boxes that are read concurrently."""


class Reader(StorageReader):
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
        for index in range(len(tensor.pieces)):
            self._place(whole, name, index)
        return whole

    def _place(self, whole: torch.Tensor, name: str, index: int) -> None:
        piece = self.manifest.tensors[name].pieces[index]
        values = self.piece(name, index)
        whole[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))] = values

    # -- what DCP calls --------------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any) -> Metadata:
        entries = {name: _entry(tensor) for name, tensor in self.manifest.tensors.items()}
        return Metadata(state_dict_metadata=dict(entries))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Fill the parts, box by box, through a bounded number of boxes in host memory."""
        with (
            STARTUP.by_itself(f"reading the checkpoint of step {self.manifest.step}"),
            contextlib.closing(
                self._boxes(plan.items, planner)
            ) as boxes,  # its threads must end before the files are closed
        ):
            for part, start, values in boxes:
                part.source.write(start, values)
                STARTUP.move()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _boxes(self, items: list[ReadItem], planner: LoadPlanner) -> Generator[tuple[Part, int, torch.Tensor]]:
        grouped: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in items:
            grouped[item.dest_index.fqn, tuple(item.dest_index.offset or ())].append(item)
        under_way: deque[tuple[Part, int, HostFuture[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            for group in grouped.values():
                part = planner.part(group[0])
                box = part.box(group[0].dest_index)
                under_way.append((part, box.start, threads.submit(self._assemble, part, box.sizes, group)))
                if len(under_way) >= MAX_READS:
                    done, start, future = under_way.popleft()
                    yield done, start, future.result()
            for done, start, future in under_way:
                yield done, start, future.result()

    def _assemble(self, part: Part, sizes: tuple[int, ...], items: list[ReadItem]) -> torch.Tensor:
        """Return a box's elements, in the part's dtype, from all pieces that overlap it."""
        if sum(torch.Size(item.lengths).numel() for item in items) != torch.Size(sizes).numel():
            raise Damaged(f"the pieces of {part.name} do not cover it exactly")
        box = torch.empty(sizes, dtype=part.dtype)
        for item in items:
            assert item.storage_index.index is not None
            piece = self._cached(item.storage_index.fqn, item.storage_index.index)
            _cut(box, item.dest_offsets, item.lengths).copy_(_cut(piece, item.storage_offsets, item.lengths))
        return box.view(-1)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _cut(tensor: torch.Tensor, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _entry(tensor: Tensor) -> TensorStorageMetadata:
    chunks = [_chunk(piece) for piece in tensor.pieces]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
