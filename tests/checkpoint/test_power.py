"""Power that goes between any two steps of a save: what was said to be saved is there, and it is what was saved."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ranks import run_ranks
from saved_engines import engine_of, everything, train

from zerocli.checkpoint import Folder, Saver, load, resume

CHANGES = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Disk:
    """What of a folder a loss of power leaves: of each file and folder the state of its last sync, or a later one.

    The strictest file system that POSIX allows: nothing is kept but what was synced, and anything else may be. What it
    has seen stays open, so that no inode's number is given to another file while it stands for the first.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: dict[int, bytes] = {}
        self.folders: dict[int, dict[str, tuple[int, bool]]] = {root.stat().st_ino: {}}
        self.held: dict[int, int] = {}

    def sync(self, fd: int) -> None:
        about = os.fstat(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if stat.S_ISDIR(about.st_mode):
            self.folders[about.st_ino] = listed(path)
            for entry in path.iterdir():
                self.hold(entry)
        else:
            self.files[about.st_ino] = path.read_bytes()
        self.hold(path)

    def hold(self, path: Path) -> None:
        inode = path.lstat().st_ino
        if inode not in self.held:
            self.held[inode] = os.open(path, os.O_PATH | os.O_NOFOLLOW)

    def left(self, keeps: Callable[[], bool]) -> dict[str, bytes]:
        """Return the files after a loss of power; `keeps` says of each, and of each folder, if it kept all it had."""
        live = {path.stat().st_ino: path for path in (self.root, *self.root.rglob("*"))}
        return dict(self._left("", self.root.stat().st_ino, live, keeps))

    def _left(
        self, at: str, inode: int, live: dict[int, Path], keeps: Callable[[], bool]
    ) -> Iterator[tuple[str, bytes]]:
        entries = listed(live[inode]) if inode in live and keeps() else self.folders.get(inode, {})
        for name, (child, is_folder) in entries.items():
            if is_folder:
                yield from self._left(f"{at}{name}/", child, live, keeps)
            elif child in live and keeps():
                yield at + name, live[child].read_bytes()
            else:
                yield at + name, self.files.get(child, b"")


def listed(path: Path) -> dict[str, tuple[int, bool]]:
    return {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(path)}


def saves_and_losses(folder: str) -> int:
    """Save some steps, one of them twice; after each change of the disk, look at what power would leave."""
    root = Path(folder, "disk")
    root.mkdir()
    disk, draw, looking = Disk(root), random.Random(11), False
    states: dict[int, list[Any]] = {}
    found: dict[frozenset[tuple[str, bytes]], int] = {}
    model, engine = engine_of({"stage": 2})
    _, other = engine_of({"stage": 3}, seed=9)
    said = num_losses = 0

    def look() -> None:
        nonlocal looking, num_losses
        looking = True
        for keeps in (lambda: False, lambda: True, lambda: draw.random() < 0.5, lambda: draw.random() < 0.5):
            left = disk.left(keeps)
            num_losses += 1
            known = frozenset(left.items())
            if known not in found:  # most losses leave the same
                found[known] = recovered(left)
            assert found[known] >= said, (said, found[known], sorted(left))
        looking = False

    def recovered(left: dict[str, bytes]) -> int:
        """Return the step that a resume takes there, having seen that it is what was saved."""
        shutil.rmtree(Path(folder, "left"), ignore_errors=True)
        for name, data in left.items():
            path = Path(folder, "left", name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        step = resume(other, Path(folder, "left/run/checkpoints")).step
        assert not step or everything(other) in states[step]
        return step

    def watched(name: str) -> None:
        change = getattr(os, name)

        def act(*args: Any, **kwargs: Any) -> Any:
            result = change(*args, **kwargs)
            if not looking:
                if name == "fsync":
                    disk.sync(args[0])
                look()
            return result

        setattr(os, name, act)

    for name in CHANGES:
        watched(name)
    saver = Saver(engine, root / "run/checkpoints", asynchronous=False, keep=1)
    for step in (1, 2, 2, 3):  # a step that is saved again takes the place of a whole one
        train(engine, model, range(step, step + 1))
        looking = True
        states.setdefault(step, []).append(everything(engine))
        looking = False
        saver.save(step)
        assert saver.failure is None, saver.failure
        said = step
    saver.close()
    looking = True
    assert [each.step for each in Folder(saver.folder.path).committed()] == [3]
    load(other, Folder(saver.folder.path).of(3))
    assert everything(other) == states[3][-1]
    return num_losses


def test_a_loss_of_power_leaves_what_was_said_to_be_saved(tmp_path):
    [num_losses] = run_ranks(1, saves_and_losses, str(tmp_path))
    assert num_losses > 200
