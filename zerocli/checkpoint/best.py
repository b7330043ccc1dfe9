"""The checkpoint of a run's best evaluation: RUN/best.json names it. (No engine.)"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zerocli.checkpoint.folder import Folder
from zerocli.errors import UserError
from zerocli.regular_files import read_regular, remove, write_text

FILE = "best.json"
MAX_NBYTES = 1 << 16


class Best:
    """Which checkpoint is of the best evaluation; the file names a step only once its checkpoint is committed.

    `pending` may be of a step that is still being written; until that is committed, the one before stays.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self._pending: Mapping[str, Any] = {}
        self.step: int | None = None
        """The step whose checkpoint must not be removed."""

    def resume(self, step: int, evaluated: Iterable[Mapping[str, Any]]) -> None:
        """Continue after `step` with the best of the evaluations whose checkpoints are still there."""
        there = {found.step for found in Folder(self._run_dir / "checkpoints").committed()}
        rows = [row for row in evaluated if row["step"] in there and row["step"] <= step]
        named = read(self._run_dir)
        if named is not None and any(row["step"] == named for row in rows):
            self.step = named
        elif rows:
            self.expect(min(rows, key=lambda row: (row["loss"], row["step"])))
            self.commit(int(self._pending["step"]))
        elif named is not None:
            remove(self._run_dir / FILE)

    def expect(self, evaluated: Mapping[str, Any]) -> None:
        """Name the checkpoint of this evaluation once it is committed."""
        self._pending = evaluated

    def commit(self, step: int) -> None:
        """Name the checkpoint of `step` if it is the expected one."""
        if self._pending and self._pending["step"] == step:
            path = Folder("checkpoints").of(step)
            write_text(self._run_dir / FILE, json.dumps({**self._pending, "checkpoint": str(path)}, indent=2) + "\n")
            self.step, self._pending = step, {}


def read(run_dir: str | Path) -> int | None:
    """Return the step that RUN/best.json names, None if there is no such file."""
    path = Path(run_dir, FILE)
    if not path.exists():
        return None
    try:
        step = json.loads(read_regular(path, MAX_NBYTES))["step"]
        if isinstance(step, bool) or not isinstance(step, int):
            raise ValueError(f"step {step!r} is not a number")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: names no step ({error})", hint="the newest checkpoint, without --best") from None
    return step


def best_step(run: str | Path) -> int:
    """Return the step of a run's best checkpoint; raise UserError if it kept none."""
    step = read(run)
    if step is None:
        raise UserError(
            f"{run}: has no {FILE}: the run did not keep its best checkpoint",
            hint="zerocli train --eval-every 100 --set checkpoint.best=true; or without --best: the newest one",
        )
    return step
