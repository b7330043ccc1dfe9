"""Laws of `activations.policy=auto`: as few blocks are recomputed as fit, and every command says which."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from typing import Any

import pytest

from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.errors import UserError
from zerocli.plan import recompute
from zerocli.plan.build import plan_model
from zerocli.plan.inputs import shape_of
from zerocli.plan.recompute import MARGIN, choose_recompute, decide, needed_by
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Shape
from zerocli.plan.trace import trace

GIB = 2**30


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)


def drawn(seed: int) -> tuple[Shape, Setup]:
    """Return a random small model and how it is trained."""
    dice = random.Random(seed)
    family, seq, tp = dice.choice(["gpt2", "llama"]), dice.choice([16, 128, 1024]), dice.choice([1, 1, 2])
    model = ModelConfig(
        family=family,
        layers=dice.choice([1, 2, 5, 9]),
        hidden=dice.choice([64, 256, 1024]),
        heads=4,
        kv_heads=dice.choice([0, 2]) if family == "llama" else 0,
        vocab=dice.choice([200, 3000, 50000]),
        tie=dice.random() < 0.5,
    )
    where: dict[str, Any] = {"batch": dice.choice([1, 4]), "seq": seq, "tp": tp, "device": dice.choice(["cuda", "cpu"])}
    stage = dice.randrange(4)
    where["offload"] = dice.choice(["", "optimizer=cpu"]) if stage else ""
    return shape_of(model, seq), Setup(stage=stage, ranks=4, recompute="auto", **where)


@pytest.mark.parametrize("seed", range(24))
def test_the_choice_is_the_smallest_number_of_blocks_that_fits(seed):
    shape, setup = drawn(seed)
    needed = [needed_by(plan_model(shape, dataclasses.replace(setup, recompute=n))) for n in range(shape.layers + 1)]
    bottom = needed.index(min(needed))
    # What the bisection relies on: the peak falls to its lowest and rises from there.
    assert needed[: bottom + 1] == sorted(needed[: bottom + 1], reverse=True)
    assert needed[bottom:] == sorted(needed[bottom:])
    for limit in {*needed, min(needed) - 1, max(needed) + 1}:
        room = -int(-limit // (1 - MARGIN))
        allowed = int(room * (1 - MARGIN))
        count, reason = choose_recompute(shape, setup, room)
        fitting = [n for n, nbytes in enumerate(needed) if nbytes <= allowed]
        if fitting:
            assert count == fitting[0], (limit, needed)
            assert "no choice" not in reason
        else:
            assert needed[count] == min(needed) and "no choice leaves 4% free" in reason


def test_a_hundred_layers_take_a_dozen_plans(monkeypatch):
    """A plan of 100 layers takes 40 ms, so a choice takes half a second."""
    shape = shape_of(ModelConfig(layers=100, hidden=2048, heads=16, vocab=32000), 1024)
    setup = Setup(stage=3, ranks=8, batch=4, seq=1024, recompute="auto")
    plans = []

    def counted(*given: Any) -> Any:
        plans.append(given)
        return plan_model(*given)

    monkeypatch.setattr(recompute, "plan_model", counted)
    counts = {room: choose_recompute(shape, setup, room * GIB)[0] for room in (8, 16, 24, 32, 48, 64, 80)}
    assert list(counts.values()) == sorted(counts.values(), reverse=True)
    assert 0 < counts[24] < 100 and counts[80] == 0
    assert len(plans) <= 7 * 15
    assert len({given[1].recompute for given in plans}) > 10


def test_the_reason_names_what_is_kept_and_the_bytes():
    shape = shape_of(ModelConfig(layers=24, hidden=1024, heads=16, vocab=50304), 1024)
    setup = Setup(stage=1, ranks=1, batch=16, seq=1024, recompute="auto")
    kept, again = (needed_by(plan_model(shape, dataclasses.replace(setup, recompute=n))) for n in (0, 6))
    room = int(again / (1 - MARGIN)) + 1
    assert choose_recompute(shape, setup, room) == (
        6,
        f"18 of 24 blocks kept, 6 recomputed ({again / GIB:.1f} GiB of {room / GIB:.1f} GiB)",
    )
    assert choose_recompute(shape, setup, 2 * kept)[1].startswith("nothing recomputed (")
    assert choose_recompute(shape, setup, GIB)[1].startswith("all 24 blocks recomputed (")


def test_checkpoints_with_a_place_of_their_own_are_of_all_blocks():
    shape = shape_of(ModelConfig(layers=4), 128)
    setup = Setup(stage=1, recompute="auto", offload="activations=cpu")
    count, reason = choose_recompute(shape, setup, 1 << 50)
    assert count == 4 and reason.startswith("all 4 blocks recomputed (--offload activations=cpu")


def test_only_auto_is_decided_and_an_undecided_plan_is_refused():
    shape = shape_of(ModelConfig(layers=4), 128)
    for asked in (True, False, 3):
        assert decide(shape, Setup(recompute=asked), 1) == (Setup(recompute=asked), "")
    assert decide(10**9, Setup(recompute="auto"), 1) == (Setup(recompute=False), "")
    with pytest.raises(UserError, match="decided by a device's memory"):
        plan_model(shape, Setup(recompute="auto"))
    with pytest.raises(UserError, match="recompute=5: the model has 4 blocks"):
        plan_model(shape, Setup(recompute=5))


def test_of_a_traced_model_all_blocks_are_kept_or_all_recomputed():
    from zerocli.models import build

    model = ModelConfig(layers=4, hidden=128, heads=4, vocab=300)
    setup = Setup(stage=2, ranks=2, batch=8, seq=128, device="cpu", recompute="auto")
    ways = [dataclasses.replace(setup, recompute=each) for each in (False, True)]
    traced = trace("small", lambda: build(model, 128, "meta"), ways)
    kept, again = (traced.moving[2 <= setup.stage, count] for count in (0, max(n for _, n in traced.moving)))
    assert again < kept / 2
    for room, whole in ((1 << 40, False), (kept, True), (1, True)):
        decided, reason = decide(traced, setup, room)
        assert decided.recompute is whole
        assert "traced: all blocks are kept or all recomputed" in reason


# -- commands ----------------------------------------------------------------------------------------------------------

FIT = ["fit", "gpt2-xl", "--ranks", "1", "--stage", "1", "--offload", "", "--batch", "8", "--hardware", "h100"]


def test_fit_shows_what_each_candidate_recomputes(capsys):
    found = {}
    for policy in ("keep", "recompute", "auto"):
        cli.run([*FIT, "--set", f"activations.policy={policy}", "--gpu-memory", "36GiB", "--json"])
        [found[policy]] = json.loads(capsys.readouterr().out)["candidates"]
    assert [found[policy]["recomputed"] for policy in ("keep", "recompute")] == [0, 48]
    assert not found["keep"]["fits"] and found["recompute"]["fits"]
    auto = found["auto"]
    assert auto["policy"] == "auto" and auto["fits"] and 0 < auto["recomputed"] < 48
    count = auto["recomputed"]
    assert auto["activations"].startswith(f"{48 - count} of 48 blocks kept, {count} recomputed (")
    assert auto["tiers"]["hbm"]["needed"] <= 36 * GIB * (1 - MARGIN)
    [row] = [row for row in auto["rows"] if row["category"] == "activations"]
    assert f"{count} of 48 blocks are recomputed" in row["formula"]
    assert found["keep"]["step"]["seconds"] < auto["step"]["seconds"] < found["recompute"]["step"]["seconds"]
    cli.run([*FIT, "--set", "activations.policy=auto", "--gpu-memory", "36GiB"])
    shown = capsys.readouterr().out
    assert f"  activations: {auto['activations']}" in shown and f" {count}/48 " in shown


def test_fit_suggests_a_change_and_a_largest_model_under_auto(capsys):
    words = ["--set", "activations.policy=auto", "--json"]
    assert cli.run([*FIT, *words, "--gpu-memory", "16GiB"]) == 3
    change = json.loads(capsys.readouterr().out)["change"]
    assert change["policy"] == "auto" and "activations.policy" not in change["arguments"]
    most = []
    for policy in ("auto", "recompute"):
        words = ["--max", "--set", f"activations.policy={policy}", "--gpu-memory", "24GiB", "--json"]
        cli.run([*FIT, *words])
        most.append(json.loads(capsys.readouterr().out)["max"]["parameters"])
    assert most[0] == most[1]


def test_fit_traces_a_model_both_ways_under_auto(capsys):
    words = ["fit", "tiny", "--trace", "--ranks", "2", "--stage", "2", "--offload", "", "--batch", "64", "--seq", "512"]
    for memory, whole in (("80GiB", False), ("1800MiB", True)):
        cli.run([*words, "--set", "activations.policy=auto", "--gpu-memory", memory, "--json"])
        [candidate] = json.loads(capsys.readouterr().out)["candidates"]
        assert candidate["activations"].startswith("all blocks" if whole else "nothing"), candidate["activations"]


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_dry_run_prints_the_choice(command, capsys):
    words = [command, "tiny", "--dry-run", "--ranks", "2", "--set", "activations.policy=auto"]
    for memory, line in (("1GiB", "nothing recomputed"), ("30MiB", "1 of 4 blocks kept, 3 recomputed")):
        assert cli.run([*words, "--set", f"train.gpu_memory={memory}"]) == 0
        shown = capsys.readouterr()
        assert f"activations: {line} (" in shown.out + shown.err


def test_the_choice_needs_no_torch():
    code = "import sys, zerocli.plan.recompute, zerocli.plan.search; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
