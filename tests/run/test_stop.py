"""SIGTERM to any one rank, at any time, ends the run with a whole checkpoint of the step that all ranks have made."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from lengths import ALL
from runs import Death, losses, train

from zerocli.checkpoint.folder import Folder
from zerocli.checkpoint.manifest import read
from zerocli.errors import PREEMPTED

SETS = ("checkpoint.every=3", "data.split=0.01", "train.eval_every=2", "train.eval_batches=3", "zero.stage=3")
KINDS = ("start", "", "checkpoint", "")
"""Events at which the signal comes: stages of the start, anything (half of it evaluation), stages of saves."""
SHORT = {"start": 8, "checkpoint": 6, "": 150}
"""The events of each kind among which one is drawn: most signals then come before the last step."""


NUM_MOMENTS = 30 if ALL else 16
LAG = 3
"""Steps that a run may make after a signal, and that are not in its metrics yet when the signal comes."""


def stop_here(folder: Path) -> None:
    """Send this process SIGTERM, and note how many steps are recorded."""
    recorded = folder / "metrics.jsonl"
    (folder / "signalled").write_text(str(recorded.read_text().count("\n") if recorded.exists() else 0))
    os.kill(os.getpid(), signal.SIGTERM)


def moments(number: int, seed: int, folder: Path) -> list[Death]:
    draw, act = random.Random(seed), functools.partial(stop_here, folder)
    kinds = [KINDS[index % len(KINDS)] for index in range(number)]
    return [Death((draw.randrange(2),), draw.randint(1, SHORT[kind]), kind, act=act) for kind in kinds]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder, *SETS).codes == [0, 0]
    return losses(folder)


def stopped_whole(folder: Path, codes: list[int], said: list[str], whole: dict[int, float]) -> bool:
    """Check how a run ended that a signal reached; return whether that came before its last step."""
    newest = Folder(folder / "checkpoints").committed()[0]
    assert read(newest.path).step == max(losses(folder)) == newest.step
    assert not list((folder / "checkpoints").glob("*.tmp")) and "Traceback" not in "".join(said)
    assert losses(folder) == {step: loss for step, loss in whole.items() if step <= newest.step}
    if newest.step < max(whole):
        assert codes == [PREEMPTED, PREEMPTED] and f"stopped after step {newest.step}" in said[0], said
        assert train(folder, *SETS, resume=True).codes == [0, 0]
        assert losses(folder) == whole
        return True
    assert codes == [0, 0], said
    return False


@pytest.mark.parametrize(
    ("death", "early"),
    [
        (Death((1,), 1, "start opening the process group", signal.SIGTERM), True),
        pytest.param(Death((0,), 2, "checkpoint write", signal.SIGTERM), False, marks=pytest.mark.long),
    ],
    ids=["start", "save"],
)
def test_a_signal_to_one_rank_in_its_start_or_in_a_save_is_obeyed(tmp_path, whole, death, early):
    ended = train(tmp_path / "run", *SETS, death=death)
    assert stopped_whole(tmp_path / "run", ended.codes, ended.said, whole) or not early


@pytest.mark.long
@pytest.mark.parametrize("number", range(NUM_MOMENTS))
def test_a_signal_to_one_rank_at_any_time_is_obeyed(tmp_path, whole, number):
    folder = tmp_path / "run"
    ended = train(folder, *SETS, death=moments(NUM_MOMENTS, 7, folder)[number])
    early = stopped_whole(folder, ended.codes, ended.said, whole)
    noted = folder / "signalled"  # some events do not come on each rank
    assert early or not noted.exists() or int(noted.read_text()) + LAG >= max(whole)


def soon(seconds: float) -> None:
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM)).start()


@pytest.mark.long
def test_a_signal_during_the_first_compilation_is_obeyed(tmp_path):
    sets = ("model.compile=true", "train.steps=40", "checkpoint.every=1000")
    death = Death((1,), 1, "forward", act=functools.partial(soon, 1.0))
    ended = train(tmp_path / "run", *sets, death=death)
    newest = Folder(tmp_path / "run/checkpoints").committed()[0]
    assert newest.step == max(losses(tmp_path / "run"))
    assert ended.codes in ([PREEMPTED, PREEMPTED], [0, 0]), ended.said
    assert (ended.codes[0] == 0) == (newest.step == 40)
