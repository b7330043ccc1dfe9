"""A signal to any one rank, at any time, ends the run with a whole checkpoint of the step that all ranks have made."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from agents import kill_all, workers
from lengths import ALL
from runs import STUCK, Death, losses, train
from torch._dynamo import callback

from zerocli.checkpoint.folder import Folder
from zerocli.checkpoint.manifest import read
from zerocli.engine.events import Probe
from zerocli.errors import PREEMPTED
from zerocli.ranks import attempts, store

STEPS, SAVED = 6, 3
SETS = (f"checkpoint.every={SAVED}", "data.split=0.01", "train.eval_every=2", "train.eval_batches=3", "zero.stage=3")
LAG = 2
"""Steps that a run may make after a signal: ranks ask each other in the next one, and have the answer in another."""
UPDATES = STEPS - 1 - LAG
"""A signal after at most so many begun updates must stop the run before its last step."""
NUM_MOMENTS = 30 if ALL else 16
COMMAND = [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")]
COMMAND += ["-m", "zerocli", "train", "tiny", "--steps", "1"]
KINDS = ("start", "", "checkpoint", "")
"""Events at which the signal comes: stages of the start, anything (much of it evaluation), stages of the first save."""


SENT = threading.Event()


class Moments(Probe):
    """Counts the events of a rank, and sends it a signal at the `count`-th of a name; notes all if that is 0."""

    def __init__(self, folder: Path, rank: int = 0, name: str = "", count: int = 0, number: int = signal.SIGTERM):
        super().__init__(self.meet)
        self.folder, self.about = folder, (rank, name, count, number)
        self.updates, self.counts, self.met = 0, Counter(), []

    def meet(self, name: str) -> None:
        rank, awaited, count, number = self.about
        here = int(os.environ["RANK"])
        if count and here != rank:
            return
        if name == "optimizer":
            if self.updates == UPDATES and awaited.startswith("checkpoint"):
                SENT.wait()  # by the thread of the first save, which steps do not wait for
            self.updates += 1
        self.counts[name] += 1
        self.met.append((self.updates, name, self.counts[name]))
        if not count:
            (self.folder / f"met{here}").write_text(json.dumps(self.met))
        elif (name, self.counts[name]) == (awaited, count):
            os.kill(os.getpid(), number)
            (self.folder / "updates").write_text(str(self.updates))
            SENT.set()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[dict[int, float], list[list[tuple[int, str, int]]]]:
    """The losses of an undisturbed run, and each rank's events in their order: updates begun, name, how many of it."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder / "run", *SETS, events=(Moments(folder),)).codes == [0, 0]
    return losses(folder / "run"), [json.loads((folder / f"met{rank}").read_text()) for rank in range(2)]


def moments(number: int, seed: int, met: list[list[tuple[int, str, int]]]) -> list[tuple[int, str, int, int]]:
    """Draw (rank, name, count, signal) such that the run cannot end before it has to obey."""
    draw, found = random.Random(seed), []
    for index in range(number):
        kind, rank = KINDS[index % len(KINDS)], draw.randrange(2)
        last = {name: count for _, name, count in met[rank]}
        early = [
            (name, count)
            for updates, name, count in met[rank]
            if name.startswith(kind)
            and (count <= last[name] // 2 if name.startswith("checkpoint") else updates <= UPDATES)
        ]
        found.append((rank, *draw.choice(early), draw.choice((signal.SIGTERM, signal.SIGUSR1))))
    return found


def stops(folder: Path, whole: dict[int, float], moment: tuple[int, str, int, int]) -> None:
    """Send a signal in a run: it ends within LAG steps, all ranks at the same one, and resumes from there."""
    folder.mkdir(exist_ok=True)
    ended = train(folder / "run", *SETS, events=(Moments(folder, *moment),))
    newest = Folder(folder / "run/checkpoints").committed()[0]
    assert ended.codes == [PREEMPTED, PREEMPTED], (moment, ended.said)
    assert newest.step <= int((folder / "updates").read_text()) + LAG < STEPS
    assert f"stopped after step {newest.step}" in ended.said[0] and "Traceback" not in "".join(ended.said)
    assert read(newest.path).step == max(losses(folder / "run")) == newest.step
    assert not list((folder / "run/checkpoints").glob("*.tmp"))
    assert losses(folder / "run") == {step: loss for step, loss in whole.items() if step <= newest.step}
    assert train(folder / "run", *SETS, resume=True).codes == [0, 0]
    assert losses(folder / "run") == whole


@pytest.mark.parametrize(
    "moment",
    [
        (1, "start opening the process group", 1, signal.SIGTERM),
        pytest.param((0, "checkpoint write", 1, signal.SIGUSR1), marks=pytest.mark.long),
    ],
    ids=["start", "save"],
)
def test_a_signal_to_one_rank_in_its_start_or_in_a_save_is_obeyed(tmp_path, whole, moment):
    stops(tmp_path, whole[0], moment)


@pytest.mark.long
@pytest.mark.parametrize("number", range(NUM_MOMENTS))
def test_a_signal_to_one_rank_at_any_time_is_obeyed(tmp_path, whole, number):
    stops(tmp_path, whole[0], moments(NUM_MOMENTS, 7, whole[1])[number])


@pytest.mark.long
def test_a_signal_after_the_last_step_changes_nothing(tmp_path, whole):
    """It comes in the evaluation after that step."""
    updates, name, last = next(met for met in reversed(whole[1][1]) if not met[1].startswith("checkpoint"))
    assert updates == STEPS
    ended = train(tmp_path / "run", *SETS, events=(Moments(tmp_path, 1, name, last),))
    assert ended.codes == [0, 0] and (tmp_path / "updates").read_text() == str(STEPS), ended.said
    assert losses(tmp_path / "run") == whole[0]


def before_the_other_comes(rank: int, folder: str) -> str:
    """Rank 1 dies before it has come to the store, and rank 0 is told to stop when it waits there."""
    if rank == 1:
        store._connect = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
    found = attempts._get

    def get(*given: object) -> bytes | None:
        if given[1] == attempts.ALL_HERE:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return found(*given)

    attempts._get = get
    return folder


def test_a_signal_before_all_ranks_have_come_ends_those_that_wait(tmp_path):
    """torchrun tells the others to stop when a rank has died, and kills them much later."""
    ended = train(tmp_path / "run", *SETS, before=before_the_other_comes)
    assert ended.codes == [PREEMPTED, -signal.SIGKILL], ended.said
    assert "rank 0 was told to stop (SIGTERM) before all ranks had come: no step was made" in ended.said[0]
    assert "rror" not in ended.said[0]


@pytest.mark.long
def test_a_rank_told_to_stop_in_its_start_does_not_wait_for_one_that_does_not_answer(tmp_path):
    """A stopped process stands for one on another machine, which is not seen to be gone."""
    where = "start opening the process group"
    events, death = (Moments(tmp_path, 0, where, 1),), Death((1,), 1, where, signal.SIGSTOP)
    ended = train(tmp_path / "run", *SETS, "train.watchdog=600", events=events, death=death, awaited=[0], seconds=300)
    assert ended.codes == [1, STUCK], ended.said
    assert "another rank was lost during opening the process group: rank 1 does not answer" in ended.said[0]


@pytest.mark.long
def test_torchrun_ends_in_seconds_when_a_rank_dies_before_it_has_come(tmp_path):
    agent = subprocess.Popen(
        [*COMMAND, "--set", f"checkpoint.every={SAVED}", "--run-dir", "run"],
        cwd=tmp_path,
        stderr=(tmp_path / "log").open("w"),
        start_new_session=True,
    )
    try:
        ranks: dict[bytes, int] = {}
        while len(ranks) < 2:
            for pid in workers(agent):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks |= {each: pid for each in variables if each.startswith(b"RANK=")}
        first, last = ranks[b"RANK=0"], ranks[b"RANK=1"]
        os.kill(last, signal.SIGSTOP)
        while not caught(first) >> (signal.SIGTERM - 1) & 1:
            time.sleep(0.05)
        os.kill(last, signal.SIGKILL)
        agent.wait(600)
    finally:
        kill_all([agent])
    assert re.search(r"rank +: 0 .*\n +exitcode +: 75", (tmp_path / "log").read_text())


def caught(pid: int) -> int:
    """The signals for which a process has handlers, as bits."""
    return int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)


def in_a_compilation(rank: int, folder: str) -> str:
    """Send rank 1 a signal once it compiles for the first time."""

    def stop(*_: object) -> None:
        callback.callback_handler.remove_start_callback(stop)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == 1:
        callback.callback_handler.register_start_callback(stop)
    return folder


@pytest.mark.long
def test_a_signal_during_the_first_compilation_is_obeyed(tmp_path):
    ended = train(tmp_path / "run", "model.compile=true", "checkpoint.every=1000", before=in_a_compilation)
    newest = Folder(tmp_path / "run/checkpoints").committed()[0]
    assert ended.codes == [PREEMPTED, PREEMPTED], ended.said
    assert newest.step == max(losses(tmp_path / "run")) <= 1 + LAG
