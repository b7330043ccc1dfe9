"""Laws of `activations.policy=auto`: as little is recomputed as fits, and every command says what."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.errors import UserError
from zerocli.layout.recompute import NOTHING, SELECTIVELY, WHOLE, Recompute
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.memory.build import plan_model, plan_replayable
from zerocli.plan.models import model as models
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.formula import Formula
from zerocli.plan.models.traced import Traced, trace
from zerocli.plan.search import recompute
from zerocli.plan.search.auto import choose
from zerocli.plan.search.recompute import MARGIN, choices, choose_recompute, decide, needed_by
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import Hardware

GIB = 2**30


pytestmark = pytest.mark.usefixtures("no_gpu")


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


def test_the_order_is_from_keeping_everything_to_keeping_only_inputs():
    first, *_, last = choices(3)
    assert first == NOTHING and last == Recompute(3) == WHOLE.of(3)
    assert [(each.whole, each.selective) for each in choices(3)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 2),
        (2, 1),
        (3, 0),
    ]


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 24))])
def test_the_choice_is_the_first_in_the_order_that_fits(seed):
    shape, setup = drawn(seed)
    order = choices(shape.layers)
    plans = [plan_model(shape, dataclasses.replace(setup, recompute=each)) for each in order]
    needed = [needed_by(plan) for plan in plans]
    live = [needed_by(plan) - plan.fragments for plan in plans]
    # What the bisections rely on: in each half the peak falls to its lowest and rises from there.
    for half in (live[: shape.layers + 1], live[shape.layers :]):
        bottom = half.index(min(half))
        assert half[: bottom + 1] == sorted(half[: bottom + 1], reverse=True)
        assert half[bottom:] == sorted(half[bottom:])
    for limit in {*needed, min(needed) - 1, max(needed) + 1}:
        room = -int(-limit // (1 - MARGIN))
        allowed = int(room * (1 - MARGIN))
        chosen, reason = choose_recompute(Formula(shape), setup, room)
        fitting = [each for each, nbytes in zip(order, needed, strict=True) if nbytes <= allowed]
        if fitting:
            assert chosen == fitting[0], (limit, needed)
            assert "no choice" not in reason
        else:
            assert live[order.index(chosen)] == min(live) and "no choice leaves 4% free" in reason


def test_a_hundred_layers_take_two_dozen_plans(monkeypatch):
    """A plan of 100 layers takes 40 ms, so a choice takes a second at most."""
    shape = shape_of(ModelConfig(layers=100, hidden=2048, heads=16, vocab=32000), 1024)
    setup = Setup(stage=3, ranks=8, batch=4, seq=1024, recompute="auto")
    plans = []

    def counted(*given: Any) -> Any:
        plans.append(given)
        return plan_replayable(*given)

    monkeypatch.setattr(models, "plan_replayable", counted)
    chosen = {room: choose_recompute(Formula(shape), setup, room * GIB)[0] for room in (16, 24, 32, 80)}
    places = [choices(100).index(each) for each in chosen.values()]
    assert places == sorted(places, reverse=True)
    assert 0 < chosen[24].whole < 100 == chosen[24].count and chosen[80] == NOTHING
    assert 0 < chosen[32].selective < 100 and not chosen[32].whole
    assert len(plans) <= 4 * 28
    assert len({given[1].recompute for given in plans}) > 10


def test_the_reason_names_what_is_kept_and_the_bytes():
    shape = shape_of(ModelConfig(layers=24, hidden=1024, heads=16, vocab=50304), 1024)
    setup = Setup(stage=1, ranks=1, batch=16, seq=1024, recompute="auto")
    for chosen, words in (
        (Recompute(0, 6), "18 of 24 blocks kept, 6 recomputed selectively"),
        (Recompute(6, 18), "6 of 24 blocks recomputed whole, 18 selectively"),
        (NOTHING, "nothing recomputed"),
    ):
        needed = needed_by(plan_model(shape, dataclasses.replace(setup, recompute=chosen)))
        room = int(needed / (1 - MARGIN)) + 1
        comparison = f"{needed / GIB:.1f} GiB of {room / GIB:.1f} GiB"
        assert choose_recompute(Formula(shape), setup, room) == (chosen, f"{words} ({comparison})")
    assert choose_recompute(Formula(shape), setup, GIB)[1].startswith("all 24 blocks recomputed (")
    assert recompute.describe(Recompute(0, 24), 24) == "all 24 blocks recomputed selectively"
    assert (
        recompute.describe(Recompute(2, 3), 24) == "19 of 24 blocks kept, 2 recomputed whole, 3 recomputed selectively"
    )


def test_checkpoints_with_a_place_of_their_own_are_of_all_blocks():
    shape = shape_of(ModelConfig(layers=4), 128)
    setup = Setup(stage=1, recompute="auto", offload="activations=cpu")
    chosen, reason = choose_recompute(Formula(shape), setup, 1 << 50)
    assert chosen == Recompute(4) and reason.startswith("all 4 blocks recomputed (--offload activations=cpu")


def test_only_auto_is_decided_and_an_undecided_plan_is_refused():
    shape = shape_of(ModelConfig(layers=4), 128)
    for asked in (True, False, 3, "selective", Recompute(1, 2)):
        assert decide(Formula(shape), Setup(recompute=asked), 1) == (Setup(recompute=asked), "")
    assert decide(Counted(10**9), Setup(recompute="auto"), 1) == (Setup(recompute=False), "")
    with pytest.raises(UserError, match="decided by a device's memory"):
        plan_model(shape, Setup(recompute="auto"))
    for asked, words in ((5, "5"), (-1, "-1"), (Recompute(3, 2), "3 whole and 2 selective")):
        with pytest.raises(UserError, match=f"recompute={words}: the model has 4 repeated blocks"):
            plan_model(shape, Setup(recompute=asked))
    with pytest.raises(UserError, match="recompute='some': pass True, False, 'selective', a number of blocks"):
        Setup(recompute="some")


def test_old_and_new_ways_to_ask_mean_one_thing():
    for asked, meant in ((True, WHOLE), (False, NOTHING), (0, NOTHING), (2, Recompute(2)), ("keep", NOTHING)):
        assert Setup(recompute=asked).recompute == meant
    assert Setup(recompute="recompute").recompute == WHOLE and Setup(recompute="selective").recompute == SELECTIVELY
    assert Setup(offload="activations=cpu").recomputed == WHOLE
    assert Setup(offload="activations=cpu", recompute="selective").recomputed == SELECTIVELY
    assert [str(each) for each in (NOTHING, WHOLE, SELECTIVELY, Recompute(4))] == ["False", "True", "selective", "4"]


class Uneven(nn.Module):
    """Blocks of one class, but one of them is wider inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 128)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, width), nn.GELU(), nn.Linear(width, 128)) for width in (256, 256, 512)
        )
        self.head = nn.Linear(128, 300)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_each_block_of_a_traced_model_counts_by_itself_though_they_are_not_alike():
    setup = Setup(stage=2, ranks=2, batch=8, seq=128, device="cpu", recompute="auto")
    traced = trace("uneven", lambda: on_meta(Uneven), setup)
    ways = [Recompute(number) for number in range(traced.blocks + 1)]
    needed = [traced.plan(dataclasses.replace(setup, recompute=each)).allocated for each in ways]
    assert traced.blocks and all(more > less - 64 for more, less in itertools.pairwise(needed))
    assert needed[0] > 1.05 * needed[-1]
    for room, chosen in ((1 << 40, NOTHING), (1, ways[-1])):
        assert decide(traced, setup, room)[0].recompute == chosen


class Twice(Uneven):
    """Calls its first block again at the end, so that blocks are not what the engine counts."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def test_blocks_that_are_called_more_than_once_are_all_treated_alike():
    setup = Setup(stage=2, ranks=2, batch=8, seq=128, device="cpu", recompute="auto")
    traced = trace("twice", lambda: on_meta(Twice), setup)
    assert not traced.blocks
    decided, reason = decide(traced, setup, 1)
    assert decided.recompute == WHOLE and "blocks that are not alike are all treated alike" in reason


def small_model() -> nn.Module:
    from zerocli.models import build

    return build(ModelConfig(layers=5, hidden=128, heads=4, vocab=300), 128, "meta")


@functools.cache
def traced_model(setup: Setup) -> Traced:
    return trace("small", small_model, setup)


def test_a_traced_model_recomputes_as_little_as_must_be():
    setup = Setup(stage=2, ranks=2, ranks_per_node=2, batch=8, seq=128, device="cpu", recompute="auto")
    traced = traced_model(setup)

    def needed(recompute: Recompute) -> int:
        return needed_by(traced.plan(dataclasses.replace(setup, recompute=recompute)))

    order = choices(5)
    for each in order:
        limit = needed(each)
        decided, reason = decide(traced, setup, int(limit / (1 - MARGIN)) + 1)
        assert decided.recompute == next(other for other in order if needed(other) <= limit)
        assert ("nothing recomputed" in reason) == (decided.recompute == NOTHING)
    assert len({needed(each) for each in order}) >= 9  # finer than all or nothing
    assert decide(traced, setup, 1)[0].recomputed == Recompute(5)


def test_stages_whose_steps_were_not_traced_are_no_choices():
    setup = Setup(stage=2, ranks=2, ranks_per_node=2, batch=8, seq=128, device="cpu", recompute="auto")
    traced = traced_model(setup)
    room = needed_by(traced.plan(dataclasses.replace(setup, recompute=Recompute(3, 2))))
    machine = Hardware("cpu", int(room / (1 - MARGIN)) + 1, 1.0, 10.0, 10.0, host_memory=GIB, nvme_space=0)
    found = choose(traced, setup, machine, (0, 1, 2, 3)).best
    assert found is not None and found.fits and found.setup.stage in (2, 3)
    assert found.setup.recomputed.whole in range(1, 5)


# -- commands ----------------------------------------------------------------------------------------------------------

FIT = ["fit", "gpt2-xl", "--ranks", "1", "--stage", "1", "--offload", "", "--batch", "8", "--hardware", "h100"]
ROOMS = (38, 34, 30)
"""GiB with which `auto` recomputes some of its blocks selectively, more of them, and the first ones whole."""


@pytest.mark.long
def test_fit_shows_what_each_candidate_recomputes(capsys):
    found = {}
    for policy, memory in (
        *((policy, 36) for policy in ("keep", "selective", "recompute")),
        *(("auto", m) for m in ROOMS),
    ):
        cli.run([*FIT, "--set", f"activations.policy={policy}", "--gpu-memory", f"{memory}GiB", "--json"])
        [found[policy, memory]] = json.loads(capsys.readouterr().out)["candidates"]
    keep, selective, whole = (found[policy, 36] for policy in ("keep", "selective", "recompute"))
    assert [(each["recomputed"], each["selective"]) for each in (keep, selective, whole)] == [(0, 0), (0, 48), (48, 0)]
    assert [each["policy"] for each in (keep, selective, whole)] == ["keep", "selective", "recompute"]
    assert not keep["fits"] and whole["fits"]
    assert whole["peaks"]["steady"] < selective["peaks"]["steady"] < keep["peaks"]["steady"]
    # Selective recomputation repeats no matrix product, only what is bound by memory.
    times = [each["step"]["parts"]["compute"] for each in (keep, selective, whole)]
    assert times == sorted(times) and times[1] - times[0] < 0.3 * (times[2] - times[0])
    for memory in ROOMS:
        auto = found["auto", memory]
        assert auto["policy"] == "auto" and auto["fits"]
        assert auto["tiers"]["hbm"]["needed"] <= memory * GIB * (1 - MARGIN)
        blocks = Recompute(auto["recomputed"], auto["selective"])
        assert auto["activations"].startswith(f"{recompute.describe(blocks, 48)} (")
        [row] = [row for row in auto["rows"] if row["category"] == "activations"]
        for number, words in ((blocks.whole, "recomputed"), (blocks.selective, "recomputed selectively")):
            assert (f" {number} of 48 blocks are {words}" in row["formula"]) == bool(number)
        assert keep["step"]["seconds"] <= auto["step"]["seconds"] <= whole["step"]["seconds"]
        cli.run([*FIT, "--set", "activations.policy=auto", "--gpu-memory", f"{memory}GiB"])
        shown = capsys.readouterr().out
        assert f"activations: {auto['activations'][:30]}" in shown
        cell = f"{blocks.whole}/48+sel" if blocks.whole else f"sel {blocks.selective}/48"
        assert f" {cell} " in shown
    counts = [(found["auto", memory]["recomputed"], found["auto", memory]["selective"]) for memory in ROOMS]
    assert counts == sorted(counts) and counts[0][0] == 0 < counts[0][1] and counts[2][0] > 0


@pytest.mark.long
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
    assert most[0] >= most[1]  # hardly any choice needs less than all blocks recomputed whole, but one may


@pytest.mark.long
def test_fit_traces_a_model_both_ways_under_auto(capsys):
    words = ["fit", "tiny", "--trace", "--ranks", "2", "--stage", "2", "--offload", "", "--batch", "64", "--seq", "512"]
    for memory, said in (("80GiB", "nothing recomputed"), ("1800MiB", "1 of 4 blocks recomputed whole, 3 selectively")):
        cli.run([*words, "--set", "activations.policy=auto", "--gpu-memory", memory, "--json"])
        [candidate] = json.loads(capsys.readouterr().out)["candidates"]
        assert candidate["activations"].startswith(said), candidate["activations"]


@pytest.mark.parametrize("command", ["train", "profile"])
def test_a_dry_run_prints_the_choice(command, capsys):
    words = [command, "tiny", "--dry-run", "--ranks", "2", "--set", "activations.policy=auto", "--save-every", "never"]
    for memory, line in (("1GiB", "nothing recomputed"), ("30MiB", "2 of 4 blocks recomputed whole, 2 selectively")):
        assert cli.run([*words, "--set", f"train.gpu_memory={memory}"]) == 0
        shown = capsys.readouterr()
        assert f"activations: {line} (" in shown.out + shown.err


def test_the_choice_needs_no_torch():
    code = "import sys, zerocli.plan.search.recompute, zerocli.plan.search.candidates; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
