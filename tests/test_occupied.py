"""A run folder has one run at a time, and the next one as soon as that has ended, however it ended."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from ranks import _context
from runs import losses, train

from zerocli import config as configs
from zerocli import launch, occupied
from zerocli.errors import UserError
from zerocli.launch import RunOptions
from zerocli.occupied import occupy


def hold(folder: str, ready) -> None:
    with occupy(folder):
        ready.set()
        threading.Event().wait()


@pytest.fixture
def holder(tmp_path, monkeypatch):
    """Another process that has the folder."""
    monkeypatch.setattr(occupied, "PATIENCE_SECONDS", 0.0)
    ready = _context.Event()
    process = _context.Process(target=hold, args=(str(tmp_path), ready), daemon=True)
    process.start()
    assert ready.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_folder_is_its_runs_own_until_that_is_gone(tmp_path, holder):
    with (
        pytest.raises(UserError, match=f"a run is under way there .process {holder.pid} on ") as error,
        occupy(tmp_path),
    ):
        pass
    assert error.value.exit_code == 2 and "another --run-dir" in error.value.hint
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with occupy(tmp_path):
        assert f"process {os.getpid()} on" in Path(tmp_path, "lock").read_text()


def test_a_second_run_touches_nothing_of_the_first(tmp_path, holder):
    """Neither a rank of torchrun's nor our own launcher: its ranks' error files would end the first run."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank0.error").write_text("the first run's")
    (tmp_path / "checkpoints/step-00000002.tmp").mkdir(parents=True)
    second = train(tmp_path, "train.steps=2")
    assert second.codes[0] == 2 and "a run is under way there" in second.said[0], second.said
    with pytest.raises(UserError, match="a run is under way there"):
        launch.launch(configs.load("tiny", []), RunOptions(str(tmp_path)), worker=["false"])
    assert (tmp_path / "logs/rank0.error").read_text() == "the first run's"
    assert (tmp_path / "checkpoints/step-00000002.tmp").is_dir() and not (tmp_path / "metrics.jsonl").exists()
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert train(tmp_path, "train.steps=2").codes == [0, 0] and list(losses(tmp_path)) == [1, 2]
