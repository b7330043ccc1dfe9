"""The writer: every rank streams its own boxes into one file; rank 0 commits the manifest.

The order of operations makes a save whole or absent: each rank writes and syncs its file in `step-N.tmp`; when all
have, rank 0 writes and syncs `manifest.json.part` beside them, renames the folder to `step-N`, and last of all renames
the manifest, which commits it. A failure before that leaves a folder that readers do not accept as a checkpoint. An
existing checkpoint of the same step is set aside just before; if the new one is never committed, `Folder.recover`
restores it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tiers.base import PAGE_NBYTES, round_up
from tiers.pages import memory_of
from zerocli.checkpoint import manifest as manifests
from zerocli.checkpoint.folder import MANIFEST, OLD, UNFINISHED
from zerocli.checkpoint.manifest import Manifest, Piece, Tensor
from zerocli.checkpoint.snapshot import Batch, Snapshot
from zerocli.engine.events import Events
from zerocli.files import DirectFile, pwrite_all
from zerocli.garbage import paused
from zerocli.ranks.exchange import broadcast_json, collect_json
from zerocli.ranks.startup import Progress
from zerocli.ranks.words import by_words, named
from zerocli.regular_files import remove, sync_folder

NUM_THREADS = 8
"""Slots processed concurrently: about half keep a fast disk busy while the others are hashed."""


Written = dict[str, list[list[Any]]]
"""What a rank wrote, by tensor: the offsets, sizes, position in its file and hash of each box."""


class Failed(Exception):
    """A save that failed on some ranks: what each of them says."""

    def __init__(self, said: Mapping[int, str]) -> None:
        super().__init__("; ".join(f"{words} ({named(ranks)})" for words, ranks in by_words(said).items()))


class Writer:
    """Writes one checkpoint to `folder`, through `folder`.tmp."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        snapshot: Snapshot,
        values: dict[str, Any],
        step: int,
        events: Events,
        progress: Progress,
    ) -> None:
        self.folder, self.aside = folder, folder.with_name(folder.name + ".tmp")
        self._snapshot = snapshot
        self._values, self._step, self._events, self._progress = values, step, events, progress
        self._name = file_name(rank)
        self.committed = False
        """Whether the checkpoint is committed; valid on rank 0."""

    def save(self, group: dist.ProcessGroup | None) -> None:
        """Write the checkpoint; return on all ranks once it is committed. Collective; raises Failed on all ranks."""
        self._together("planning", group, self._begin, self._clear)
        self._together("commit", group, self._write, self._commit)

    def _together(
        self,
        stage: str,
        group: dist.ProcessGroup | None,
        mine: Callable[[], Any],
        first: Callable[[list[Any]], None],
    ) -> None:
        """Run `mine` on every rank, then `first` on the first rank with what `mine` returned on each of them.

        If either fails anywhere, all ranks raise Failed.
        """
        result = failure = None
        try:
            result = mine()
        except Exception as error:
            failure = in_words(error)
        self._progress.together(stage)
        everyone = collect_json([result, failure], group)
        said = [(rank, words) for rank, (_, words) in enumerate(everyone) if words]
        if everyone and not said:
            try:
                with self._progress.by_itself(stage):
                    first([given for given, _ in everyone])
            except Exception as error:
                said = [(0, in_words(error))]
        said = broadcast_json(said, group)
        self._progress.arrived()
        if said:
            raise Failed(dict(said))

    def _begin(self) -> None:
        """Issue the copies first, as the next update waits for them."""
        with self._progress.by_itself("read"):
            self._snapshot.start()

    def _clear(self, everyone: list[None]) -> None:
        remove(self.aside)
        self.aside.mkdir()  # without parents: do not recreate a run folder that was removed

    def _write(self) -> tuple[dict[str, Any], Written]:
        """Write the boxes, in the order of the next update; return the tensors they are of, and what was written.

        They are on the disk then.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        results: list[Future[Written]] = []
        with self._progress.by_itself("write"):
            os.close(os.open(self.aside / self._name, flags, 0o644))
            with DirectFile(self.aside / self._name) as file:
                with ThreadPoolExecutor(NUM_THREADS, "zerocli-checkpoint") as threads:
                    at = 0
                    for batch in self._snapshot.batches:
                        self._events.save("read")
                        self._snapshot.fill(batch)
                        self._progress.move()
                        results.append(threads.submit(self._flush, file, at, batch))
                        at += round_up(batch.nbytes, PAGE_NBYTES)
                        for future in results:  # stop at the first failure, such as a full disk
                            if future.done():
                                future.result()
                with self._progress.by_itself("sync"):
                    self._events.save("sync")
                    file.sync()
                    sync_folder(self.aside)
        written: Written = {}
        for name, boxes in (each for future in results for each in future.result().items()):
            written.setdefault(name, []).extend(boxes)
        parts = self._snapshot.parts
        return {name: [manifests.name_of(parts[name].dtype), parts[name].shape] for name in written}, written

    def _flush(self, file: DirectFile, at: int, batch: Batch) -> Written:
        """Hash a batch's boxes and write its slot, whole pages; the slot is free afterwards."""
        slot = self._snapshot.fill(batch)
        try:
            slot.wait()
            memory = memory_of(slot.bytes)
            written: Written = {}
            for part, box, start in batch.boxes:
                digest = manifests.piece_hash(self._step, part.name, part.dtype, box.offsets, box.sizes)
                digest.update(memory[start : start + box.numel * part.dtype.itemsize])
                placed = [box.offsets, box.sizes, at + start, digest.hexdigest()]
                written.setdefault(part.name, []).append(placed)
            self._events.save("write")
            file.write(memory[: round_up(batch.nbytes, PAGE_NBYTES)], at)
            self._progress.move()
            return written
        finally:
            self._snapshot.written(batch)

    def _commit(self, everyone: list[Any]) -> None:
        """Commit what all ranks wrote; their bytes are on disk by now."""
        tensors = tensors_of(everyone)
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


@paused()
def tensors_of(everyone: list[Any]) -> dict[str, Tensor]:
    """Return the tensors that all ranks wrote, from what `_write` returned on each."""
    tensors: dict[str, Tensor] = {}
    for rank, (about, written) in enumerate(everyone):
        for name, boxes in written.items():
            dtype, shape = about[name]
            tensor = tensors.setdefault(name, Tensor(manifests.DTYPES[dtype], tuple(shape)))
            tensor.pieces += [Piece(tuple(o), tuple(s), file_name(rank), at, sha) for o, s, at, sha in boxes]
    return tensors


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def in_words(error: BaseException) -> str:
    """Return a one-line description of an error on one rank."""
    if isinstance(error, OSError) and error.errno:
        where = f": {error.filename}" if error.filename else ""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return f"{'the disk is full' if full else error.strerror}{where}"
    return f"{type(error).__name__}: {error}" if not str(error) or isinstance(error, KeyError) else str(error)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names to disk."""
    if not path.exists():
        make_folder(path.parent)
        path.mkdir()
        sync_folder(path.parent)
