"""Writers beside metrics.jsonl: offline, on rank 0, each step once."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

import pytest
from commands import SMALL, run

from zerocli.errors import UserError
from zerocli.profile.lines import Line
from zerocli.run.evaluate import Evaluated
from zerocli.run.output.writers import Writers
from zerocli.run.processes.launch import refuse_missing

FAKE = """
import json, os
class Run:
    def __init__(self, folder): self.file = open(os.path.join(folder, "wandb.log"), "a")
    def log(self, values, step): print(json.dumps({"step": step, **values}), file=self.file, flush=True)
    def finish(self): self.file.close()
def init(dir, mode, id, **rest):
    assert mode == os.environ["WANDB_MODE"] == "offline" and os.environ["RANK"] == "0"
    return Run(dir)
"""


def line(step: int, loss: float) -> Line:
    return Line(step, loss, 1.0, 0.1, 8, 1.0, 8.0, {"hbm": 5, "dram": 0, "nvme": 0}, 0, {}, {}, {}, {}, False)


def test_wandb_is_offline_and_has_each_step_once(tmp_path, monkeypatch):
    logged, given = [], {}

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("end")

    fake = types.ModuleType("wandb")
    fake.init = lambda **about: given.update(about) or Run()
    fake.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "online")
    with Writers.open(["wandb"], str(tmp_path / "run"), 3, 4, {"name": "tiny"}) as writers:
        assert os.environ["WANDB_MODE"] == "offline" == given["mode"] and given["id"] == "run"
        for step in (3, 4, 5):  # resumed after step 2, and 4 were written before
            writers.step(line(step, 1.5))
        writers.evaluation(Evaluated(5, 2.0, float("inf"), 8, 0.1))
    assert [each if each == "end" else each[0] for each in logged] == [5, 5, "end"]
    assert logged[0][1]["train/loss"] == 1.5 and logged[0][1]["memory/hbm"] == 5 and "memory/dram" not in logged[0][1]
    assert logged[1][1] == {"eval/loss": 2.0}


def test_wandb_sends_only_if_that_is_asked_for(tmp_path, monkeypatch):
    given = {}
    fake = types.ModuleType("wandb")
    fake.init = lambda **about: given.update(about) or types.SimpleNamespace(log=lambda *a, **k: None, finish=bool)
    fake.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with Writers.open(["wandb-online"], str(tmp_path / "run"), 1, 0, {}):
        assert os.environ["WANDB_MODE"] == given["mode"] == "online" and given["project"] == "mine"


def test_mlflow_has_each_step_once_and_a_server_that_fails_ends_no_run(tmp_path, monkeypatch, capsys):
    """A resumed run goes on with the same id; RUN/mlflow is the place unless MLFLOW_TRACKING_URI names another."""
    calls = []

    def log_metrics(values, step):
        calls.append((step, values))
        if values.get("train/loss") == 9.0:
            raise OSError("no route to the server")

    fake = types.ModuleType("mlflow")
    fake.__spec__ = types.SimpleNamespace()
    fake.set_tracking_uri = lambda uri: calls.append(uri)
    fake.set_experiment = lambda name: calls.append(name)
    fake.start_run = lambda run_id, run_name: (
        calls.append((run_id, run_name)) or types.SimpleNamespace(info=types.SimpleNamespace(run_id="id7"))
    )
    fake.log_params = lambda values: calls.append(values)
    fake.log_metrics = log_metrics
    fake.end_run = lambda: calls.append("end")
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place, run = str(tmp_path / "run"), tmp_path / "run"
    run.mkdir()
    with Writers.open(["mlflow"], place, 1, 0, {"name": "tiny", "train": {"steps": 3}}) as writers:
        writers.step(line(1, 1.5))
    assert calls[:4] == [(run / "mlflow").as_uri(), "zerocli", (None, "run"), {"train.steps": 3}]
    assert calls[4][0] == 1 and calls[4][1]["train/loss"] == 1.5 and calls[5] == "end"
    calls.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere")
    with Writers.open(["mlflow"], place, 2, 2, {}) as writers:
        for step, loss in ((2, 1.5), (3, 9.0), (4, 1.0)):
            writers.step(line(step, loss))
    assert calls[0] == ("id7", None) and [each[0] for each in calls[1:]] == [3]
    assert capsys.readouterr().err == (
        "mlflow is written no more (no route to the server); metrics.jsonl has every step\n"
    )


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="tensorboard and wandb are not installed") as error:
        refuse_missing(["tensorboard", "wandb"])
    assert error.value.hint == "pip install tensorboard wandb"
    with pytest.raises(UserError, match="wandb is not installed"):
        refuse_missing(["wandb-online", "wandb"])
    refuse_missing([])


def test_tensorboard_has_each_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 4), (3, 5)):
        with Writers.open(["tensorboard"], str(tmp_path), first, 0, {}) as writers:
            for step in range(first, last + 1):
                writers.step(line(step, float(step)))
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_a_resumed_run_logs_each_step_once_on_rank_0(tmp_path: Path):
    (tmp_path / "wandb.py").write_text(FAKE)
    small = [*SMALL, "--run-dir", "run", "--save-every", "2", "--eval-every", "2", "--set", "train.eval_batches=2"]
    done = run(tmp_path, "train", *small, "--set", "train.log_to=wandb")
    assert done.returncode == 0, done.stderr
    more = [*small, "--steps", "6", "--resume", "--set", "train.log_to=wandb"]
    done = run(tmp_path, "train", *more)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(text) for text in (tmp_path / "run/wandb.log").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval/loss" in row] == [2, 4, 6]
