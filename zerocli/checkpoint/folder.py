"""The folder of a run's checkpoints: lists them, recovers and removes unfinished ones, prunes old ones. (No engine.)"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from zerocli.regular_files import remove

STEP = re.compile(r"step-(\d{8,})")
MANIFEST, UNFINISHED = "manifest.json", "manifest.json.part"
"""The file name of a checkpoint's manifest, and its name until it is committed."""
OLD = ".old.tmp"
"""Suffix of a checkpoint that is about to be removed, or replaced by another of its step."""


@dataclass(frozen=True)
class Found:
    """A folder with a checkpoint's name; only a reader can tell whether it is whole."""

    step: int
    path: Path


def _exists(path: Path) -> bool:
    """Return whether anything has this name; raise OSError if that cannot be determined."""
    try:
        os.lstat(path)
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False


class Folder:
    """RUN/checkpoints."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def newest_first(self) -> list[Found]:
        """Return everything with a checkpoint's name, newest first; includes links, which a reader refuses."""
        found = []
        for entry in os.scandir(self.path) if self.path.is_dir() else ():
            name = STEP.fullmatch(entry.name)
            if name and (entry.is_dir(follow_symlinks=False) or entry.is_symlink()):
                found.append(Found(int(name[1]), Path(entry.path)))
        return sorted(found, key=lambda found: -found.step)

    def committed(self) -> list[Found]:
        """Return the committed checkpoints, newest first, without links: their targets belong to others."""
        return [each for each in self.newest_first() if not each.path.is_symlink() and _exists(each.path / MANIFEST)]

    def recover(self) -> list[int]:
        """Restore checkpoints that were set aside for a replacement that was never committed; return their steps."""
        steps = []
        for aside in self.path.glob(f"step-*{OLD}") if self.path.is_dir() else ():
            path = aside.with_name(aside.name.removesuffix(OLD))
            name = STEP.fullmatch(path.name)
            if name is None or aside.is_symlink() or not os.path.lexists(aside / MANIFEST):
                continue
            if not path.is_symlink() and os.path.lexists(path / MANIFEST):
                continue
            with contextlib.suppress(OSError):  # a read-only folder can still be read
                remove(path)
                aside.rename(path)
                steps.append(int(name[1]))
        return steps

    def sweep(self) -> list[Path]:
        """Remove unfinished checkpoints that killed runs left, and return them."""
        self.recover()
        left = list(self.path.glob("step-*.tmp")) if self.path.is_dir() else []
        # Between its two renames a save has its final name, but no manifest yet.
        left += [each.path for each in self.newest_first() if not each.path.is_symlink()
                 and not os.path.lexists(each.path / MANIFEST) and (each.path / UNFINISHED).exists()]  # fmt: skip
        for path in left:
            remove(path)
        return left

    def prune(self, newest: int, keep: int, keep_every: int, best: int | None = None) -> list[int]:
        """Remove all but the `keep` up to step `newest` and those at multiples of `keep_every` (0: none); return steps.

        The checkpoint of step `best` stays too.
        `newest` was just written. Checkpoints of later steps were skipped by a resume and do not count: otherwise a
        damaged one could be kept in place of a whole one.
        """
        removed = []
        for found in [found for found in self.committed() if found.step <= newest][keep:]:
            if found.step == best or (keep_every and found.step % keep_every == 0):
                continue
            # With its manifest under this name it is unfinished, so `sweep` removes it if this is interrupted.
            (found.path / MANIFEST).replace(found.path / UNFINISHED)
            aside = found.path.with_name(found.path.name + OLD)
            remove(aside)
            found.path.rename(aside)
            remove(aside)
            removed.append(found.step)
        return removed
