"""Under torchrun a lost rank brings the job back from its last checkpoint, on the ranks that remain."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agents import kill_all, wait_for_a_checkpoint, workers
from ranks import hold_port
from runs import TINY, losses, train

SETS = ["train.steps=60", "checkpoint.every=5", "train.log_every=1000", "train.global_batch=4", "train.watchdog=60"]


def torchrun(folder: Path, *options: str, log: str, more: tuple[str, ...] = (), **variables: str) -> subprocess.Popen:
    sets = [word for each in [*TINY, *SETS, *more] for word in ("--set", each)]
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    environ |= variables
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "1"]
    if "--standalone" in options:
        command[-1] = "2"
    with (folder / log).open("w") as file:
        return subprocess.Popen(
            [*command, "-m", "zerocli", "train", "tiny", *sets, "--run-dir", str(folder / "run")],
            cwd=folder,
            env=environ,
            stderr=file,
            stdout=file,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder, *SETS).codes == [0, 0]
    return losses(folder)


@pytest.mark.long
def test_a_killed_rank_brings_the_job_back_from_its_checkpoint(tmp_path, whole):
    agent = torchrun(tmp_path, "--standalone", "--max-restarts", "1", log="log")
    try:
        wait_for_a_checkpoint(tmp_path, [agent])
        os.kill(workers(agent)[-1], signal.SIGKILL)
        assert agent.wait(600) == 0, (tmp_path / "log").read_text()
    finally:
        kill_all([agent])
    log = (tmp_path / "log").read_text()
    assert re.search(r"resuming after step \d+:", log), log
    assert losses(tmp_path / "run") == whole


def elastic(port: int, last_call: int) -> list[str]:
    timeouts = f"join_timeout=120,last_call_timeout={last_call}"
    timeouts += ",heartbeat_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--max-restarts", "2"]
    return [*options, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", timeouts]


@pytest.mark.long  # waits for torchrun's timeouts
def test_a_killed_node_leaves_the_job_to_those_that_remain(tmp_path, whole):
    """Two agents stand for two nodes; the global batch stays, so one rank goes on to the same losses, to rounding."""
    held = hold_port()
    port = held.getsockname()[1]
    # The last call is long: if the first agent began alone, torch never tells the second where its store is.
    options = elastic(port, last_call=20)
    first = torchrun(tmp_path, *options, log="first")
    agents = [first]
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):  # it is to hold the rendezvous
            assert first.poll() is None
            time.sleep(0.05)
        agents.append(torchrun(tmp_path, *options, log="second"))
        wait_for_a_checkpoint(tmp_path, agents)
        kill_all(agents[1:])
        assert first.wait(600) == 0, (tmp_path / "first").read_text()
    finally:
        kill_all(agents)
        held.close()
    log = (tmp_path / "first").read_text()
    assert re.search(r"resuming after step \d+:", log), log
    assert "1 rank on cpu" in log
    assert losses(tmp_path / "run") == pytest.approx(whole, rel=1e-4)


RESTARTS = {"first": "0", "second": "1"}
"""Those that each of two agents may count."""


@pytest.mark.long
def test_a_killed_rank_of_one_of_two_nodes_brings_both_back(tmp_path, whole):
    """The other agent sees a node that waits before its own rank fails, and does not count that as a restart."""
    held = hold_port()
    options = ["2" if word == "1:2" else word for word in elastic(held.getsockname()[1], last_call=20)]
    agents = [torchrun(tmp_path, *options, "--max-restarts", most, log=log) for log, most in RESTARTS.items()]
    try:
        wait_for_a_checkpoint(tmp_path, agents)
        (held_up,), (victim,) = map(workers, agents)
        os.kill(held_up, signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        while "exitcode: -9" not in (tmp_path / "second").read_text():
            time.sleep(0.1)
        time.sleep(3)  # torchrun says nowhere that the second agent waits
        os.kill(held_up, signal.SIGCONT)
        assert [agent.wait(600) for agent in agents] == [0, 0], (tmp_path / "first").read_text()
    finally:
        kill_all(agents)
        held.close()
    assert losses(tmp_path / "run") == whole


@pytest.mark.long
def test_a_node_that_joins_later_is_taken_in(tmp_path):
    """torchrun ends the ranks by SIGTERM to start more: they save first, so no step is lost.

    It tells a node that joins where the ranks' store is only if its own store is not shared with them.
    """
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    held = hold_port()
    port = held.getsockname()[1]
    options, more = elastic(port, last_call=1), ("train.steps=1000000", "checkpoint.every=100000")
    agents = [torchrun(tmp_path, *options, log="first", more=more, **own_store)]

    def logs() -> str:
        return "".join((tmp_path / name).read_text() for name in ("first", "second") if (tmp_path / name).exists())

    def wait_for(happened) -> None:
        deadline = time.monotonic() + 240
        while not happened():
            assert time.monotonic() < deadline and all(agent.poll() is None for agent in agents), logs()
            time.sleep(0.1)

    try:
        wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists() and len(losses(tmp_path / "run")) > 3)
        agents.append(torchrun(tmp_path, *options, log="second", more=more, **own_store))
        wait_for(lambda: "2 ranks on cpu" in logs())
        before = len(losses(tmp_path / "run"))
        wait_for(lambda: len(losses(tmp_path / "run")) > before + 3)
    finally:
        kill_all(agents)
        held.close()
    stopped, resumed = (
        re.findall(words, logs()) for words in (r"stopped after step (\d+)", r"resuming after step (\d+)")
    )
    assert len(stopped) == 1 and stopped == resumed, logs()
    assert sorted(losses(tmp_path / "run")) == list(range(1, len(losses(tmp_path / "run")) + 1))
