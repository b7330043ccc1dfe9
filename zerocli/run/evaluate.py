"""Evaluation: loss and perplexity on held-out data between two steps, without any effect on training.

Batch k of the held-out data is the work of data-parallel rank k mod ranks. Its mean loss counts as often as it has
targets, and the sum over batches is exact: the result does not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from zerocli.console import say
from zerocli.data.held_out import HeldOut
from zerocli.data.packing import IGNORED
from zerocli.engine.engine import Engine
from zerocli.ranks.exchange import gather_json
from zerocli.regular_files import lines_of, write_text

FILE = "eval.jsonl"
"""In the run folder: one line per evaluation."""


@dataclass(frozen=True)
class Evaluated:
    """The result of one evaluation, the same on all ranks."""

    step: int
    loss: float
    perplexity: float
    tokens: int
    seconds: float


@contextlib.contextmanager
def beside_training(engine: Engine) -> Iterator[None]:
    """Run forward passes that leave training as it is: no gradients, eval mode, eager blocks, random states kept.

    New shapes would make the compiler replace graphs of training by more general ones, with other rounding.
    """
    modes = {module: module.training for module in engine.model.modules()}
    devices = [engine.device] if engine.device.type == "cuda" else []
    blocks = engine.hooks.blocks
    eager, blocks.eager = blocks.eager, True
    engine.model.eval()
    try:
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            yield
    finally:
        blocks.eager = eager
        for module, training in modes.items():
            module.training = training


def evaluate(engine: Engine, held_out: HeldOut, step: int, limit: int = 0) -> Evaluated:
    """Return the mean loss over all held-out targets, or those of the first `limit` batches. Collective."""
    began = time.perf_counter()
    num_batches = min(held_out.num_batches, limit) if limit else held_out.num_batches
    rank, world = engine.collectives.rank, engine.collectives.world
    rows = []
    with beside_training(engine):
        # Ranks issue the same collectives, so all run as many batches; what is beyond the last counts for nothing.
        for first in range(0, num_batches, world):
            mine = held_out.batch(min(first + rank, num_batches - 1))
            counted = int((mine[1] != IGNORED).sum()) if first + rank < num_batches else 0
            loss = engine(*[each.to(engine.device, non_blocking=True) for each in mine])
            rows.append(torch.stack([loss.double(), torch.full_like(loss, counted, dtype=torch.float64)]))
        everyone = engine.collectives.gather_control(torch.stack(rows)).cpu().flatten(0, 1)
    # fsum rounds once, whatever the order. A loss that is not finite counts only where it has targets.
    tokens = int(everyone[:, 1].sum())
    total = math.fsum(loss * count for loss, count in everyone.tolist() if count)
    mean = total / tokens if tokens else math.nan
    return Evaluated(step, mean, math.exp(mean) if mean < 700 else math.inf, tokens, time.perf_counter() - began)


class Evaluations:
    """The evaluations of a run: which was best, and how many have passed since. A pure function of RUN/eval.jsonl."""

    def __init__(self, run_dir: str | Path, writes: bool) -> None:
        self._path, self._writes = Path(run_dir, FILE), writes
        self.rows: list[Evaluated] = []

    def resume(self, engine: Engine, step: int) -> None:
        """Read the evaluations up to `step`, as rank 0 sees them, and drop later ones from the file. Collective."""
        mine = [asdict(row) for row in read(self._path) if row.step <= step] if self._writes and step else []
        found = gather_json(mine, engine.gather_control, engine.device)[0]
        self.rows = [Evaluated(**row) for row in found]
        if self._writes and self._path.exists():
            self._write()

    def add(self, row: Evaluated) -> None:
        self.rows = [each for each in self.rows if each.step < row.step] + [row]
        if self._writes:
            self._write()

    def _write(self) -> None:
        """Replace the file: it has a line per evaluation, so it is small, and is whole at any moment."""
        try:
            write_text(self._path, "".join(json.dumps(asdict(row)) + "\n" for row in self.rows))
        except OSError as error:  # a full disk does not end training
            say(f"{self._path}: cannot write evaluations ({error.strerror}); the next one retries")

    @property
    def best(self) -> Evaluated | None:
        return best_of(self.rows)

    @property
    def since_best(self) -> int:
        best = self.best
        return len(self.rows) - 1 - self.rows.index(best) if best else len(self.rows)

    def summary(self) -> dict[str, Any] | None:
        """Return the last evaluation and the best one, for the closing summary; None if there was none."""
        best = self.best
        return {"last": asdict(self.rows[-1]), "best": asdict(best) if best else None} if self.rows else None

    def exhausted(self, patience: int) -> str:
        """Return why the run ends early; an empty text if it goes on."""
        if not patience or self.since_best < patience:
            return ""
        best = self.best
        lowest = f"; the lowest was {best.loss:.4f} at step {best.step}" if best else ""
        return f"early stop at step {self.rows[-1].step}: {self.since_best} evaluations without a lower loss{lowest}"


def best_of(rows: Sequence[Evaluated]) -> Evaluated | None:
    """Return the first row with the lowest finite loss."""
    finite = [row for row in rows if math.isfinite(row.loss)]
    return min(finite, key=lambda row: row.loss, default=None)


def read(path: Path) -> list[Evaluated]:
    """Return the evaluations in a file, by step; the later line of a step counts, and malformed ones do not."""
    rows: dict[int, Evaluated] = {}
    if path.exists():
        for line in lines_of(path):
            with contextlib.suppress(ValueError, TypeError):
                values: dict[str, Any] = json.loads(line)
                row = Evaluated(**values)
                rows[int(row.step)] = row
    return [rows[step] for step in sorted(rows)]
