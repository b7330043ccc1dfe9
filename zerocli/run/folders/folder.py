"""The run folder: created at the start of a run, and removed again if the run ended before it wrote anything there.

What it holds is said when a run fails. (No torch.)
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zerocli.checkpoint.folder import Folder
from zerocli.console import quoted
from zerocli.errors import UserError
from zerocli.ranks.worker import within
from zerocli.regular_files import own_folder
from zerocli.run.folders.run_lock import LOCK

LOGS, CHECKPOINTS = "logs", "checkpoints"
ANSWER_SECONDS = 2.0
"""How long to wait for a disk, which may be gone."""
_OWN = re.compile(r"rank\d+\.(log|error)")
"""The files of a run's logs."""


@dataclass(frozen=True)
class RunFolder:
    """A run folder, and what of it was there before this start."""

    path: Path
    made: tuple[Path, ...] = ()
    """The folders that this start created, the run folder first and then its parents."""
    before: frozenset[str] = frozenset()
    """Names in the run folder before this start."""

    def discard(self, logs: bool = True) -> None:
        """Remove what this start created, if the run wrote nothing else; without `logs`, only where logs are empty.

        Only empty folders, the lock and the ranks' own logs are removed: whatever anybody else put there stays.
        """
        try:
            there = set(os.listdir(self.path)) - self.before
            if there - {LOGS, CHECKPOINTS, LOCK} or (CHECKPOINTS in there and os.listdir(self.path / CHECKPOINTS)):
                return
            written = [each for each in os.scandir(self.path / LOGS)] if LOGS in there else []
            if any(not _OWN.fullmatch(each.name) or (not logs and each.stat().st_size) for each in written):
                return
        except OSError:
            return
        with contextlib.suppress(OSError):
            for each in written:
                os.unlink(each.path)
            if LOCK in there:
                os.unlink(self.path / LOCK)
            for name in (LOGS, CHECKPOINTS):
                if name in there:
                    os.rmdir(self.path / name)
            for folder in self.made:
                os.rmdir(folder)


@contextlib.contextmanager
def run_folder(path: str, fresh: bool = False) -> Iterator[RunFolder]:
    """Create the run folder with its logs and yield it; if the body raises, discard it unless its logs say more."""
    folder = create(path, fresh)
    try:
        yield folder
    except BaseException:
        folder.discard(logs=False)
        raise


def create(path: str, fresh: bool = False) -> RunFolder:
    """Create the run folder with its logs and return it; `fresh` picks a name that no other run has taken."""
    run_dir = Path(path).absolute()
    made: list[Path] = []
    before: frozenset[str] = frozenset()
    try:
        for parent in reversed([each for each in run_dir.parents if not each.exists()]):
            with contextlib.suppress(FileExistsError):  # another rank was faster
                parent.mkdir()
                made.insert(0, parent)
        for number in range(2, 1000):
            try:
                run_dir.mkdir()
                made.insert(0, run_dir)
                break
            except FileExistsError:
                if not fresh:
                    if not run_dir.is_dir():
                        raise
                    before = frozenset(os.listdir(run_dir))
                    break
                run_dir = Path(f"{Path(path).absolute()}-{number}")
        own_folder(run_dir / LOGS)
        with tempfile.TemporaryFile(dir=run_dir):  # check that the folder is writable
            pass
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {run_dir}: {error.strerror}", hint="--run-dir with a folder you may write to"
        ) from error
    return RunFolder(run_dir, tuple(made), before)


def standing(run_dir: str | os.PathLike[str], environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return what a run has saved, in words, and the command that resumes it; does not hang on a dead disk."""
    saved = within(ANSWER_SECONDS, Folder(Path(run_dir, "checkpoints")).committed)
    # The command that started ranks under torchrun or SLURM is not known here.
    ours = "RANK" not in environ or "ZEROCLI_PARENT" in environ
    command = "zerocli train --resume" if ours else "the same launch, with train --resume"
    if saved is None:
        return f"what is saved cannot be read: {run_dir} does not answer", f"{command} --run-dir {quoted(run_dir)}"
    if not saved:
        return "no checkpoint was written", "the same command again; --set checkpoint.every=N saves every N steps"
    return f"step {saved[0].step} is saved", f"{command} --run-dir {quoted(run_dir)}"
