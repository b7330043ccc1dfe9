"""Laws of adapting on real ranks: a run leaves what is slow or too small, all ranks together, and no number changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import TINY, Death, SlowDisk, losses, train

from zerocli.config.options import AUTOMATIC
from zerocli.plan.search.adapt import PAYBACK

FREE = frozenset(AUTOMATIC)
SETS = [*TINY, "model.layers=3", "model.hidden=64", "train.batch=8", "train.seq=16", "train.steps=12"]
SETS += ["checkpoint.every=5", "optimizer.schedule=constant"]  # a run's length changes no loss
AWAY = ("zero.stage=2", "offload.placement=optimizer=nvme", "train.adapt=true")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def placement(folder: Path) -> str:
    """Return the placement in the run's config, which a resumed run takes."""
    return json.loads((folder / "config.json").read_text())["offload"]["placement"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """The key of a small file to train on."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(Path(__file__).read_text())
    return f"data.path={path}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory, data) -> dict[int, float]:
    """The losses of a run with everything on the device."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    assert train(folder, *SETS, data, "zero.stage=2").codes == [0, 0]
    return losses(folder)


def test_a_run_leaves_a_slow_disk_and_changes_no_number(tmp_path, data, plain):
    (swap := tmp_path / "swap").mkdir()
    sets = (*SETS, data, *AWAY, f"offload.nvme_path={swap}")
    ended = train(tmp_path / "run", *sets, events=(SlowDisk(),))
    assert ended.codes == [0, 0], ended.said
    assert losses(tmp_path / "run") == plain
    [changed] = [row for row in rows(tmp_path / "run") if "adapted" in row]
    assert changed["step"] <= 20 and "--offload none" in changed["adapted"]
    assert f"adapted before step {changed['step']}: --offload none" in ended.said[0]
    assert placement(tmp_path / "run") == "" and not list(swap.iterdir())
    [entry] = json.loads((tmp_path / "run" / "auto.json").read_text())["changes"]
    assert entry["step"] == changed["step"] - 1 and entry["reason"] in changed["adapted"]
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert any(note.startswith(f"adapted before step {changed['step']}") for note in profile["notes"])


@pytest.mark.long
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)], ids=["one", "all"])
def test_a_run_killed_while_it_moves_resumes_to_the_same_numbers(tmp_path, data, plain, at, ranks):
    (swap := tmp_path / "swap").mkdir()
    sets = (*SETS, data, *AWAY, f"offload.nvme_path={swap}", "train.watchdog=0")
    killed = train(tmp_path / "run", *sets, events=(SlowDisk(),), death=Death(ranks, at, "move"), awaited=ranks)
    assert -9 in killed.codes, killed.said
    assert placement(tmp_path / "run") == "optimizer=nvme"
    resumed = train(tmp_path / "run", *sets, resume=True)
    assert resumed.codes == [0, 0], resumed.said
    assert losses(tmp_path / "run") == plain


@pytest.mark.long
def test_a_run_killed_after_its_move_goes_on_from_there(tmp_path, data, plain):
    (swap := tmp_path / "swap").mkdir()
    sets = (*SETS, data, *AWAY, f"offload.nvme_path={swap}", "train.watchdog=0", "checkpoint.every=2")
    killed = train(tmp_path / "run", *sets, events=(SlowDisk(),), death=Death((0, 1), 11, "optimizer"))
    assert killed.codes == [-9, -9] and placement(tmp_path / "run") == "", killed.said
    left = [each for each in sets if "placement" not in each] + ["offload.placement="]  # as config.json has it
    resumed = train(tmp_path / "run", *left, resume=True)
    assert resumed.codes == [0, 0], resumed.said
    assert losses(tmp_path / "run") == plain and "adapted" not in resumed.said[0]


@pytest.mark.long
def test_what_auto_chose_adapts_and_a_resumed_run_keeps_it(tmp_path):
    """Without memory for both, a slow disk is left for recomputation."""
    (swap := tmp_path / "swap").mkdir()
    sets = ["train.steps=14", "model.layers=4", "model.hidden=128", "model.heads=4", "train.batch=16", "train.seq=16"]
    sets += ["offload.staging=1MiB", "offload.read_ahead=1MiB", f"offload.nvme_path={swap}", "checkpoint.every=100"]
    sets += ["train.gpu_memory=17500000B", "zero.stage=2"]
    free = FREE - {"zero.stage"}
    still = train(tmp_path / "still", *sets, "train.adapt=false", auto=free)
    moved = train(tmp_path / "moved", *sets, auto=free, events=(SlowDisk(0.02),))
    assert (still.codes, moved.codes) == ([0, 0], [0, 0]), moved.said
    assert losses(tmp_path / "moved") == losses(tmp_path / "still")
    before = json.loads((tmp_path / "still" / "config.json").read_text())
    after = json.loads((tmp_path / "moved" / "config.json").read_text())
    if "nvme" not in before["offload"]["placement"]:
        pytest.skip("this machine's rates have --auto leave the disk alone")
    assert "nvme" not in after["offload"]["placement"]
    assert after["activations"]["policy"] != before["activations"]["policy"]
    more = [*sets, "train.steps=16"]
    resumed = train(tmp_path / "moved", *more, auto=free, resume=True)
    assert resumed.codes == [0, 0] and "which the run had changed to before it was resumed" in resumed.said[0]
    assert "adapted" not in resumed.said[0]


@pytest.mark.long
def test_a_disk_that_is_slow_now_and_then_changes_a_run_once_in_fifty_steps(tmp_path, data):
    (swap := tmp_path / "swap").mkdir()
    sets = (*SETS, data, *AWAY, f"offload.nvme_path={swap}", "train.steps=110", "checkpoint.every=0")
    ended = train(tmp_path / "run", *sets, events=(SlowDisk(0.2, 3, 9),))
    assert ended.codes == [0, 0], ended.said
    changed = [row["step"] for row in rows(tmp_path / "run") if "adapted" in row]
    assert changed and all(b - a >= PAYBACK for a, b in zip(changed, changed[1:], strict=False))


# -- out of memory -----------------------------------------------------------------------------------------------------


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (injected)")


SHORT = (*SETS, "train.steps=3", "checkpoint.every=0")


@pytest.mark.parametrize(
    "only, at, more",
    [
        ("forward", 7, ()),
        pytest.param("forward", 6, ("train.accumulate=2",), marks=pytest.mark.long),
        pytest.param("reduce", 2, (), marks=pytest.mark.long),
        pytest.param("forward", 12, ("zero.stage=3",), marks=pytest.mark.long),
        pytest.param("forward", 9, ("zero.stage=0",), marks=pytest.mark.long),
    ],
)
def test_memory_that_does_not_suffice_on_one_rank_has_all_go_on_with_less(tmp_path, data, plain, only, at, more):
    free = FREE - {each.partition("=")[0] for each in more}
    ended = train(tmp_path / "run", *SHORT, data, *more, auto=free, death=Death((1,), at, only, act=run_out))
    assert ended.codes == [0, 0], ended.said
    if more == ("train.accumulate=2",):  # stages sum micro-steps in orders of their own
        assert train(tmp_path / "plain", *SHORT, data, *more, "train.adapt=false", auto=free).codes == [0, 0]
        plain = losses(tmp_path / "plain")
    assert losses(tmp_path / "run") == {step: plain[step] for step in (1, 2, 3)}
    [changed] = [row for row in rows(tmp_path / "run") if "adapted" in row]
    assert "memory did not suffice" in changed["adapted"] and "memory did not suffice" in ended.said[0]
    policy = json.loads((tmp_path / "run" / "config.json").read_text())["activations"]["policy"]
    assert policy != "keep" and f"activations.policy={policy}" in changed["adapted"]


@pytest.mark.long
def test_memory_that_no_placement_has_ends_the_run_with_a_message(tmp_path):
    sets = (*SHORT, "activations.policy=keep", "zero.stage=0")
    free = FREE - {"activations.policy", "zero.stage"}
    ended = train(tmp_path / "run", *sets, auto=free, death=Death((1,), 5, "forward", act=run_out))
    assert ended.codes == [3, 3] and "no placement of stage 0 needs less" in ended.said[0], ended.said
