"""Writers: further places for a run's metrics, each behind one small interface. Rank 0 opens them.

metrics.jsonl is always written and is complete; these are copies for other programs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from zerocli.console import say
from zerocli.profile.lines import Line
from zerocli.regular_files import write_text
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
    """An offline run in RUN/wandb, for `wandb sync`; nothing is sent. With `mode` online it is sent, while it trains,
    to the server that `wandb login` names.

    A resumed run has the same id. Steps that an earlier process wrote have the same values and are left out.
    """

    def __init__(
        self, run_dir: Path, first: int, last_written: int, config: Mapping[str, Any], mode: str = "offline"
    ) -> None:
        os.environ["WANDB_MODE"] = mode
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        name = run_dir.absolute().name
        self._last_written = last_written
        project = os.environ.get("WANDB_PROJECT", "zerocli")
        about = {"project": project, "name": name, "id": name, "resume": "allow", "config": dict(config)}
        self._run: Any = wandb.init(dir=str(run_dir), mode=mode, **about)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last_written:
            self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow: in RUN/mlflow, or on the server that MLFLOW_TRACKING_URI names.

    RUN/mlflow.txt keeps its id for a resumed run. Steps that an earlier process wrote are left out.
    """

    def __init__(self, run_dir: Path, first: int, last_written: int, config: Mapping[str, Any]) -> None:
        import mlflow

        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri((run_dir.absolute() / "mlflow").as_uri())
        kept = run_dir / "mlflow.txt"
        known = kept.read_text().strip() if first > 1 and kept.is_file() else None
        self._mlflow, self._last_written = mlflow, last_written
        if known is None:
            mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "zerocli"))
        run = mlflow.start_run(run_id=known, run_name=None if known else run_dir.absolute().name)
        if known is None:
            write_text(kept, f"{run.info.run_id}\n")
            sections = [(name, keys) for name, keys in config.items() if isinstance(keys, Mapping)]
            flat = {f"{name}.{key}": value for name, keys in sections for key, value in keys.items()}
            for at in range(0, len(flat), PARAMS):
                mlflow.log_params(dict(list(flat.items())[at : at + PARAMS]))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step > self._last_written:
            self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


PARAMS = 100
"""Parameters that MLflow takes at once."""


WRITERS: dict[str, Callable[[Path, int, int, Mapping[str, Any]], Writer]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "wandb-online": functools.partial(WeightsAndBiases, mode="online"),
    "mlflow": MLflow,
}


class Writers:
    """All writers of a run; none without `train.log_to`, and none on ranks other than 0."""

    def __init__(self) -> None:
        self._writers: dict[str, Writer] = {}

    @classmethod
    def open(
        cls, names: Sequence[str], run_dir: str, first: int, last_written: int, config: Mapping[str, Any]
    ) -> Writers:
        """Open the writers of a run that begins with step `first`; steps to `last_written` were written before."""
        refuse_missing(names)
        made = cls()
        for name in dict.fromkeys(names):
            with made._going_on(name):
                made._writers[name] = WRITERS[name](Path(run_dir), first, last_written, config)
        return made

    @contextlib.contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        """Log what fails within and write there no more: a server that is away must not end a run."""
        try:
            yield
        except Exception as error:
            self._writers.pop(name, None)
            fact = str(error).splitlines()[0] if str(error) else type(error).__name__
            say(f"{name} is written no more ({fact}); metrics.jsonl has every step")

    def step(self, line: Line) -> None:
        values = {"train/loss": line.loss, "train/grad_norm": line.grad_norm, "train/lr": line.lr}
        peaks = {f"memory/{tier}": float(nbytes) for tier, nbytes in line.peak.items() if nbytes}
        self._write(line.step, {**values, "train/tokens_per_second": line.tokens_per_second, **peaks})

    def evaluation(self, row: Evaluated) -> None:
        self._write(row.step, {"eval/loss": row.loss, "eval/perplexity": row.perplexity})

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for name, writer in list(self._writers.items()):
            with self._going_on(name):
                writer.write(step, finite)

    def __enter__(self) -> Writers:
        return self

    def __exit__(self, *_: object) -> None:
        for name, writer in list(self._writers.items()):
            with self._going_on(name):
                writer.close()
