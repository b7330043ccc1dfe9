"""A run folder has one run at a time, and the next one as soon as that has ended, however it ended."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import threading
from pathlib import Path

import pytest
from ranks import _context
from runs import losses, train

from zerocli import config as configs
from zerocli.config.options import RunOptions
from zerocli.errors import UserError
from zerocli.run.folders import run_lock
from zerocli.run.folders.run_lock import OWNER, is_gone, lock_run_folder, this_process
from zerocli.run.processes import launch


def hold(folder: str, ready) -> None:
    with lock_run_folder(folder):
        ready.set()
        threading.Event().wait()


@contextlib.contextmanager
def held(target, folder: Path):
    """Yield another process that has the folder, which `target` takes."""
    ready = _context.Event()
    process = _context.Process(target=target, args=(str(folder), ready), daemon=True)
    process.start()
    try:
        assert ready.wait(600)
        yield process
    finally:
        process.kill()
        process.join()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 0.0)


@pytest.fixture
def holder(tmp_path, impatient):
    """Another process that has the folder."""
    with held(hold, tmp_path) as process:
        yield process


def test_a_folder_is_its_runs_own_until_that_is_gone(tmp_path, holder):
    with (
        pytest.raises(UserError, match=f"a run is under way there .process {holder.pid} on ") as error,
        lock_run_folder(tmp_path),
    ):
        pass
    assert error.value.exit_code == 2 and "another --run-dir" in error.value.hint
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with lock_run_folder(tmp_path):
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


# -- file systems without locks ----------------------------------------------------------------------------------------


def no_locks(fd: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def hold_without_locks(folder: str, ready) -> None:
    run_lock.fcntl.flock = no_locks
    hold(folder, ready)


@pytest.fixture
def no_file_locks(monkeypatch, impatient):
    """A file system that knows no locks."""
    monkeypatch.setattr(run_lock.fcntl, "flock", no_locks)


@pytest.fixture
def without_locks(tmp_path, no_file_locks):
    """A folder on a file system that knows no locks, and another process that has it."""
    with held(hold_without_locks, tmp_path) as process:
        yield process


def test_without_locks_too_a_folder_is_its_runs_own_until_that_is_gone(tmp_path, without_locks):
    for _ in range(2):  # the second would have found what the first left behind
        with pytest.raises(UserError, match=f"a run is under way there .process {without_locks.pid} on ") as error:
            lock_run_folder(tmp_path).__enter__()
    assert f"rm {tmp_path / OWNER}" in error.value.hint
    os.kill(without_locks.pid, signal.SIGKILL)
    without_locks.join()
    with lock_run_folder(tmp_path):
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
        with pytest.raises(UserError, match=f"process {os.getpid()} on "):
            lock_run_folder(tmp_path).__enter__()
    assert os.listdir(tmp_path) == ["lock"]


def take_stale(folder: str, barrier, results) -> None:
    run_lock.fcntl.flock, run_lock.PATIENCE_SECONDS = no_locks, 0.0
    barrier.wait()
    try:
        with lock_run_folder(folder):
            results.put("taken")
            barrier.wait()
    except UserError:
        results.put("refused")
        barrier.wait()


def test_of_several_that_find_a_dead_run_one_takes_its_folder(tmp_path):
    (tmp_path / OWNER).write_text(json.dumps(this_process() | {"pid": 2**22 + 1}))  # beyond the largest there is
    barrier, results = _context.Barrier(4), _context.Queue()
    each = [_context.Process(target=take_stale, args=(str(tmp_path), barrier, results)) for _ in range(4)]
    for process in each:
        process.start()
    assert sorted(results.get(timeout=600) for _ in each) == ["refused"] * 3 + ["taken"]
    for process in each:
        process.join()


def test_only_what_is_certain_makes_an_owner_stale():
    here = this_process()
    assert not is_gone(here)
    assert is_gone(here | {"pid": 2**22 + 1}) and is_gone(here | {"started": "1"})  # its number is another's now
    assert is_gone(here | {"boot": "before", "pid": 1})
    for other in ({"host": "elsewhere"}, {"host": "elsewhere", "boot": "before"}, {"namespace": "pid:[1]"}):
        assert not is_gone(here | {"pid": 2**22 + 1} | other)
    for nonsense in (
        None,
        [],
        {},
        {"host": here["host"]},
        here | {"pid": "1"},
        here | {"pid": -1},
        here | {"pid": True},
    ):
        assert not is_gone(nonsense)


def test_a_strange_owner_file_is_nobodys_to_remove(tmp_path, no_file_locks):
    for make in (lambda path: path.write_text("{"), os.mkfifo, lambda path: path.symlink_to("/nowhere")):
        make(tmp_path / OWNER)
        with pytest.raises(UserError, match="a run is under way there .another process"):
            lock_run_folder(tmp_path).__enter__()
        (tmp_path / OWNER).unlink()


def test_file_systems_without_links_have_owners_too(tmp_path, monkeypatch, no_file_locks):
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with lock_run_folder(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} on "):
        lock_run_folder(tmp_path).__enter__()
    assert os.listdir(tmp_path) == ["lock"]
