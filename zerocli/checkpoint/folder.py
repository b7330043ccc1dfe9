"""The folder of a run's checkpoints: which there are, which is the newest whole one, which are kept. (No engine.)"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zerocli.regular_files import remove

STEP = re.compile(r"step-(\d{8,})")
MANIFEST, UNFINISHED = "manifest.json", "manifest.json.part"
"""A checkpoint's list of contents, and its name until it is committed."""
OLD = ".old.tmp"
"""What a checkpoint's name ends with once it is to be removed, or another of its step is about to be committed."""


@dataclass(frozen=True)
class Found:
    """A folder by a checkpoint's name; whether it is whole is for its reader to say."""

    step: int
    path: Path


def _exists(path: Path) -> bool:
    """Say whether there is anything by this name; raise OSError where the system will not say."""
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
        """Return what has a checkpoint's name, newest first; links too, which a reader refuses instead of following."""
        return sorted(self._found(), key=lambda found: -found.step)

    def _found(self) -> Iterator[Found]:
        if not self.path.is_dir():
            return
        for entry in os.scandir(self.path):
            name = STEP.fullmatch(entry.name)
            if name and (entry.is_dir(follow_symlinks=False) or entry.is_symlink()):
                yield Found(int(name[1]), Path(entry.path))

    def committed(self) -> list[Found]:
        """Return those that were committed, newest first; a link is none: what it leads to is another's."""
        return [each for each in self.newest_first() if not each.path.is_symlink() and _exists(each.path / MANIFEST)]

    def recover(self) -> list[int]:
        """Put back what was set aside for a new checkpoint of its step that was never committed; return the steps."""
        steps = []
        for aside in self.path.glob(f"step-*{OLD}") if self.path.is_dir() else ():
            path = aside.with_name(aside.name.removesuffix(OLD))
            name = STEP.fullmatch(path.name)
            if name is None or aside.is_symlink() or not os.path.lexists(aside / MANIFEST):
                continue
            if not path.is_symlink() and os.path.lexists(path / MANIFEST):
                continue
            with contextlib.suppress(OSError):  # where nothing may be changed, what stands is still to be read
                remove(path)
                aside.rename(path)
                steps.append(int(name[1]))
        return steps

    def sweep(self) -> list[Path]:
        """Remove what killed runs left half written, and return it."""
        self.recover()
        left = list(self.path.glob("step-*.tmp")) if self.path.is_dir() else []
        # Between its two renames a save has its final name, and its manifest not yet.
        left += [each.path for each in self._found() if not each.path.is_symlink()
                 and not os.path.lexists(each.path / MANIFEST) and (each.path / UNFINISHED).exists()]  # fmt: skip
        for path in left:
            remove(path)
        return left

    def prune(self, newest: int, keep: int, keep_every: int) -> list[int]:
        """Remove all but the `keep` up to step `newest` and those at multiples of `keep_every` (0: none); return steps.

        `newest` was just written. What is of a later step was there before, and a resume passed it over: it counts
        for nothing, or a damaged one would be kept in the place of a whole one.
        """
        removed = []
        for found in [found for found in self.committed() if found.step <= newest][keep:]:
            if keep_every and found.step % keep_every == 0:
                continue
            # With its manifest under this name it is an unfinished one, which `sweep` removes, however far we come.
            (found.path / MANIFEST).replace(found.path / UNFINISHED)
            aside = found.path.with_name(found.path.name + OLD)
            remove(aside)
            found.path.rename(aside)
            remove(aside)
            removed.append(found.step)
        return removed
