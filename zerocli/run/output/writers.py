"""Writers: further places for a run's metrics, each behind one small interface. Rank 0 opens them.

metrics.jsonl is always written and is complete; these are copies for other programs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zerocli.profile.lines import Line
from zerocli.run.evaluate import Evaluated
from zerocli.run.processes.launch import refuse_missing


class Writer(Protocol):
    """Where numbers of a step go. A step may be written to several times, with other names."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard; TensorBoard drops what an earlier process wrote from step `first` on."""

    def __init__(self, run_dir: Path, first: int, last_written: int, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first if first > 1 else None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """An offline run in RUN/wandb, for `wandb sync`; nothing is sent.

    A resumed run has the same id. Steps that an earlier process wrote have the same values and are left out.
    """

    def __init__(self, run_dir: Path, first: int, last_written: int, config: Mapping[str, Any]) -> None:
        os.environ["WANDB_MODE"] = "offline"
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        name = run_dir.absolute().name
        self._last_written = last_written
        self._run: Any = wandb.init(
            dir=str(run_dir), mode="offline", project="zerocli", name=name, id=name, resume="allow", config=dict(config)
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last_written:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


WRITERS: dict[str, type[TensorBoard] | type[WeightsAndBiases]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


class Writers:
    """All writers of a run; none without `train.log_to`, and none on ranks other than 0."""

    def __init__(self, writers: Sequence[Writer] = ()) -> None:
        self._writers = writers

    @classmethod
    def open(
        cls, names: Sequence[str], run_dir: str, first: int, last_written: int, config: Mapping[str, Any]
    ) -> Writers:
        """Open the writers of a run that begins with step `first`; steps to `last_written` were written before."""
        refuse_missing(names)
        return cls([WRITERS[name](Path(run_dir), first, last_written, config) for name in dict.fromkeys(names)])

    def step(self, line: Line) -> None:
        """Write the metrics of a step."""
        values = {"train/loss": line.loss, "train/grad_norm": line.grad_norm, "train/lr": line.lr}
        peaks = {f"memory/{tier}": float(nbytes) for tier, nbytes in line.peak.items() if nbytes}
        self._write(line.step, {**values, "train/tokens_per_second": line.tokens_per_second, **peaks})

    def evaluation(self, row: Evaluated) -> None:
        """Write the result of an evaluation."""
        self._write(row.step, {"eval/loss": row.loss, "eval/perplexity": row.perplexity})

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, {name: value for name, value in values.items() if math.isfinite(value)})

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
