"""A lost rank is one clear message in each that remains: what was under way, who is gone, what is saved, what next."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from runs import TINY, Death, train

from zerocli.checkpoint.folder import Folder
from zerocli.ranks.loss import Severed, severed
from zerocli.ranks.worker import within
from zerocli.run.processes.heartbeats import Heartbeat, Heartbeats, lost_ranks

SETS = ("zero.stage=3", "train.watchdog=3")


@pytest.mark.parametrize(
    ("death", "during", "who"),
    [
        (Death((1,), 24, "gather"), r"all_gather of parameters of \S+", "rank 1 is gone"),
        pytest.param(
            *(Death((1,), 14, "reduce"), r"(reduce_scatter of gradients|all_gather of parameters) of", "rank 1 is"),
            marks=pytest.mark.long,
        ),
        (Death((0,), 24, "gather"), r"all_gather of parameters of", "rank 0 is gone"),
    ],
    ids=["gather", "reduce", "rank 0"],
)
def test_a_lost_rank_is_named_with_what_was_under_way_and_what_is_saved(tmp_path, death, during, who):
    ended = train(tmp_path / "run", *SETS, "checkpoint.async=false", death=death)
    (dead,) = death.ranks
    said = ended.said[1 - dead]
    assert ended.codes[1 - dead] == 1 and ended.codes[dead] == -signal.SIGKILL
    (message,) = [line for line in said.splitlines() if "was lost" in line]
    assert re.search(f"another rank was lost during {during}", message) and who in message
    newest = Folder(tmp_path / "run/checkpoints").committed()[0].step
    assert f"step {newest} is saved" in message
    assert f"train --resume --run-dir {tmp_path / 'run'}" in said and "Traceback" not in said and "a bug" not in said


@pytest.mark.long
def test_only_the_rank_that_was_lost_is_named_by_one_of_those_that_end_for_it(tmp_path):
    ended = train(tmp_path / "run", *SETS, "checkpoint.every=0", world=3, death=Death((1,), 7, "gather"))
    assert ended.codes == [1, -signal.SIGKILL, 1]
    said = ended.said[0] + ended.said[2]
    assert said.count("another rank was lost during") == 1 and "no checkpoint was written" in said
    assert f"rank 1 is on node {socket.gethostname()}" in said and "rank 1 is gone" in said
    assert not re.search(r"rank [02] ", said) and "Traceback" not in said


def test_a_rank_lost_in_its_start_is_found_by_its_process(tmp_path):
    """Nothing else would tell those that wait for it in the store, long before the watchdog's limit."""
    started, where = time.monotonic(), "opening the process group"
    ended = train(tmp_path / "run", "train.watchdog=600", death=Death((1,), 1, f"start {where}"))
    assert ended.codes == [1, -signal.SIGKILL], ended.said
    assert re.search(rf"^error: another rank was lost during {where}: rank 1 is gone", ended.said[0], re.M), ended.said
    assert "train.watchdog" not in ended.said[0] and time.monotonic() - started < 300


def test_a_rank_lost_in_its_last_save_ends_the_run_with_what_is_saved(tmp_path):
    """Nothing but the save is left to notice it."""
    ended = train(tmp_path / "run", *SETS, "train.steps=2", death=Death((1,), 1, "checkpoint write"))
    assert ended.codes == [1, -signal.SIGKILL]
    message = ended.said[0].splitlines()[-2]
    assert "another rank was lost during checkpoint of step 2: rank 1 is gone" in message
    assert "no checkpoint was written" in message and "Traceback" not in ended.said[0]


@pytest.mark.long
def test_the_command_says_how_to_go_on_after_a_rank_was_killed(tmp_path):
    sets = [word for each in (*TINY, *SETS, "train.steps=100000", "train.log_every=1000") for word in ("--set", each)]
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "zerocli", "train", "tiny", *sets, "--ranks", "2", "--run-dir", "run"]
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        victim = None
        while victim is None or not Folder(tmp_path / "run/checkpoints").committed():
            assert run.poll() is None
            victim = next((pid for pid in children(run.pid) if b"RANK=1" in environment(pid)), None)
            time.sleep(0.02)
        os.kill(victim, signal.SIGKILL)
        said = run.communicate(timeout=300)[1]
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 1 and "rank 1 was killed" in said
    assert re.search(r"^step \d+ is saved$", said, re.M)
    assert f"try: zerocli train --resume --run-dir {tmp_path / 'run'}" in said
    said += (tmp_path / "run/logs/rank0.log").read_text()  # of the rank that remained
    assert "error: another rank was lost during" in said
    assert "Traceback" not in said and "a bug in zerocli" not in said


def children(parent: int) -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


# -- the words of it ---------------------------------------------------------------------------------------------------


def test_a_mistake_of_ours_is_not_taken_for_a_lost_rank():
    gloo = (
        "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:2: Connection reset by peer. This is"
    )
    found = severed(RuntimeError(gloo), "all_gather of parameters of blocks.1")
    assert isinstance(found, Severed) and found.reason == "Read error [::1]:2: Connection reset by peer"
    assert severed(found) is found
    wrong = "[enforce fail at /src/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes"
    for error in (
        RuntimeError(wrong),
        RuntimeError("shape mismatch"),
        ValueError(gloo),
        dist.DistBackendError("usage"),
    ):
        assert severed(error) is None


def test_what_does_not_answer_holds_nobody_up():
    """The disk of the run folder may be the very thing that is stuck."""
    never = threading.Event()
    assert within(0.01, never.wait) is None and within(60, lambda: 7) == 7
    never.set()


def test_last_words_tell_a_cause_from_its_consequences():
    store = dist.HashStore()
    ranks = [Heartbeats(rank, range(4), store) for rank in range(4)]
    ranks[1].say(Heartbeat(1.0, 0.0, ended="loss is nan at step 3"))
    ranks[2].say(Heartbeat(1.0, 0.0, ended="all_gather failed", by_loss=True))
    ranks[3].say(Heartbeat(1.0, 0.0, doing="in all_reduce of activations"))
    said = lost_ranks(ranks[0], lambda: None)
    assert said == "rank 1 ended (loss is nan at step 3); rank 3 does not answer (it was in all_reduce of activations)"
    times = itertools.count(2.0)
    said = lost_ranks(ranks[0], lambda: ranks[3].say(Heartbeat(next(times), 0.0)))
    assert said == "rank 1 ended (loss is nan at step 3)"
