"""Laws of `--auto` on real ranks: one choice for all, which runs, and gives the losses of the same flags by hand."""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
from typing import Any

import pytest
from runs import TINY, losses, train

from zerocli import config as configs
from zerocli.cli import main as cli
from zerocli.config.options import AUTOMATIC, RunOptions
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.blocks.work import Work
from zerocli.plan.memory.build import plan_model
from zerocli.plan.models.formula import Formula
from zerocli.plan.search import automatic
from zerocli.plan.search.recompute import needed_by
from zerocli.plan.setup import Setup, setup_of
from zerocli.plan.time.compute import device_seconds
from zerocli.run.automatic import choose_here, choose_together

FREE = frozenset(AUTOMATIC)


def needed(sets: list[str], **changes: object) -> int:
    config = configs.load("tiny", sets)
    setup = setup_of(config, ranks=2, ranks_per_node=2, device="cpu", **changes)
    return needed_by(plan_model(shape_of(config.model, config.train.seq), setup))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 11))])
def test_a_choice_runs_and_changes_no_number(tmp_path, seed):
    """Random models and caps, between what recomputing all needs and what keeping all needs."""
    rng = random.Random(seed)
    hidden = rng.choice([64, 128])
    sets = [*TINY, f"model.family={rng.choice(['gpt2', 'llama'])}", f"model.layers={rng.randint(2, 6)}"]
    sets += [f"model.hidden={hidden}", "model.heads=2", f"train.seq={rng.choice([32, 64])}", "train.steps=3"]
    sets += [f"train.batch={rng.choice([2, 4])}", f"model.dropout={rng.choice([0.0, 0.1])}", "checkpoint.every=0"]
    (tmp_path / "swap").mkdir()
    sets += [f"offload.nvme_path={tmp_path / 'swap'}"] if rng.random() < 0.5 else []
    least, most = needed(sets, stage=3, recompute=True), needed(sets, stage=3, recompute=False)
    cap = int(rng.uniform(least * 1.06, max(least * 1.1, most * 1.05)))
    chosen = train(tmp_path / "auto", *sets, f"train.gpu_memory={cap}B", auto=FREE)
    assert chosen.codes == [0, 0], chosen.said
    assert "\nauto: --stage " in f"\n{chosen.said[0]}" and "auto:" not in chosen.said[1]
    document = json.loads((tmp_path / "auto" / "auto.json").read_text())
    assert sum(document["needed"][tier] / (1 if tier == "hbm" else 2) for tier in ("hbm", "dram")) <= cap * 0.96
    words = document["flags"].split()
    by_hand = [f"zero.stage={words[words.index('--stage') + 1]}", words[-1]]
    by_hand += [f"offload.placement={words[words.index('--offload') + 1]}"] if "--offload" in words else []
    assert train(tmp_path / "hand", *sets, *by_hand).codes == [0, 0]
    assert losses(tmp_path / "auto") == losses(tmp_path / "hand")
    saved = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert f"activations.policy={saved['activations']['policy']}" == words[-1]


def test_unequal_ranks_agree_on_one_choice(tmp_path):
    """Each rank proposes what its own machine has; the least of everything decides."""
    sets = [*TINY, "model.layers=6", "model.hidden=128", "train.seq=128", "train.batch=8", "parallel.ranks=2"]
    config = configs.load("tiny", sets)
    options = RunOptions(str(tmp_path), auto=FREE)
    setup = setup_of(config, ranks=2, ranks_per_node=2, device="cpu")
    rooms = [needed(sets, stage=3, recompute=each) for each in (False, True)]
    machines = [automatic.hardware_here((), setup, int(room * 1.1)) for room in rooms]
    proposals = [dataclasses.asdict(each) for each in machines]

    def gather(value: Any) -> list[Any]:
        return proposals if isinstance(value, dict) else [value, value]

    found = [choose_together(config, options, setup, int(room * 1.1), gather) for room in rooms]
    assert found[0].config == found[1].config and found[0].lines == found[1].lines
    alone = choose_together(config, options, setup, int(rooms[0] * 1.1), lambda value: [value])
    assert alone.config != found[0].config


def test_what_a_run_had_changed_to_is_kept_only_where_it_fits(tmp_path):
    """Memory may be less when a run is resumed: on another node, or beside another process."""
    sets = [*TINY, "model.layers=6", "model.hidden=128", "train.seq=128", "train.batch=8", "parallel.ranks=2"]
    config = configs.load("tiny", [*sets, "zero.stage=3"])
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(config)))  # everything on the device
    (tmp_path / "auto.json").write_text(json.dumps({"changes": [{"step": 9}], "recomputes": True}))
    options = RunOptions(str(tmp_path), auto=FREE, resume=True)
    setup = setup_of(config, ranks=2, ranks_per_node=2, device="cpu")

    def chosen(room: int) -> str:
        return "\n".join(choose_together(config, options, setup, room, lambda value: [value]).lines)

    before = "which the run had changed to before it was resumed"
    kept, recomputed = (needed(sets, stage=3, checkpoints=0, recompute=each) for each in (False, True))
    assert before in chosen(int(kept * 1.1))
    assert before not in chosen(int(recomputed * 1.1))


def test_a_cpu_that_is_slow_in_bf16_is_planned_with_that_rate(monkeypatch):
    measured = {"products": 0.07, "bf16": 0.0001, "memory": 10.0, "adam": 0.2}
    monkeypatch.setattr(automatic.bench, "remembered", lambda *_: {automatic.bench.COMPUTE: {"result": measured}})
    seconds = {}
    for precision in ("fp32", "bf16", "fp16"):
        setup = setup_of(configs.load("tiny"), precision=precision, device="cpu")
        work, hardware = (Work(products=1e12), Work(attention=1e12)), automatic.hardware_here((), setup, 1 << 30)
        seconds[precision] = [device_seconds(each, setup, hardware) for each in work]
    for kind in (0, 1):
        assert seconds["bf16"][kind] / seconds["fp32"][kind] == pytest.approx(700)
        assert seconds["fp16"][kind] == pytest.approx(seconds["fp32"][kind])  # not measured: fp32's


def test_nothing_that_fits_is_an_answer(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["train", "tiny", "--auto", "--ranks", "2", "--set", "train.gpu_memory=1MiB"]) == 3
    err = capsys.readouterr().err
    assert "no stage, placement or recomputation fits" in err and "zerocli fit tiny" in err
    assert list(tmp_path.iterdir()) == []


def test_what_the_command_line_sets_stays(tmp_path):
    config = configs.load("tiny", [*TINY, "parallel.ranks=2", "zero.stage=2"])
    chosen = choose_here(config, RunOptions(str(tmp_path), auto=FREE - {"zero.stage"})).config
    assert chosen.zero.stage == 2
    assert choose_here(config, RunOptions(str(tmp_path))).config == config


def test_a_choice_is_replayed_by_its_command(tmp_path, capsys):
    """The command gives the flags again from the numbers in it, whatever machine it runs on."""
    config = configs.load("gpt2-124m", ["parallel.ranks=1", "train.batch=16"])
    setup = setup_of(config, ranks=1, ranks_per_node=1, precision="bf16")
    hardware = dataclasses.replace(automatic_machine(), gpu_memory=5 << 30, host_memory=20 << 30, nvme_space=1 << 40)
    steps = automatic.may_compile(config, setup, FREE)
    choice = automatic.choose_setup(
        Formula(shape_of(config.model, config.train.seq)), setup, hardware, FREE, steps=steps
    )
    assert choice.best is not None
    # The run folder's config has the choice; the command leaves open again what was.
    (tmp_path / "config.json").write_text(
        json.dumps(configs.to_dict(automatic.with_choice(config, choice.best, steps)))
    )
    command = automatic.replay(str(tmp_path / "config.json"), setup, hardware, FREE)
    assert cli.run([*command[1:], "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert f"auto: {automatic.flags(choice.best, frozenset({'model.compile'}))}" in notes


@pytest.mark.parametrize(
    "sets, fixed, room",
    [
        pytest.param(
            ["train.global_batch=64"],
            set(),
            {"gpu_memory": 4 << 30, "nvme_space": 0, "products": 0.0},
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["train.global_batch=12", "checkpoint.every=10"], {"train.batch"}, {"nvme_space": 0}, marks=pytest.mark.long
        ),
        pytest.param(
            ["activations.policy=recompute"],
            {"activations.policy"},
            {"gpu_memory": 4 << 30, "host_block": 1e-5},
            marks=pytest.mark.long,
        ),
        (["model.compile=true", "zero.stage=2"], {"model.compile", "zero.stage"}, {"gpu_memory": 5 << 30}),
        (["offload.update=auto"], set(), {"gpu_memory": 2 << 30, "pcie": 2.0, "adam": 100.0}),
    ],
    ids=["batch", "no disks", "policy", "compile", "update"],
)
def test_the_command_in_a_run_folder_gives_its_flags(tmp_path, capsys, monkeypatch, sets, fixed, room):
    """The run folder's config has the choice in it, and still the command leaves open what was open."""
    config = configs.load("gpt2-124m", ["train.batch=4", "train.seq=512", "parallel.ranks=1", *sets])
    setup = setup_of(config, ranks=1, ranks_per_node=1, precision="bf16", device="cuda")
    hardware = dataclasses.replace(automatic_machine(), **room)
    monkeypatch.setattr(automatic, "hardware_here", lambda *_: hardware)
    monkeypatch.setattr("zerocli.machine.missing_compiler", lambda on_gpu: "")
    options = RunOptions(str(tmp_path), auto=FREE - fixed)
    chosen = choose_together(config, options, setup, hardware.gpu_memory, lambda value: [value])
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(chosen.config)))
    chosen.save(tmp_path)
    document = json.loads((tmp_path / "auto.json").read_text())
    assert cli.run([*shlex.split(document["replay"])[1:], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert f"auto: {document['flags']}" in answer["notes"]
    best = answer["candidates"][answer["best"]["index"]]
    assert best["step"]["seconds"] == pytest.approx(document["seconds"], rel=1e-4)
    assert {tier: each["needed"] for tier, each in best["tiers"].items()} == document["needed"]


def test_a_choice_for_ranks_without_a_gpu_has_no_command(tmp_path):
    """`fit` plans GPUs: what it says of a CPU's ranks would not be their choice."""
    config = configs.load("tiny", [*TINY, "parallel.ranks=2"])
    setup = setup_of(config, ranks=2, ranks_per_node=2, device="cpu")
    chosen = choose_together(config, RunOptions(str(tmp_path), auto=FREE), setup, 1 << 30, lambda value: [value])
    assert chosen.document["flags"] and chosen.document["replay"] is None


@pytest.mark.long
def test_one_machine_without_a_compiler_decides_for_all(tmp_path, monkeypatch):
    config = configs.load("gpt2-124m", ["parallel.ranks=2", "train.steps=1000000", "activations.policy=recompute"])
    setup = setup_of(config, ranks=2, ranks_per_node=2, precision="bf16", device="cuda")
    hardware = dataclasses.replace(automatic_machine(), host_block=1e-5)  # bound by the device
    monkeypatch.setattr(automatic, "hardware_here", lambda *_: hardware)
    options = RunOptions(str(tmp_path), auto=FREE)

    def compiled(here: str, there: int) -> bool | str:
        monkeypatch.setattr("zerocli.machine.missing_compiler", lambda on_gpu: here)

        def gather(value: Any) -> list[Any]:
            return [value, min(value, there) if there else 0] if isinstance(value, int) else [value, value]

        return choose_together(config, options, setup, hardware.gpu_memory, gather).config.model.compile

    assert compiled("", 10**9) is True
    assert compiled("there is no C compiler", 10**9) == "auto" == compiled("", 0)


def automatic_machine():
    from zerocli.plan.time.hardware import PRESETS

    return dataclasses.replace(PRESETS["h100"], pcie=41.5, disk=3.25, products=600.5)


def test_a_setup_of_python_is_read_too():
    assert Setup(recompute="recompute:3+selective:2").recomputed.policy == "recompute:3+selective:2"


@pytest.mark.long
def test_a_global_batch_that_the_own_batch_does_not_divide_is_trained(tmp_path, capsys):
    """12 sequences on 2 ranks with a config's batch of 8: 6, 3 or 1 at a time are chosen, and 8 never."""
    common = ("train.global_batch=12", "train.steps=2", "checkpoint.every=0")
    chosen = train(tmp_path / "auto", *common, "train.batch=8", auto=FREE)
    assert chosen.codes == [0, 0], chosen.said
    batch = json.loads((tmp_path / "auto/config.json").read_text())["train"]["batch"]
    assert batch in (1, 3, 6)
    assert train(tmp_path / "given", *common, f"train.batch={batch}").codes == [0, 0]
    assert losses(tmp_path / "auto") == losses(tmp_path / "given")
    words = ["tiny", "--set", "train.global_batch=12", "--auto", "--ranks", "2", "--dry-run", "--json"]
    for command in ("train", "profile"):
        assert cli.run([command, *words]) == 0
    capsys.readouterr()


@pytest.mark.long
def test_a_chosen_batch_is_the_one_that_is_trained(tmp_path):
    """Of a global batch of 16, `--auto` takes more than one sequence at a time; the samples stay the same."""
    common = ("train.global_batch=16", "train.steps=2", "checkpoint.every=0")
    assert train(tmp_path / "auto", *common, "train.batch=1", auto=FREE).codes == [0, 0]
    batch = json.loads((tmp_path / "auto/config.json").read_text())["train"]["batch"]
    assert batch > 1
    assert train(tmp_path / "given", *common, f"train.batch={batch}").codes == [0, 0]
    assert losses(tmp_path / "auto") == losses(tmp_path / "given")
