"""Laws of `--auto`: what is chosen fits with its margin, nothing tried by hand is faster, and it is always the same."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import random
from typing import Any

import pytest
import torch
from lengths import LONG, spread

from offload.placement import ACTIVATIONS, Placement, Share
from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.config import load as load_config
from zerocli.config.options import AUTOMATIC, automatic_keys
from zerocli.errors import UserError
from zerocli.layout.recompute import Recompute, read_recompute
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.memory.build import plan_model
from zerocli.plan.memory.quick import QuickPlans
from zerocli.plan.memory.replayable_shape import replayable_shape
from zerocli.plan.memory.step import Replay
from zerocli.plan.models.formula import Formula
from zerocli.plan.models.traced import trace
from zerocli.plan.search.auto import COMPILING, HOST_MARGIN, Choice, _Search, choose, with_margins
from zerocli.plan.search.automatic import choose_setup, flags, keywords, may_compile, with_choice
from zerocli.plan.search.candidates import faster_groups, weigh
from zerocli.plan.search.recompute import MARGIN
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import PRESETS, Hardware

LARGE = ModelConfig(layers=32, hidden=2560, heads=20, vocab=50304, tie=False)
WIDE = dataclasses.replace(LARGE, layers=12, hidden=4096, heads=32)
"""As large with fewer blocks, which are planned faster."""
THIRTEEN = ModelConfig(family="llama", layers=40, hidden=5120, heads=40, vocab=32000, mlp_hidden=13824, tie=False)
LLAMA_7B = ModelConfig(family="llama", layers=32, hidden=4096, heads=32, vocab=32000)
ONE = dataclasses.replace(
    PRESETS["h200"], pcie=54.3, both_ways=0.9, gpus=1, host_memory=115 << 30, nvme_space=50 << 30, disk=3.0
)
FREE = frozenset(AUTOMATIC)


def setup(**changes: Any) -> Setup:
    return Setup(**({"stage": 3, "ranks": 1, "ranks_per_node": 1, "batch": 16, "seq": 1024} | changes))


def capped(gib: float, hardware: Hardware = ONE) -> Hardware:
    return dataclasses.replace(hardware, gpu_memory=int(gib * 2**30))


def test_on_many_nodes_the_choice_may_be_groups_of_a_node():
    """A ring over all of 16,384 ranks has a delay that a block of 1 x 2048 tokens does not hide."""
    model = Formula(shape_of(dataclasses.replace(LLAMA_7B, layers=4), 2048))
    asked = setup(ranks=16384, ranks_per_node=8, batch=1, seq=2048)
    free = FREE - {"zero.stage", "activations.policy", "model.compile"}
    choice = choose_setup(model, asked, PRESETS["h100"], free)
    assert choice.best is not None and choice.best.setup.shard_ranks == 8
    assert "--shard-ranks 8" in flags(choice.best, free)
    assert with_choice(load_config("tiny"), choice.best).parallel.shard_ranks == 8
    kept = choose_setup(model, asked, PRESETS["h100"], free - {"parallel.shard_ranks"}).best
    assert kept is not None and kept.setup.shard_ranks == 0 and kept.cost > choice.best.cost
    advised = faster_groups(model, kept, PRESETS["h100"])
    assert advised is not None and advised.setup.shard_ranks == 8 and advised.cost < kept.cost
    assert faster_groups(model, choice.best, PRESETS["h100"]) is None
    one_node = choose_setup(model, dataclasses.replace(asked, ranks=8), PRESETS["h100"], free)
    assert {each.setup.shard_ranks for each in one_node.fitting} == {0}


@pytest.mark.long
@pytest.mark.parametrize("gib", [8, 32, 139])
def test_no_placement_by_hand_is_faster(gib):
    shape, hardware = shape_of(LARGE, 1024), capped(gib)
    best = choose_setup(Formula(shape), setup(), hardware, FREE).best
    assert best is not None and best.estimate is not None
    assert best.plan.needed("hbm") <= hardware.gpu_memory * (1 - MARGIN)
    assert best.plan.needed("dram") <= hardware.host_memory * (1 - HOST_MARGIN)
    placements = ["", "optimizer=cpu", "optimizer=cpu,grads=cpu", "cpu", "activations=cpu", "optimizer=nvme"]
    placements += [f"optimizer=hbm:{size}GiB+cpu" for size in (4, 8, 12, 16, 20, 24)]
    placements += [f"optimizer=hbm:{size}GiB+cpu,activations=cpu" for size in (4, 8, 16, 20)]
    placements += ["params=hbm:3GiB+cpu,grads=cpu,optimizer=cpu,activations=cpu"]
    for text, policy in itertools.product(placements, ("keep", "selective", "recompute", "recompute:16")):
        by_hand = weigh(
            Formula(shape), setup(offload=text, recompute=read_recompute(policy)), capped(gib * (1 - MARGIN))
        )
        if by_hand.fits and by_hand.estimate is not None:
            assert best.estimate.seconds <= by_hand.estimate.seconds * 1.02, (text, policy)


@pytest.mark.parametrize(
    ("model", "sizes", "machine", "by_hand"),
    [
        pytest.param(
            ModelConfig(layers=8, hidden=2048, heads=32, vocab=128256, tie=True),
            {"ranks": 2, "batch": 1, "seq": 4096},
            ("h200", 4.7, 28),
            {"offload": "params=cpu,optimizer=cpu", "recompute": read_recompute("recompute")},
            id="parameters leave before gradients",
        ),
        pytest.param(
            ModelConfig(family="llama", layers=48, hidden=1280, heads=20, vocab=32000, tie=True),
            {"ranks": 4, "batch": 4, "seq": 1024},
            ("h100", 8.7, 27),
            {"recompute": read_recompute("recompute:32")},
            id="whole blocks where the host is the slower one",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_once_was_faster_by_hand(model, sizes, machine, by_hand):
    name, gib, host = machine
    ranks = sizes["ranks"]
    shape = shape_of(model, sizes["seq"])
    hardware = capped(gib, dataclasses.replace(PRESETS[name], gpus=ranks, host_memory=host << 30))
    asked = setup(**sizes, ranks_per_node=ranks)
    best = choose_setup(Formula(shape), asked, hardware, FREE).best
    other = weigh(Formula(shape), dataclasses.replace(asked, **by_hand), capped(gib * (1 - MARGIN), hardware))
    assert best is not None and best.fits and other.fits
    assert best.cost <= other.cost * 1.005


@pytest.mark.parametrize("gib", [12, *(pytest.param(gib, marks=pytest.mark.long) for gib in (1.5, 3, 6, 40))])
def test_stages_that_cannot_fit_are_left_out_and_nothing_else_is(gib, monkeypatch):
    model = ModelConfig(family="llama", layers=16, hidden=2048, heads=16, vocab=32000, tie=False)
    asked = setup(ranks=8, ranks_per_node=8, batch=1, seq=1024)
    machine = capped(gib, dataclasses.replace(PRESETS["h100"], host_memory=60 << 30))

    def found() -> Choice:
        return choose_setup(Formula(shape_of(model, 1024)), asked, machine, FREE)

    some = found()
    monkeypatch.setattr(_Search, "_may_fit", lambda *_: True)
    every = found()
    assert [each.setup for each in some.fitting] == [each.setup for each in every.fitting]
    assert (some.nearest and some.nearest.setup) == (every.nearest and every.nearest.setup)
    stages = {stage: weigh(Formula(shape_of(model, 1024)), lean(asked, stage), machine).fits for stage in (0, 1, 2, 3)}
    assert some.number < every.number or all(stages.values())


def lean(asked: Setup, stage: int) -> Setup:
    """Return the setup of a stage that takes least of a device."""
    kinds = ("optimizer", "grads", "params")[:stage]
    return dataclasses.replace(
        asked, stage=stage, recompute=True, offload=",".join(f"{kind}=cpu" for kind in (*kinds, "activations"))
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200, 209))
def test_no_placement_by_hand_is_faster_for_random_models(seed):
    rng = random.Random(seed)
    heads, layers = rng.choice([8, 16, 20, 32]), rng.choice([8, 16, 24, 32])
    hidden = heads * rng.choice([64, 128])
    model = ModelConfig(rng.choice(["gpt2", "llama"]), layers, hidden, heads, vocab=rng.choice([32000, 128256]))
    ranks, local = rng.choice([(1, 1), (2, 2), (4, 4), (16, 8)])
    seq, batch = rng.choice([512, 1024, 4096]), rng.choice([1, 4, 16])
    shape = shape_of(model, seq)
    states = 16 * shape.numel / ranks
    found = PRESETS[rng.choice(["h200", "h100", "a100-80", "rtx4090"])]
    hardware = dataclasses.replace(
        found,
        gpu_memory=min(found.gpu_memory, int(states * rng.uniform(0.15, 1.6)) + (3 << 30)),
        gpus=local,
        host_memory=int(states * local * rng.uniform(0.6, 3)) + (8 << 30),
        nvme_space=int(states * local * rng.uniform(0, 3)),
    )
    asked = setup(ranks=ranks, ranks_per_node=local, batch=batch, seq=seq)
    best = choose_setup(Formula(shape), asked, hardware, FREE).best
    limits = dataclasses.replace(
        hardware,
        gpu_memory=int(hardware.gpu_memory * (1 - MARGIN)),
        host_memory=int(hardware.host_memory * (1 - HOST_MARGIN)),
        nvme_space=int(hardware.nvme_space * (1 - HOST_MARGIN)),
    )
    gib = int(states / 2**30 * 0.75)
    placements = ["", "activations=cpu", "optimizer=cpu", "optimizer=nvme", "grads=cpu,optimizer=cpu", "cpu", "nvme"]
    placements += ["params=cpu", "params=cpu,optimizer=cpu", "params=cpu,grads=cpu,optimizer=nvme"]
    for size in sorted({max(1, int(gib * share)) for share in (0.25, 0.5, 0.75)}):
        placements += [f"optimizer=hbm:{size}GiB+cpu", f"optimizer=hbm:{size}GiB+cpu,activations=cpu"]
    policies = ["keep", "selective", "recompute", f"recompute:{layers // 2}", f"selective:{layers // 2}"]
    every = list(itertools.product((1, 2, 3) if ranks > 1 else (3,), placements, policies))
    for stage, text, policy in rng.sample(every, 40):
        tried = dataclasses.replace(asked, stage=stage, offload=text, recompute=read_recompute(policy))
        with contextlib.suppress(UserError):  # a stage without that placement
            by_hand = weigh(Formula(shape), tried, limits)
            if by_hand.fits:
                assert best is not None and best.cost <= by_hand.cost * 1.02, (stage, text, policy)


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 10))])
def test_what_fits_with_all_states_off_the_device_is_not_refused(seed):
    """With a large batch rough plans may be a fifth too low, and what they propose does not fit by exact ones."""
    draw = random.Random(seed)
    heads = draw.choice([8, 16, 32])
    model = ModelConfig(
        **{"family": draw.choice(["gpt2", "llama"]), "layers": draw.choice([4, 8, 16, 32]), "hidden": 128 * heads},
        **{"heads": heads, "vocab": draw.choice([32000, 128256]), "tie": False},
    )
    asked = setup(ranks=draw.choice([1, 8]), ranks_per_node=8, batch=draw.choice([8, 32, 64]), seq=4096)
    shape, hardware = shape_of(model, 4096), dataclasses.replace(PRESETS["h200"], host_memory=8 << 40)
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer", ACTIVATIONS), (Share("dram"),))
    least = weigh(Formula(shape), dataclasses.replace(asked, recompute=True, offload=Placement(kinds)), hardware)
    needed = least.plan.needed("hbm") / (1 - MARGIN)
    small = dataclasses.replace(hardware, gpu_memory=int(needed * draw.uniform(1.001, 1.1)))
    choice = choose_setup(Formula(shape), asked, small, FREE)
    assert choice.best is not None and choice.best.cost <= least.cost * 1.001


@pytest.mark.long
@pytest.mark.parametrize("tie", [True, False])
def test_no_choice_is_slower_than_a_plain_placement_that_fits(tie):
    """Fragmentation of a mixture of whole and selective blocks says nothing about blocks that are all whole."""
    model = Formula(shape_of(dataclasses.replace(LLAMA_7B, tie=tie), 2048))
    asked = setup(ranks=1, batch=4, seq=2048, recompute="auto")
    machine = dataclasses.replace(capped(31, PRESETS["h200"]), host_memory=115 << 30, nvme_space=0)
    best = choose_setup(model, asked, machine, FREE).best
    plain = weigh(model, dataclasses.replace(asked, offload="optimizer=cpu", recompute=True), with_margins(machine))
    assert best is not None and plain.fits and best.cost <= plain.cost


def test_what_only_lacks_the_margin_is_said_to_lack_memory(capsys):
    words = ["fit", "gpt2-xl", "--ranks", "1", "--hardware", "h100", "--stage", "0", "--host-memory", "64GiB"]
    cli.run([*words, "--set", "activations.policy=keep", "--json"])  # which need not fit
    needed = json.loads(capsys.readouterr().out)["candidates"][0]["tiers"]["hbm"]["needed"]
    words += ["--gpu-memory", f"{int(needed * 1.01)}B", "--set", "activations.policy=keep"]
    assert cli.run(words) == 0  # without --auto there is no margin
    capsys.readouterr()
    assert cli.run([*words, "--auto", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    (only,) = answer["candidates"]
    assert not only["fits"] and only["over"]["hbm"] > 0
    assert any("without what --auto leaves free" in note for note in answer["notes"])
    assert cli.run([*words, "--auto"]) == 3
    out = capsys.readouterr().out
    assert "GPU over by" in out and "fits: " not in out


@pytest.mark.longer
def test_what_needs_a_budget_is_not_refused(capsys, tmp_path):
    """13B on one H200 with 115 GiB of host memory: none of the plain placements fits, one with a budget does."""
    path = tmp_path / "large.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in dataclasses.asdict(THIRTEEN).items() if key != "factory"]
    path.write_text("\n".join(["[model]", *lines, "[train]", "batch = 4", "seq = 2048"]))
    words = ["fit", str(path), "--hardware", "h200", "--ranks", "1", "--host-memory", "115GiB", "--nvme-space", "50GiB"]
    for extra, most in (([], 3.2), (["--auto"], 2.2))[0 if LONG else 1 :]:
        assert cli.run([*words, *extra, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        best = found["candidates"][found["best"]["index"]]
        assert "hbm:" in best["offload"] and best["step"]["seconds"] < most
    assert cli.run([*words, "--auto"]) == 0
    out = capsys.readouterr().out
    assert "auto: --stage 3 --offload " in out and "next: " in out and "stay free" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.long
def test_the_same_inputs_give_the_same_choice_by_its_own_flags():
    """The flags that are printed are a setup with the same plan and the same estimate."""
    rng = random.Random(5)
    for _ in range(2):
        shape, hardware = shape_of(LARGE, 1024), capped(rng.uniform(6, 60))
        one, two = (choose_setup(Formula(shape), setup(), hardware, FREE).best for _ in range(2))
        assert one is not None and two is not None and flags(one) == flags(two)
        words = flags(one).split()
        policy = words[-1].partition("=")[2]
        text = words[words.index("--offload") + 1] if "--offload" in words else ""
        again = weigh(Formula(shape), setup(offload=text, recompute=read_recompute(policy)), hardware)
        assert again.plan.rows == one.plan.rows and again.estimate == one.estimate


def test_what_the_command_line_sets_is_kept():
    flags_given = {"zero.stage": 2, "train.seq": 5, "offload.placement": None}
    free = {"offload.placement", "train.batch", "model.compile", "parallel.shard_ranks"}
    assert automatic_keys(("activations.policy=keep",), flags_given) == free
    assert automatic_keys(("activations.policy=keep", "model.compile=auto"), flags_given) == free
    assert automatic_keys(("activations.policy=keep", "model.compile=true"), flags_given) == free - {"model.compile"}
    shape = shape_of(WIDE, 1024)
    kept = choose_setup(
        Formula(shape), setup(stage=2, recompute=False), capped(60), FREE - {"zero.stage", "activations.policy"}
    )
    assert {each.setup.stage for each in kept.fitting} == {2}
    assert {each.setup.recomputed for each in kept.fitting} == {Recompute()}
    asked = setup(offload="optimizer=cpu")
    fixed = choose_setup(Formula(shape), asked, capped(60), FREE - {"offload.placement"})
    assert {str(each.setup.offload) for each in fixed.fitting} == {"optimizer=cpu"}
    # At caps around what it needs a budget by hand stays as it is, or nothing fits.
    asked = setup(offload="optimizer=hbm:8GiB+cpu", recompute=True)
    least = plan_model(shape, asked).needed("hbm") / 2**30 / (1 - MARGIN)
    for cap in (least * 0.97, least * 1.001, least * 1.03):
        kept = choose_setup(Formula(shape), asked, capped(cap), FREE - {"offload.placement", "activations.policy"})
        assert {str(each.setup.offload) for each in kept.fitting} <= {str(asked.offload)}
        assert bool(kept.fitting) == (cap > least)


@pytest.mark.long
def test_where_only_exact_plans_fit_the_choice_is_compiled_too(monkeypatch):
    monkeypatch.setattr(_Search, "_checked", lambda *_: [])  # as if no rough plan had fitted
    shape = shape_of(NARROW, 1024)
    eager, long = (
        choose_setup(Formula(shape), setup(batch=8), capped(3.5), FREE, steps=steps).best for steps in (1, 100_000)
    )
    assert eager is not None and long is not None
    assert not eager.setup.compiled and long.setup.compiled and long.cost < eager.cost


NARROW = ModelConfig(layers=40, hidden=512, heads=8, vocab=32000, tie=False)


@pytest.mark.longer
def test_blocks_are_compiled_where_that_pays_for_itself():
    """Recomputation of narrow blocks is bound by the host, which compiled ones need less of."""
    shape, small = Formula(shape_of(NARROW, 1024)), capped(2.8)

    def chosen(steps: int, hardware: Hardware = small, model: Any = shape) -> Any:
        return choose_setup(model, setup(batch=8, update="stream"), hardware, FREE, steps=steps).best

    eager, long = chosen(10), chosen(100_000)
    assert not eager.setup.compiled and long.setup.compiled
    alike = weigh(shape, dataclasses.replace(eager.setup, compiled=True), small)
    turning = math.ceil(COMPILING / (eager.cost - alike.cost))
    assert not chosen(turning - 1).setup.compiled
    assert not LONG or chosen(turning + 1).setup.compiled
    assert "--set model.compile=true" in flags(long, FREE) and "--set model.compile=false" in flags(eager, FREE)
    assert "compile" not in flags(eager, FREE - {"model.compile"})
    # Compiled blocks are recomputed at another price: what is best for eager ones is not for these.
    assert alike.fits and long.cost < alike.cost and long.setup.recompute != eager.setup.recompute
    # Wide blocks that are kept: the host's time is hidden, and a compiled one moves few bytes less.
    wide = Formula(shape_of(dataclasses.replace(WIDE, layers=4), 1024))
    assert not chosen(200, capped(139), wide).setup.compiled


def test_only_what_is_left_open_is_compiled_by_choice():
    config, asked = load_config("tiny", sets=("train.steps=1000",)), setup()
    assert may_compile(config, asked, FREE) == 1000
    assert may_compile(config, asked, FREE - {"model.compile"}) == 0
    assert may_compile(config, setup(device="cpu"), FREE) == 0
    fixed = load_config("tiny", sets=("model.compile=false",))
    assert may_compile(fixed, asked, FREE) == 0
    best = choose_setup(Formula(shape_of(NARROW, 1024)), setup(batch=8), capped(3.5), FREE, steps=100_000).best
    assert best is not None
    assert with_choice(config, best, 1000).model.compile is True and with_choice(config, best).model.compile == "auto"


@pytest.mark.parametrize(
    "total, ranks, sizes",
    [
        pytest.param(96, 8, {1, 3, 6, 12}, marks=pytest.mark.long),
        pytest.param(20, 2, {1, 5, 10}, marks=pytest.mark.long),
        (9, 1, {1, 9}),
    ],
)
def test_a_global_batch_that_another_micro_batch_divides_is_planned(total, ranks, sizes, capsys):
    """The config's own batch of 8 does not divide it; the batch is for `--auto` to choose."""
    words = ["fit", "tiny", "--set", f"train.global_batch={total}", "--ranks", str(ranks), "--hardware", "h100"]
    assert cli.run([*words, "--auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["batch"] for each in found["candidates"]} <= sizes
    [flags] = [note for note in found["notes"] if note.startswith("auto: ")]
    assert f"--batch {found['candidates'][0]['batch']} " in flags
    for fixed in ([], ["--auto", "--batch", "8"]):
        assert cli.run([*words, *fixed]) == 2
        assert f"is not a multiple of batch 8 x {ranks} rank" in capsys.readouterr().err


def test_a_global_batch_that_the_ranks_do_not_divide_is_refused(capsys):
    words = ["tiny", "--set", "train.global_batch=97", "--auto", "--ranks", "8"]
    for command in (["fit", *words], ["train", *words, "--dry-run"], ["profile", *words, "--dry-run"]):
        assert cli.run(command) == 2
        err = capsys.readouterr().err
        assert "global batch 97 is not a multiple of batch 1 x 8 ranks = 8" in err
        assert "--set train.global_batch=96" in err


def small() -> Any:
    with torch.device("meta"):
        return torch.nn.Sequential(torch.nn.Linear(2, 2))


def test_the_batch_of_an_example_is_kept(monkeypatch):
    """Its bytes and times are those of the batch that the example makes."""
    monkeypatch.setattr("zerocli.plan.search.automatic.choose", lambda *given, **_: given[5])
    traced = trace("some", small, setup(batch=4, accumulate=4), lambda model, _: model(torch.ones(2, 2)).sum(), False)
    assert choose_setup(traced, setup(batch=4, accumulate=4), ONE, FREE, global_batch=16) == [4]


@pytest.mark.long
def test_a_smaller_micro_batch_is_tried_where_no_half_fits():
    """A part of 9 has no halves: without 1 among the choices nothing would fit."""
    shape = shape_of(load_config("llama3-8b", sets=("model.layers=8",)).model, 8192)
    asked = setup(ranks=8, ranks_per_node=8, batch=9, seq=8192)
    best = choose_setup(Formula(shape), asked, PRESETS["rtx4090"], FREE, global_batch=72).best
    assert best is not None and best.setup.batch == 1 and best.setup.accumulate == 9


@pytest.mark.long
def test_a_global_batch_is_divided_into_micro_batches():
    shape = shape_of(LARGE, 1024)
    asked = setup(batch=16, accumulate=4)
    best = choose_setup(Formula(shape), asked, capped(24), FREE, global_batch=64).best
    assert best is not None and best.setup.batch * best.setup.accumulate == 64
    one = choose_setup(Formula(shape), asked, capped(24), FREE - {"train.batch"}, global_batch=64).best
    assert one is not None and one.setup.batch == 16
    assert best.cost <= one.cost * 1.001


@pytest.mark.long
def test_host_memory_that_is_too_small_spills_to_disks():
    hardware = dataclasses.replace(capped(16), host_memory=24 << 30, nvme_space=200 << 30)
    best = choose_setup(Formula(shape_of(LARGE, 1024)), setup(), hardware, FREE).best
    assert best is not None and best.plan.needed("nvme") > 0
    assert best.plan.needed("dram") <= hardware.host_memory * (1 - HOST_MARGIN)
    nothing = choose_setup(Formula(shape_of(LARGE, 1024)), setup(), dataclasses.replace(hardware, nvme_space=0), FREE)
    assert nothing.best is None and nothing.nearest is not None and nothing.nearest.over


def test_the_cpu_takes_a_part_of_the_update_where_that_is_faster():
    """A slow link beside many cores: most states stay where they are. What the user asks for is kept."""
    shape = shape_of(WIDE, 1024)
    slow = dataclasses.replace(capped(16), pcie=4.0, adam=20.0)
    few = dataclasses.replace(slow, pcie=55.0, adam=0.3)

    def best(hardware: Hardware, update: str = "auto") -> Any:
        return choose_setup(Formula(shape), setup(update=update), hardware, FREE).best

    assert best(slow).cost < 0.8 * best(slow, "stream").cost
    assert best(few).cost == pytest.approx(best(few, "stream").cost)
    assert "update" not in flags(best(slow))
    asked = best(slow, "cpu")
    assert "--set offload.update=cpu" in flags(asked) and 'update="cpu"' in keywords(asked)
    assert with_choice(load_config("tiny"), asked).offload.update == "cpu"


def test_a_choice_needs_few_exact_plans_and_few_replays(monkeypatch, forget_plans):
    """An exact plan takes some 30 ms and the replay of a step 5, so a choice among all stages takes a second."""
    exact, replays, run = [], [], Replay.run_step
    monkeypatch.setattr("zerocli.plan.search.auto.weigh", lambda *args: exact.append(1) or weigh(*args))
    monkeypatch.setattr(Replay, "run_step", lambda replay: replays.append(1) or run(replay))
    choice = choose(Formula(shape_of(WIDE, 1024)), setup(ranks=8, recompute="auto"), capped(20), (0, 1, 2, 3))
    assert choice.number > 50
    assert len(exact) < 25 and len(replays) < 120


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
def test_rough_plans_are_near_exact_ones(stage):
    """Beside fragmentation, which they do not know."""
    shape, device = shape_of(WIDE, 1024), QuickPlans(replayable_shape(shape_of(WIDE, 1024)))
    states = ["", "optimizer=cpu", "optimizer=hbm:2GiB+cpu", "activations=cpu"]
    states += ["optimizer=cpu,grads=cpu", "optimizer=cpu,grads=hbm:1GiB+cpu"] if stage > 1 else []
    states += ["cpu", "optimizer=cpu,grads=cpu,params=hbm:1GiB+cpu"] if stage > 2 else []
    policies = ("recompute:4+selective:5", "keep", "selective", "recompute")
    for text, policy in [(text, policy) for row, text in enumerate(states) for policy in spread(row, policies)]:
        if "activations" in text and policy == "keep":
            continue
        one = setup(stage=stage, ranks=2, ranks_per_node=2, offload=text, recompute=read_recompute(policy))
        rough, exact = device.plan(one), plan_model(shape, one)
        assert -0.02 <= rough.needed("hbm") / (exact.needed("hbm") - exact.fragments) - 1 <= 0.12, (text, policy)
        assert rough.needed("dram") == exact.needed("dram") and rough.needed("nvme") == exact.needed("nvme")
        for kind in ("parameters", "optimizer_states"):
            assert rough.of(kind, "hbm") == exact.of(kind, "hbm")


def test_policies_are_read_and_written():
    for value in (Recompute(), Recompute(12), Recompute(0, 7), Recompute(3, 4), read_recompute(True)):
        assert read_recompute(value.policy) == value
    for text in ("", "recompute:", "12", "selective:2+recompute:1", "recompute:1+selective:2+"):
        with pytest.raises(ValueError, match="recompute="):
            read_recompute(text)
