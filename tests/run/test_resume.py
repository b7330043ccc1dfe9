"""Runs that are stopped, killed or damaged go on where they were, to the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import Death, as_rank_0, deaths, losses, train

from zerocli.checkpoint.folder import Folder
from zerocli.cli import main as cli

NUM_DEATHS = int(os.environ.get("ZEROCLI_TEST_DEATHS", "6" if "ZEROCLI_TEST_LONG" in os.environ else "3"))
"""More of them: ZEROCLI_TEST_DEATHS=50 pytest tests/run/test_resume.py"""


def steps_of(folder: Path) -> list[int]:
    return [found.step for found in Folder(folder / "checkpoints").newest_first()]


@pytest.mark.long
def test_a_killed_run_resumes_to_the_same_losses(tmp_path):
    """kill -9 of one rank, or of all, in forward, backward, update, transfer and every stage of a save."""
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    sets = ("zero.stage=3", "offload.placement=params=cpu,optimizer=nvme", f"offload.nvme_path={nvme}")
    sets = (*sets, "train.watchdog=0")  # those that remain need not find out who is gone
    assert train(tmp_path / "whole", *sets).codes == [0, 0]
    whole = losses(tmp_path / "whole")
    assert len(whole) == 6
    num_killed = 0
    for number, death in enumerate(deaths(2024, NUM_DEATHS, 2)):
        folder = tmp_path / f"run{number}"
        killed = train(folder, *sets, death=death)
        num_killed += -9 in killed.codes
        committed = [found.step for found in Folder(folder / "checkpoints").committed()]
        resumed = train(folder, *sets, resume=True)
        assert resumed.codes == [0, 0], (death, resumed.said)
        # From the newest that was whole when it died, and no other.
        expected = f"resuming after step {committed[0]}" if committed else "nothing to resume"
        assert expected in resumed.said[0] or "nothing is left" in resumed.said[0], (death, resumed.said[0])
        assert losses(folder) == whole, death
        assert steps_of(folder) == [6, 4] and not list((folder / "checkpoints").glob("*.tmp"))
        assert not list(nvme.iterdir()), death
    assert num_killed >= 0.8 * NUM_DEATHS  # a few are set for a moment that their run does not reach


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, float]:
    """The losses of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train(folder).codes == [0, 0]
    return losses(folder)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)], ids=["SIGTERM", "SIGUSR1"]
)
def test_a_signal_to_one_rank_saves_on_all_and_says_75(tmp_path, whole, number):
    stopped = train(tmp_path / "run", "checkpoint.every=100", death=Death((1,), 20, "", number))
    assert stopped.codes == [75, 75], stopped.said
    [step] = steps_of(tmp_path / "run")
    assert 1 <= step < 6 and f"stopped after step {step}" in stopped.said[0]
    assert list(losses(tmp_path / "run")) == list(range(1, step + 1))
    assert recorded(tmp_path / "run")["losses"] == list(losses(tmp_path / "run").values())
    resumed = train(tmp_path / "run", resume=True)
    assert resumed.codes == [0, 0] and f"resuming after step {step}" in resumed.said[0]
    assert losses(tmp_path / "run") == whole


def recorded(run: Path) -> dict:
    """What `zerocli profile RUN` shows of a run that ended early; its books balance."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert cli.run(["profile", str(run), "--json"]) == 0
    document = json.loads(shown.getvalue(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document == json.loads((run / "profile.json").read_text()) and not document["followed"]
    for tier, peak in document["peak"].items():
        assert sum(row["measured"] for row in document["rows"] if row["tier"] == tier) == peak["measured"]
    held = {row["category"]: row["measured"] for row in document["rows"] if row["tier"] == "hbm"}
    assert held["parameters"] and held["optimizer_states"] and document["step"]["seconds"] > 0
    return document


def test_a_run_that_its_own_loss_ends_has_recorded_itself(tmp_path):
    ended = train(tmp_path / "run", "optimizer.lr=1e30", "optimizer.warmup=0", "train.clip=0")
    assert ended.codes == [1, 1] and "was not applied" in ended.said[0] and "Traceback" not in ended.said[0], ended.said
    assert recorded(tmp_path / "run")["losses"][-1] is None  # not a number


@pytest.mark.long
def test_a_run_saves_when_its_time_is_nearly_up(tmp_path, whole):
    stopped = train(tmp_path / "run", "checkpoint.every=0", "checkpoint.time_limit=0.001")
    assert stopped.codes == [75, 75] and "time limit" in stopped.said[0]
    assert train(tmp_path / "run", resume=True).codes == [0, 0]
    assert losses(tmp_path / "run") == whole


@pytest.mark.long
def test_a_run_goes_on_with_another_number_of_ranks_and_another_stage(tmp_path):
    """1 -> 2 -> 4 -> 3 ranks, one global batch of 12: the same data, and losses to rounding."""
    common = ("train.global_batch=12", "train.steps=8", "checkpoint.every=2", "optimizer.schedule=constant")
    for world, stage, steps in ((1, 0, 2), (2, 3, 4), (4, 2, 6), (3, 1, 8)):
        # The schedule is constant: what remains of a run must not depend on where it is cut.
        sets = (*common, f"zero.stage={stage}", f"train.steps={steps}", f"train.batch={6 if world == 1 else 1}")
        ended = train(tmp_path / "run", *sets, world=world, resume=True)
        assert not any(ended.codes), ended.said
    assert train(tmp_path / "constant", *common, "train.batch=6", world=1).codes == [0]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "constant"), rel=2e-5)


def test_a_changed_global_batch_goes_on_in_the_data_where_it_stopped(tmp_path):
    from zerocli.data.batches import Batches
    from zerocli.data.tokens import open_source

    source = open_source("", seq=8)
    before, after = Batches(source, 2, 8), Batches(source, 3, 8, begun=(5, 20))
    seen = [before.batch(step, 0, rank, 2)[0] for step in range(1, 6) for rank in range(2)]
    seen += [after.batch(6, 0, rank, 2)[0] for rank in range(2)]
    straight = Batches(source, 1, 8)
    assert [row.tolist() for batch in seen for row in batch] == [
        straight.batch(step, 0, 0, 1)[0][0].tolist() for step in range(1, 27)
    ]
    assert before.seen(5, 2) == 20 and after.seen(7, 2) == 32


def test_the_newest_whole_one_is_taken_and_what_was_passed_over_is_said(tmp_path, whole):
    run = tmp_path / "run"
    assert train(run, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9").codes == [0, 0]
    four, three, two, _ = [found.path for found in Folder(run / "checkpoints").newest_first()]
    data = bytearray((four / "rank-00001.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (four / "rank-00001.bin").write_bytes(data)
    (three / "manifest.json").rename(three / "manifest.json.part")
    (run / "checkpoints/step-00000009.tmp").mkdir()
    resumed = train(run, "optimizer.lr=0.001", resume=True)
    assert resumed.codes == [0, 0], resumed.said
    said = resumed.said[0]
    assert "checkpoint of step 4 skipped: rank-00001.bin is damaged within bytes" in said
    assert "checkpoint of step 3 skipped: it was not finished" in said and "resuming after step 2" in said
    assert "note: optimizer.lr was 0.0" in said and "is 0.001 now" in said and "sequences" not in said
    assert not list((run / "checkpoints").glob("*.tmp"))
    assert {found.step for found in Folder(run / "checkpoints").newest_first()} == {6, 4}


@pytest.mark.long
def test_a_run_goes_on_with_another_batch_in_its_data_and_says_so(tmp_path):
    """At a rate of almost nothing a step's loss is that of its samples, whichever step they are in."""
    still = ("optimizer.lr=1e-30", "optimizer.weight_decay=0", "optimizer.schedule=constant")
    assert train(tmp_path / "each", *still, "train.batch=1", "train.steps=8").codes == [0, 0]
    of_pairs = list(losses(tmp_path / "each").values())
    run = tmp_path / "run"
    assert train(run, *still, "train.steps=2").codes == [0, 0]
    resumed = train(run, *still, "train.batch=3", "train.steps=3", resume=True)
    assert resumed.codes == [0, 0] and "note: a step was of 4 sequences and is of 6 now" in resumed.said[0]
    assert losses(run)[3] == pytest.approx(sum(of_pairs[4:7]) / 3, rel=1e-6)
    split = train(run, *still, "train.batch=6", "train.steps=4", world=1, resume=True)
    assert split.codes == [0] and "resuming after step 3" in split.said[0] and "sequences and is" not in split.said[0]


def test_a_run_with_nothing_whole_left_stops_and_one_with_nothing_saved_starts(tmp_path):
    run = tmp_path / "run"
    assert train(run, "train.steps=2", "checkpoint.every=1").codes == [0, 0]
    for found in Folder(run / "checkpoints").newest_first():
        (found.path / "rank-00000.bin").write_bytes(b"")
    stopped = train(run, resume=True)
    assert stopped.codes == [1, 1] and "none of the 2 checkpoints" in stopped.said[0]
    assert "rank-00000.bin has 0 bytes" in stopped.said[0] and "Traceback" not in stopped.said[0]
    assert train(run, "train.steps=2").codes == [2, 2]  # a new run does not overwrite an old one's checkpoints
    fresh = train(tmp_path / "new", "train.steps=2", resume=True)
    assert fresh.codes == [0, 0] and "nothing to resume" in fresh.said[0]
    other = train(tmp_path / "new", "model.hidden=32", resume=True)
    assert other.codes == [2, 2] and "of another run: parameters/" in other.said[0] and "shape" in other.said[0]


SETS = "train.batch=2 train.seq=8 model.layers=2 model.hidden=16 model.heads=2 checkpoint.every=100000".split()
GIVEN = [word for each in SETS for word in ("--set", each)]
RUN = ["train", "--run-dir", "run"]


@pytest.mark.long
def test_the_command_saves_on_sigterm(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, "-m", "zerocli", *RUN, *GIVEN, "--steps", "100000", "--ranks", "1"],  # one starts sooner
        cwd=tmp_path,
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 75, said
    [step] = steps_of(tmp_path / "run")
    assert f"stopped after step {step}" in said and "SIGTERM: saving" in said


def test_a_run_resumes_with_its_own_config(tmp_path):
    step, metrics = 2, tmp_path / "run/metrics.jsonl"
    assert as_rank_0(tmp_path, [*RUN, *GIVEN, "--steps", str(step)])[0] == 0
    code, _, said = as_rank_0(tmp_path, [*RUN, "--resume", "--steps", str(step + 2)])
    assert code == 0 and f"resuming after step {step}" in said, said
    (tmp_path / "run/config.json").unlink()  # the checkpoint has it too
    code, _, said = as_rank_0(tmp_path, [*RUN, "--resume", "--steps", str(step + 3)])
    assert code == 0 and "config.json is missing: restored" in said and f"resuming after step {step + 2}" in said
    rows = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert rows == list(range(1, step + 4))
