"""The folder of a run's checkpoints: which there are, which is the newest whole one, which are kept. (No engine.)"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STEP = re.compile(r"step-(\d{8,})")
MANIFEST, UNFINISHED = "manifest.json", "manifest.json.part"
"""A checkpoint's list of contents, and its name until it is committed."""


@dataclass(frozen=True)
class Found:
    """A folder by a checkpoint's name; whether it is whole is for its reader to say."""

    step: int
    path: Path


class Folder:
    """RUN/checkpoints."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def of(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def newest_first(self) -> list[Found]:
        """Return the folders that have a checkpoint's name, newest first."""
        return sorted(self._found(), key=lambda found: -found.step)

    def _found(self) -> Iterator[Found]:
        if not self.path.is_dir():
            return
        for entry in os.scandir(self.path):
            name = STEP.fullmatch(entry.name)
            if name and entry.is_dir(follow_symlinks=True):
                yield Found(int(name[1]), Path(entry.path))

    def committed(self) -> list[Found]:
        """Return those that were committed, newest first."""
        return [found for found in self.newest_first() if os.path.lexists(found.path / MANIFEST)]

    def sweep(self) -> list[Path]:
        """Remove what killed runs left half written, and return it."""
        left = list(self.path.glob("step-*.tmp")) if self.path.is_dir() else []
        # Between its two renames a save has its final name, and its manifest not yet.
        left += [each.path for each in self._found() if not os.path.lexists(each.path / MANIFEST)
                 and (each.path / UNFINISHED).exists()]  # fmt: skip
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return left

    def prune(self, keep: int, keep_every: int) -> list[int]:
        """Remove all but the newest `keep` and those at multiples of `keep_every` steps (0: none); return the steps."""
        removed = []
        for found in self.committed()[keep:]:
            if keep_every and found.step % keep_every == 0:
                continue
            # Without its manifest it is no checkpoint any more, however far the rest of the removal comes.
            (found.path / MANIFEST).unlink(missing_ok=True)
            aside = found.path.with_name(found.path.name + ".old.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            found.path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
            removed.append(found.step)
        return removed
