"""The saver: takes a snapshot of a step, writes it in the background, and prunes old checkpoints.

One save runs at a time, in its own thread and process group, so its messages never interleave with those of
training. A save that fails (a full disk) is reported and leaves earlier checkpoints unchanged; the next save tries
again.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tiers.limits import read_limits
from zerocli.checkpoint import state
from zerocli.checkpoint.best import Best
from zerocli.checkpoint.folder import Folder
from zerocli.checkpoint.members import control_group, rank_of
from zerocli.checkpoint.snapshot import Slots, Snapshot
from zerocli.checkpoint.writer import Writer, in_words, make_folder
from zerocli.engine.engine import Engine
from zerocli.layout.sizes import format_bytes
from zerocli.ranks.loss import Severed, severed
from zerocli.ranks.startup import Progress

BUFFER_NBYTES = 1 << 30
MIN_ADVISED_SECONDS = 0.5
"""Training must have waited this long for a save before a larger buffer is suggested."""


class Saver:
    """Saves an engine's steps into a folder; every rank makes one, and all calls are collective."""

    def __init__(
        self,
        engine: Engine,
        folder: str | Path,
        *,
        asynchronous: bool = True,
        buffer_nbytes: int = BUFFER_NBYTES,
        keep: int = 2,
        keep_every: int = 0,
        best: Best | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._engine, self.folder = engine, Folder(folder)
        self._asynchronous, self._keep, self._keep_every = asynchronous, keep, keep_every
        self._say, self._best = say, best
        self._rank = rank_of(engine)
        self._group = control_group(engine)
        if self._rank == 0:
            with contextlib.suppress(OSError):  # then each save fails and reports why
                make_folder(self.folder.path)
        written = sum(part.nbytes for part in state.state_parts(engine, written=True))
        self._buffer_nbytes, self._advised = self._affordable(buffer_nbytes, written), False
        self._slots = Slots(self._buffer_nbytes, engine.device)
        if asynchronous and engine.device.type == "cuda":  # before the first step, not within one
            self._slots.prepare(written)
        self._thread: threading.Thread | None = None
        self.progress = Progress()
        """What the save is doing, for a watchdog."""
        self.failure: str | None = None
        """What went wrong with the last save; None if it was written."""
        self.lost: Severed | None = None
        """Set if the last save failed because another rank was lost; it cannot be retried."""
        self.asked: int | None = None
        """The last step for which a save was requested."""
        self.saved: int | None = None
        """The last step that was saved."""
        self.last_seconds = self.longest_seconds = 0.0
        """Seconds of the last save and the longest, from snapshot to commit."""

    def _affordable(self, asked: int, written: int) -> int:
        """Return the buffer that the host can afford: at most half of its free memory, shared by its ranks."""
        room = read_limits().available // 2 // self._engine.local_world
        if min(asked, written) <= room:
            return asked
        if self._rank == 0:
            size, limit = format_bytes(asked), format_bytes(room)
            self._say(f"checkpoint.buffer is {size}; this host can spare {limit} per rank, which is used instead")
        return room

    @property
    def nbytes(self) -> int:
        """Bytes of host memory for snapshots; never more than the buffer."""
        return self._slots.nbytes

    def save(self, step: int, values: dict[str, Any] | None = None) -> None:
        """Take a snapshot of the step and start to write it; return when training may continue. Collective."""
        self.wait()
        began = time.monotonic()
        parts, own = state.capture(self._engine)
        snapshot = Snapshot(parts, self._engine.device, self._slots)
        own |= values or {}
        writer = Writer(self.folder.of(step), self._rank, snapshot, own, step, self._engine.events, self.progress)
        self.asked, self.failure, self.lost = step, None, None
        if not self._asynchronous:
            self._write(writer, snapshot, step, began)
            return
        self._engine.updater.chunks.before_update = snapshot.hold_update
        run = (writer, snapshot, step, began)
        self._thread = threading.Thread(target=self._write, args=run, name="zerocli-saver", daemon=True)
        self._thread.start()

    def _write(self, writer: Writer, snapshot: Snapshot, step: int, began: float) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.set_device(self._engine.device)
        self.progress.begin(step)
        try:
            writer.save(self._group)
        except Exception as error:
            self._fail(writer, step, error)
            return
        finally:
            self.progress.arrived()
            snapshot.stop_holding()
        seconds = time.monotonic() - began
        self.last_seconds, self.longest_seconds = seconds, max(self.longest_seconds, seconds)
        self.saved = step
        if self._rank == 0:
            self._say(f"checkpoint of step {step} saved in {seconds:.1f} s: {writer.folder}{self._advice(snapshot)}")
            with contextlib.suppress(OSError):  # the next save tries to remove it again
                if self._best is not None:
                    self._best.commit(step)
                self.folder.prune(step, self._keep, self._keep_every, self._best.step if self._best else None)

    def _advice(self, snapshot: Snapshot) -> str:
        """Return, once, advice on a larger buffer if updates had to wait for this save; else an empty text."""
        held, wanted = snapshot.held_seconds, snapshot.wanted_nbytes
        if self._advised or held < MIN_ADVISED_SECONDS or wanted <= self._buffer_nbytes:
            return ""
        self._advised = True
        size = f"{-(-wanted // 2**30)}GiB"
        return f"; updates waited {held:.1f} s for it; --set checkpoint.buffer={size} (host memory) would avoid that"

    def _fail(self, writer: Writer, step: int, error: BaseException) -> None:
        self.lost = severed(error, f"checkpoint of step {step}")
        self.failure = f"the checkpoint of step {step} was not written: {describe(error)}"
        if self._rank != 0:
            return
        if writer.committed:  # a rank was lost after the commit
            self.saved = step
            self._say(f"checkpoint of step {step} saved: {writer.folder}")
            return
        with contextlib.suppress(OSError):  # a lost disk fails here too; report anyway
            self.folder.sweep()  # under either of its names, to free its space
            before = [found.step for found in self.folder.committed()]
            stays = f"that of step {before[0]} is kept" if before else "there is no earlier one"
            free = shutil.disk_usage(self.folder.path).free if self.folder.path.is_dir() else 0
            room = "" if self.lost else f" ({format_bytes(free)} free in {self.folder.path})"
            self._say(f"error: {self.failure}; {stays}{room}")
            return
        self._say(f"error: {self.failure}")

    @property
    def busy(self) -> bool:
        """Whether a save is running, or an old checkpoint is being removed."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until no save is running."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._engine.updater.chunks.before_update = lambda flat: None

    def close(self) -> None:
        """Wait for the running save and free the buffer."""
        self.wait()
        self._slots.close()


def describe(error: BaseException) -> str:
    """Return a one-line description of an error, with the ranks it occurred on."""
    lost = severed(error)
    return in_words(error) if lost is None else f"another rank was lost ({lost.reason})"
