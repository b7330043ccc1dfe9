"""The writer: DCP's storage for saving. Every rank streams its own boxes into one file; rank 0 commits the manifest.

The order of operations makes a save whole or absent: each rank writes and syncs its file in `step-N.tmp`; when all
have, rank 0 writes and syncs `manifest.json.part` beside them, renames the folder to `step-N`, and last of all renames
the manifest, which commits it. A failure before that leaves a folder that readers do not accept as a checkpoint. An
existing checkpoint of the same step is set aside just before; if the new one is never committed, `Folder.recover`
restores it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future as HostFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tiers.base import PAGE_NBYTES, round_up
from tiers.pages import memory_of
from zerocli.checkpoint import manifest as manifests
from zerocli.checkpoint.folder import MANIFEST, OLD, UNFINISHED
from zerocli.checkpoint.manifest import Manifest, Piece, Tensor
from zerocli.checkpoint.snapshot import Batch, Snapshot
from zerocli.engine.events import SILENT, Events
from zerocli.files import DirectFile, pwrite_all
from zerocli.ranks.progress import Progress
from zerocli.regular_files import remove, sync_folder

NUM_THREADS = 8
"""Slots processed concurrently: about half keep a fast disk busy while the others are hashed."""


@dataclass(frozen=True)
class Placed:
    """Where a box was written."""

    file: str
    position: int
    sha256: str


class Writer(StorageWriter):
    """Writes one checkpoint to `folder`, through `folder`.tmp."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        snapshot: Snapshot,
        values: dict[str, Any],
        step: int,
        events: Events = SILENT,
        progress: Progress | None = None,
    ) -> None:
        self._progress = progress or Progress()
        self.folder, self.aside = folder, folder.with_name(folder.name + ".tmp")
        self._snapshot = snapshot
        self._values, self._step, self._events = values, step, events
        self._name = f"rank-{rank:05d}.bin"
        self.committed = False
        """Whether the checkpoint is committed; valid on rank 0."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # Copies are issued first, as the next update waits for them; and here, because DCP reports a failure here
        # to the other ranks.
        with self._progress.by_itself("read"):
            self._snapshot.start()
        if is_coordinator:
            with self._progress.by_itself("clearing"):
                remove(self.aside)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._progress.together("planning")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Only the coordinator calls this, after every rank has planned and before any writes.
        with self._progress.by_itself("planning"):
            self.aside.mkdir()  # without parents: do not recreate a run folder that was removed
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write the plan's boxes, in the order of the next update; return once they are on the disk."""
        self._progress.arrived()
        # Of boxes that several ranks hold, the plan keeps only one.
        planned = {(item.index.fqn, tuple(item.index.offset or ())): item for item in plan.items}
        done: Future[list[WriteResult]] = Future()
        with self._progress.by_itself("write"):
            done.set_result(self._write(planned))
        self._progress.together("commit")
        return done

    def _write(self, planned: dict[tuple[str, tuple[int, ...]], WriteItem]) -> list[WriteResult]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(self.aside / self._name, flags, 0o644))
        results: list[HostFuture[list[WriteResult]]] = []
        with DirectFile(self.aside / self._name) as file:
            with ThreadPoolExecutor(NUM_THREADS, "zerocli-checkpoint") as threads:
                at = 0
                for batch in self._snapshot.batches:
                    self._events.save("read")
                    self._snapshot.fill(batch)
                    self._progress.move()
                    results.append(threads.submit(self._flush, file, at, batch, planned))
                    at += round_up(batch.nbytes, PAGE_NBYTES)
                    for future in results:  # stop at the first failure, such as a full disk
                        if future.done():
                            future.result()
            written = [result for future in results for result in future.result()]
            with self._progress.by_itself("sync"):
                self._events.save("sync")
                file.sync()
                sync_folder(self.aside)
        return written

    def _flush(
        self, file: DirectFile, at: int, batch: Batch, planned: dict[tuple[str, tuple[int, ...]], WriteItem]
    ) -> list[WriteResult]:
        """Hash a batch's boxes and write its slot, whole pages; the slot is free afterwards."""
        slot = self._snapshot.fill(batch)
        try:
            slot.wait()
            memory = memory_of(slot.bytes)
            written = []
            for part, box, start in batch.boxes:
                item = planned.get((part.name, box.offsets))
                if item is not None:
                    nbytes = box.numel * part.dtype.itemsize
                    digest = manifests.piece_hash(self._step, part.name, part.dtype, box.offsets, box.sizes)
                    digest.update(memory[start : start + nbytes])
                    placed = Placed(self._name, at + start, digest.hexdigest())
                    written.append(WriteResult(index=item.index, size_in_bytes=nbytes, storage_data=placed))
            self._events.save("write")
            if written:
                file.write(memory[: round_up(batch.nbytes, PAGE_NBYTES)], at)
            self._progress.move()
            return written
        finally:
            self._snapshot.written(batch)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; every rank's bytes are on disk by now."""
        with self._progress.by_itself("commit"):
            self._commit(metadata, results)

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        tensors: dict[str, Tensor] = {}
        chunks = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = Tensor(entry.properties.dtype, tuple(entry.size))
            chunks[name] = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        for result in (result for rank in results for result in rank):
            name, offsets, placed = result.index.fqn, tuple(result.index.offset or ()), result.storage_data
            piece = Piece(offsets, chunks[name][offsets], placed.file, placed.position, placed.sha256)
            tensors[name].pieces.append(piece)
        # A file system may have its own files there (.nfs...), which readers would refuse.
        names = [name for name in os.listdir(self.aside) if manifests.FILE.fullmatch(name)]
        files = {name: (self.aside / name).stat().st_size for name in names}
        data = manifests.encode(Manifest(self._step, tensors, files, self._values))
        self._events.save("manifest")
        fd = os.open(self.aside / UNFINISHED, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            pwrite_all(fd, memoryview(data), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(self.aside)
        replaced = self.folder.with_name(self.folder.name + OLD)
        if os.path.lexists(self.folder):  # of the same step: removed after the commit, or restored
            remove(replaced)
            self.folder.rename(replaced)
        self._events.save("rename")
        self.aside.rename(self.folder)
        self._events.save("commit")
        (self.folder / UNFINISHED).rename(self.folder / MANIFEST)
        self.committed = True
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        self._events.save("committed")
        remove(replaced)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names to disk."""
    if not path.exists():
        make_folder(path.parent)
        path.mkdir()
        sync_folder(path.parent)
