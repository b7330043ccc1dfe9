"""`zerocli fit`: the paper's tables to their printed digits, verdicts and exit codes, and every kind of bad input."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import sys

import click
import pytest
from published import PUBLISHED

from offload.placement import Placement
from zerocli import machine
from zerocli.cli import fit, fit_judge
from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.layout.categories import CATEGORIES
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.models.formula import Formula
from zerocli.plan.report.text import command_lines
from zerocli.plan.search import candidates as search
from zerocli.plan.search.largest import Search, largest_count, largest_size
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import PRESETS

pytestmark = pytest.mark.usefixtures("no_gpu")


def ask(capsys, *words: str) -> tuple[int, dict]:
    """Return the exit code and the JSON document of `zerocli fit`."""
    code = cli.run(["fit", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


# Table 1 of the paper, as printed: by number of ranks, then model, GB a device of stages 1, 2, 3.
TABLE = {
    1: {"7.5B": "120 120 120", "128B": "2048 2048 2048", "1T": "16000 16000 16000"},
    4: {"7.5B": "52.5 41.3 30", "128B": "896 704 512", "1T": "7000 5500 4000"},
    16: {"7.5B": "35.6 21.6 7.5", "128B": "608 368 128", "1T": "4750 2875 1000"},
    64: {"7.5B": "31.4 16.6 1.88", "128B": "536 284 32", "1T": "4187 2218 250"},
    256: {"7.5B": "30.4 15.4 0.47", "128B": "518 263 8", "1T": "4046 2054 62.5"},
    1024: {"7.5B": "30.1 15.1 0.12", "128B": "513 257 2", "1T": "4011 2013 15.6"},
}


def test_groups_divide_states_by_their_ranks_and_count_traffic_inside_and_across(capsys):
    code, found = ask(capsys, "7.5B", "--ranks", "64", "--shard-ranks", "8", "--stage", "3", "--gpu-memory", "80GiB")
    psi, (candidate, *_) = 7.5e9, found["candidates"]
    rows = {row["category"]: row["bytes"] for row in candidate["rows"] if row["tier"] == "hbm"}
    assert code == 0 and candidate["shard_ranks"] == 8
    assert [rows[each] for each in ("parameters", "gradients", "optimizer_states")] == [psi / 4, psi / 4, 12 * psi / 8]
    assert candidate["comm"] == {"inside": 3 * 2 * psi, "across": 2 * 2 * psi / 8}
    # Every size that tiles 64 ranks: one group of all sends nothing across, and with each rank alone all is across.
    groups = {each["shard_ranks"]: each["comm"] for each in found["groups"] if each["shard_states"] == "group"}
    assert list(groups) == [1, 2, 4, 8, 16, 32, 64]
    assert groups[64] == {"inside": 3 * 2 * psi, "across": 0} and groups[1] == {"inside": 0, "across": 2 * 2 * psi}
    spread = {each["shard_ranks"]: each for each in found["groups"] if each["shard_states"] == "all"}
    rows = {row["category"]: row["bytes"] for row in spread[8]["rows"] if row["tier"] == "hbm"}
    assert list(spread) == [1, 2, 4, 8, 16, 32] and spread[8]["comm"] == groups[8]
    assert rows["gathered"] == 2 * psi / 8 and rows["optimizer_states"] == 12 * psi / 64
    assert cli.run(["fit", "7.5B", "--ranks", "64", "--shard-ranks", "6"]) == 2
    said = "error: shard_ranks 6 does not divide the 64 data-parallel ranks: 1, 2, 4, 8, 16, 32 or 64 does\n"
    assert said + "try: --shard-ranks 4" in capsys.readouterr().err


def as_printed(gigabytes: float, printed: str, model: str) -> str:
    """Return a number with as many digits as the paper prints: it rounds 7.5B's column and truncates the others."""
    digits = len(printed.partition(".")[2])
    if model == "7.5B":
        return f"{round(gigabytes * 10**digits + 1e-9) / 10**digits:.{digits}f}"
    return f"{math.floor(gigabytes * 10**digits + 1e-9) / 10**digits:.{digits}f}"


@pytest.mark.parametrize("ranks", TABLE)
def test_every_cell_of_the_papers_table(ranks, capsys):
    for model, line in TABLE[ranks].items():
        for stage, printed in zip((1, 2, 3), line.split(), strict=True):
            words = (model, "--ranks", str(ranks), "--stage", str(stage), "--offload", "", "--precision", "bf16")
            _, answer = ask(capsys, *words)
            [candidate] = answer["candidates"]
            needed = candidate["tiers"]["hbm"]["needed"]
            assert as_printed(needed / 1e9, printed, model) == printed, (model, ranks, stage)
            assert sum(row["bytes"] for row in candidate["rows"]) == needed


def test_figure_one(capsys):
    _, answer = ask(capsys, "7.5B", "--ranks", "64", "--offload", "")
    sizes = [each["tiers"]["hbm"]["needed"] / 1e9 for each in answer["candidates"]]
    assert [f"{size:.0f}" if size > 100 else f"{size:.1f}" for size in sizes] == ["120", "31.4", "16.6", "1.9"]


def test_the_contract_of_the_document(capsys):
    code, answer = ask(capsys, "llama3-8b", "--ranks", "16", "--ranks-per-node", "8", "--gpu-memory", "80GiB")
    assert code == 0 and answer["schema"] == 1 and answer["fits"] is True
    assert answer["model"]["parameters"] == 8_030_261_248
    assert {each["stage"] for each in answer["candidates"]} == {0, 1, 2, 3}
    for candidate in answer["candidates"]:
        for tier, sizes in candidate["tiers"].items():
            rows = [row for row in candidate["rows"] if row["tier"] == tier]
            assert sizes["needed"] == sum(row["bytes"] for row in rows)
            assert all(row["category"] in CATEGORIES and row["formula"] and row["bytes"] >= 0 for row in rows)
        over = any(sizes["needed"] > sizes["available"] for sizes in candidate["tiers"].values())
        assert candidate["fits"] is not over and candidate["step"]["seconds"] > 0
    best = answer["candidates"][answer["best"]["index"]]
    fitting = [each["step"]["seconds"] for each in answer["candidates"] if each["fits"]]
    assert best["step"]["seconds"] == min(fitting) and best["stage"] == answer["best"]["stage"]


def test_host_and_disk_are_a_nodes(capsys):
    """Optimizer states of 10 bytes per parameter, over 32 ranks of which a node has 8: a quarter on each node."""
    words = ("llama3-8b", "--ranks", "32", "--ranks-per-node", "8", "--stage", "3", "--offload", "optimizer=nvme")
    _, answer = ask(capsys, *words)
    [candidate] = answer["candidates"]
    [row] = [r for r in candidate["rows"] if r["tier"] == "nvme" and r["category"] == "optimizer_states"]
    assert row["bytes"] == pytest.approx(10 * 8_030_261_248 / 4, rel=1e-4)
    assert candidate["tiers"]["nvme"]["needed"] >= row["bytes"]


def test_what_does_not_fit_says_by_how_much_and_what_would(capsys):
    words = ["llama3-8b", "--ranks", "8", "--stage", "2", "--offload", "", "--gpu-memory", "16GiB"]
    code, answer = ask(capsys, *words)
    assert code == 3 and answer["fits"] is False and answer["best"] is None
    [candidate] = answer["candidates"]
    sizes = candidate["tiers"]["hbm"]
    assert candidate["over"]["hbm"] == sizes["needed"] - sizes["available"] > 0
    change = answer["change"]
    assert change["fits"] and change["tiers"]["hbm"]["needed"] <= 16 * 2**30
    # The change is a command line that fits.
    again = [w for w in words[:3]] + change["arguments"].split() + words[-2:]
    assert ask(capsys, *again)[0] == 0
    assert cli.run(["fit", *words]) == 3
    out = capsys.readouterr().out
    assert "does not fit" in out and "over by" in out and change["arguments"] in out and "\x1b" not in out


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 3, 5])
def test_a_change_that_fits_is_not_left_out_by_its_rough_plan(seed, monkeypatch):
    draw = random.Random(seed)
    sizes = {"layers": draw.choice([1, 3, 24]), "hidden": draw.choice([256, 2048]), "heads": 8}
    model = ModelConfig(family=draw.choice(["gpt2", "llama"]), vocab=draw.choice([1000, 50304]), **sizes)
    setup = Setup(stage=1, ranks=draw.choice([1, 4]), batch=8, seq=1024, recompute=draw.choice(["auto", False]))
    shape = shape_of(model, 1024)
    needed = search.weigh(Formula(shape), setup, PRESETS["h100"]).plan.needed("hbm")
    for share in (0.9, 0.3):
        host = draw.choice([8, 512]) << 30
        small = dataclasses.replace(PRESETS["h100"], gpu_memory=int(share * needed), host_memory=host)
        found = search.smallest_change(Formula(shape), setup, small)
        with monkeypatch.context() as patch:
            patch.setattr(search, "may_fit", lambda *_: True)
            assert search.smallest_change(Formula(shape), setup, small) == found


def test_the_table_marks_the_fastest_and_explains_every_row(capsys):
    assert (
        cli.run(["fit", "gpt2-xl", "--ranks", "8", "--batch", "2", "--set", "activations.policy=keep", "--explain"])
        == 0
    )
    out = capsys.readouterr().out
    assert "fastest" in out and "bound by" in out and "\x1b" not in out
    for word in ("parameters", "optimizer states", "activations", "logits", "CUDA context", "initialisation"):
        assert word in out


def test_seconds_that_the_host_decides_are_said_to_vary(capsys):
    words = ["fit", "gpt2-124m", "--ranks", "1", "--stage", "0", "--hardware", "h100"]
    for batch, varies in (("1", True), ("64", False)):
        assert cli.run([*words, "--batch", batch]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("bound by host" in out) == varies == ("varies by up to a third" in out)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "opt-350m",
        "qwen3-8b",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("pythia-1b", "gemma-2b", "phi-2", "mixtral-8x7b")),
    ],
)
def test_hugging_face_configs_are_read_as_data(name, capsys, tmp_path):
    values, count = PUBLISHED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values | {"auto_map": {"AutoModel": "evil.py"}, "_name_or_path": "../../etc"}))
    _, answer = ask(capsys, str(path), "--ranks", "8", "--seq", "1024", "--stage", "3")
    assert answer["model"]["parameters"] == count
    assert all(each["tiers"]["hbm"]["needed"] > 16 * count // 8 / 2 for each in answer["candidates"][:1])


@pytest.mark.parametrize(
    "kind", ["count", *(pytest.param(k, marks=pytest.mark.long) for k in ("file", "folder")), "bundled"]
)
def test_the_flags_of_auto_give_its_numbers_for_every_kind_of_model(kind, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["qwen3-8b"][0]))
    model = {"count": "7.5B", "file": str(path), "folder": str(tmp_path), "bundled": "gpt2-124m"}[kind]
    words = (model, "--ranks", "1", "--hardware", "rtx4090", "--set", "train.steps=100000")
    code, chosen = ask(capsys, *words, "--auto")
    assert code == 0
    [flags] = [note.removeprefix("auto: ") for note in chosen["notes"] if note.startswith("auto: ")]
    assert ("model.compile=true" in flags) is (kind != "count") and ("model.compile" in flags) is (kind != "count")
    code, by_hand = ask(capsys, *words, *flags.split())
    assert code == 0
    found = [each["candidates"][each["best"]["index"]] for each in (chosen, by_hand)]
    assert found[0]["tiers"] == found[1]["tiers"] and found[0]["step"] == found[1]["step"]


def pasted(lines: list[str], start: int) -> list[str]:
    """Return the words of the command whose first line this is: all but its last line end with a backslash."""
    end = next(at for at in range(start, len(lines)) if not lines[at].endswith("\\"))
    return " ".join(line.removesuffix("\\") for line in lines[start : end + 1]).split()


@pytest.mark.parametrize(
    "words, auto",
    [
        pytest.param(["rtx4090"], ["--auto"], id="auto"),
        pytest.param(
            ["h100", "--ranks", "1", "--set", "activations.policy=auto"], [], id="policy=auto", marks=pytest.mark.long
        ),
    ],
)
def test_the_flags_beside_fits_give_the_numbers_shown(words, auto, capsys):
    """In the second case plain `fit` shows a placement with a budget, which is searched with its recomputation."""
    words = ["llama3-8b", "--hardware", *words]
    asked = [*words, *auto]
    _, shown = ask(capsys, *asked)
    best = shown["candidates"][shown["best"]["index"]]
    assert cli.run(["fit", *asked]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    flags = pasted(lines, lines.index("fits:") + 1)
    _, by_hand = ask(capsys, *words, *flags)
    [found] = by_hand["candidates"]
    assert found["tiers"] == best["tiers"] and found["step"] == best["step"]
    for key in ("exact_policy", "compile", "update"):
        assert found[key] == best[key]
    assert f"activations.policy={best['exact_policy']}" in flags


@pytest.mark.long
def test_the_flags_of_several_machines_give_the_numbers_shown(capsys):
    words = ["llama3-8b", "--auto", "--hardware"]
    _, shown = ask(capsys, *words, "rtx4090,l40s")
    assert cli.run(["fit", *words, "rtx4090,l40s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for machine_shown in shown["machines"]:
        name, best = machine_shown["hardware"], machine_shown["candidate"]
        flags = pasted(lines, lines.index(f"  {name} (bf16):") + 1)
        _, by_hand = ask(capsys, "llama3-8b", "--hardware", name, *flags)
        [found] = by_hand["candidates"]
        assert found["tiers"] == best["tiers"] and found["step"] == best["step"]
        assert best["compile"] is True and f"activations.policy={best['exact_policy']}" in flags


def test_a_config_json_alone_says_what_the_model_is(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["gpt2"][0]))
    assert cli.run(["fit", str(path), "--set", "model.layers=4"]) == 2
    assert "says what the model is" in capsys.readouterr().err
    assert cli.run(["fit", str(path), "--set", "activations.policy=recompute", "--ranks", "1"]) == 0


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (["--ranks", "8", "--shard-ranks", "3"], "shard_ranks 3 does not divide the 8"),
        (["--ranks", "9"], "8 ranks per node do not divide ranks 9"),
        (["--stage", "2", "--offload", "params=cpu"], "this stage does not partition parameters"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_a_model_is_run(flags, fact, monkeypatch, capsys):
    """Running a model on fake tensors may take a minute."""
    monkeypatch.delattr(fit_judge, "_model")
    assert cli.run(["fit", "gpt2-124m", "--ranks-per-node", "8", *flags]) == 2
    assert fact in capsys.readouterr().err


def test_the_largest_model(capsys):
    """By model states alone: 16 bytes a parameter over N ranks (stage 3), or all of them on one (stage 0).

    A whole model also has activations and a process, but the engine's split master takes two bytes less than theirs.
    """
    room = 32 * 10**9
    words = ("--max", "--ranks", "64", "--gpu-memory", "32GB", "--offload", "")
    machine = dataclasses.replace(PRESETS["h100"], gpu_memory=room)
    for stage, bytes_each in ((0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)):
        count = largest_count(Setup(ranks=64, stage=stage), machine, [stage], Placement())
        assert count == pytest.approx(room / bytes_each, rel=1e-6)
        if stage in (1, 2):  # the command is the same
            continue
        _, answer = ask(capsys, *words, "--stage", str(stage))
        assert answer["max"]["model_states_parameters"] == pytest.approx(room / bytes_each, rel=1e-6)
        whole = answer["max"]["parameters"]
        split = bytes_each - (2 / 64 if stage else 2)
        assert whole < room / split and answer["fits"] and answer["model"]["parameters"] == whole
    split_layers = largest_count(Setup(ranks=64, tp=2, stage=3), machine, [3], Placement())
    assert split_layers == pytest.approx(room / (16 / 64), rel=1e-6)


@pytest.mark.long
def test_the_largest_model_is_a_whole_one_or_nothing(capsys):
    """A GPU that has no room for a process and two blocks fits nothing, whatever the disks could hold."""
    words = ("llama3-8b", "--max", "--ranks", "1")
    code, answer = ask(capsys, *words, "--gpu-memory", "1GiB")
    assert code == 3 and answer["fits"] is False and answer["max"]["parameters"] is None
    assert cli.run(["fit", *words, "--gpu-memory", "1GiB"]) == 3
    assert "nothing of this shape fits" in capsys.readouterr().out
    code, answer = ask(capsys, *words, "--gpu-memory", "10GiB")
    assert code == 0 and answer["model"]["whole"] and answer["model"]["parameters"] == answer["max"]["parameters"]
    best = answer["candidates"][answer["best"]["index"]]
    assert all(sizes["needed"] <= sizes["available"] for sizes in best["tiers"].values())


@pytest.mark.parametrize(
    "name", ["V100-32", *(pytest.param(name, marks=pytest.mark.long) for name in ("T4", "v100", "v100-16", "p100"))]
)
def test_hardware_without_bf16_is_planned_in_fp16(name, capsys):
    words = ("gpt2-xl", "--hardware", name)
    for precision in (["--precision", "auto"], []):  # the bundled config says bf16
        _, answer = ask(capsys, *words, *precision)
    assert all(each["precision"] == "fp16" for each in answer["candidates"]) and not answer["hardware"]["bf16"]
    assert any("has no bf16" in note for note in answer["notes"])
    assert cli.run(["fit", *words, "--precision", "bf16"]) == 2
    assert "does not compute in bf16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "preset"),
    [("A100", "a100-80"), ("a100-40", "a100-40"), ("MI300X", "mi300x"), ("l40s", "l40s"), ("RTX4090", "rtx4090")],
)
def test_presets_are_found_in_any_case(name, preset, capsys):
    _, answer = ask(capsys, "tiny", "--hardware", name)
    assert answer["hardware"]["name"] == preset and answer["hardware"]["bf16"]


@pytest.mark.parametrize(
    ("name", "bf16", "known"),
    [
        ("NVIDIA Frobnicator 9000", True, False),
        ("NVIDIA GeForce RTX 2080 Ti", False, False),
        ("Tesla T4", False, True),
        ("NVIDIA A100 80GB PCIe", True, True),
    ],
)
def test_the_driver_is_asked_and_an_unknown_gpu_is_named(name, bf16, known, capsys, monkeypatch):
    """Also where torch is built without CUDA: sizes are the driver's, rates an H100's, and a note says so."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(machine, "_nvidia_smi", lambda: [machine.Gpu(name, 20 * 2**30)] * 3)
    _, answer = ask(capsys, "tiny")
    found = answer["hardware"]
    assert found["name"] == name and found["gpus"] == 3 and 19 * 2**30 < found["gpu_memory"] < 20 * 2**30
    assert found["bf16"] is bf16 and found["known"] is known
    assert any("rates of an H100" in note for note in answer["notes"]) is not known


def test_several_kinds_of_machines_have_a_row_each(capsys):
    words = ("llama3-70b", "--hardware", "h100,B200,t4", "--batch", "2")
    code, answer = ask(capsys, *words, "--tokens", "1T", "--price", "2")
    machines = answer["machines"]
    assert code == 0 and [each["hardware"] for each in machines] == ["h100", "b200", "t4"]
    assert [each["fits"] for each in machines] == [True, True, False]
    steps = [each["candidate"]["step"] for each in machines]
    assert steps[1]["tokens_per_second"] > steps[0]["tokens_per_second"] and answer["hardware"]["name"] == "b200"
    assert all(0 < each["candidate"]["used"]["hbm"] <= 1 for each in machines[:2])
    assert cli.run(["fit", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "%" in line] == ["h100", "b200", "t4"]
    assert [line.split()[0] for line in lines if "--stage" in line] == ["h100:", "b200:", "t4:"]


def test_days_and_cost_follow_from_the_tokens(capsys):
    words = ("llama3-8b", "--hardware", "h100", "--ranks", "16", "--tokens", "1T", "--price", "2.5")
    _, answer = ask(capsys, *words)
    for each in answer["candidates"]:
        training, rate = each["training"], each["step"]["tokens_per_second"]
        assert training["days"] == pytest.approx(1e12 / rate / 86400)
        assert training["gpu_hours"] == pytest.approx(training["days"] * 24 * 16)
        assert training["cost"] == pytest.approx(2.5 * training["gpu_hours"])
    assert cli.run(["fit", *words]) == 0
    out = capsys.readouterr().out
    assert "1T tokens: " in out and "GPU-hours, cost" in out and " days " in out
    _, answer = ask(capsys, "7.5B", "--tokens", "1T")
    assert answer["candidates"][0]["training"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["llama3-8b", "--ranks", "8", "--explain"],
        ["zero-1t", "--ranks", "1024", "--hardware", "v100", "--explain"],
        ["7.5B", "--ranks", "64"],
        ["1T", "--ranks", "1"],
        pytest.param(["llama3-8b", "--ranks", "1", "--gpu-memory", "1GiB", "--explain"], marks=pytest.mark.long),
        [
            "llama3-8b",
            "--ranks",
            "8",
            "--stage",
            "3",
            "--offload",
            "params=cpu,grads=cpu,optimizer=hbm:2GiB+cpu:9GiB+nvme",
        ],
        pytest.param(
            ["llama3-70b", "--hardware", "h100,h200,b200,t4", "--tokens", "15T", "--price", "2.5"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["llama3-8b", "--set", "model.layers=8", "--lora", "16:q,v", "--ranks", "1", "--max", "seq"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["tiny", "--set", "model.layers=1", "--hardware", "t4,h100", "--max", "seq", "--tokens", "1T"]
            + ["--price", "2"],
            marks=pytest.mark.long,
        ),
        ["tiny", "--hardware", "t4,h100", "--tokens", f"{10**20}T", "--price", "9e11"],
        pytest.param(
            ["llama3-70b", "--ranks", "8", "--host-memory", "500GiB", "--gpu-memory", "40GiB"], marks=pytest.mark.long
        ),
        ["9999999T"],
        [f"{10**20}T", "--tokens", "1T"],
    ],
)
def test_no_line_is_longer_than_80_columns(words, capsys):
    assert cli.run(["fit", *words]) in (0, 3)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    # Numbers end in the column where their heading ends.
    [head] = [line for line in lines if "GPU GiB " in line and "used" in line]
    assert head.split()[0] in ("stage", "hardware") and head.split()[-1] == "verdict"  # no heading is broken
    end = head.index("used") + len("used")
    rows = [line for line in lines if line[: end + 1].rstrip().endswith("%")]
    assert rows and all(line[end - 1] == "%" for line in rows)


@pytest.mark.long
def test_a_long_placement_is_to_be_pasted_whole(capsys):
    assert cli.run(["fit", "llama3-70b", "--ranks", "8", "--host-memory", "500GiB", "--gpu-memory", "30GiB"]) == 0
    shown = capsys.readouterr().out.partition("\nfits:\n")[2].replace("\\\n", "").splitlines()[0]
    assert re.fullmatch(r"--stage 3 --offload \S{60,}", " ".join(shown.split()))


def test_what_is_to_be_pasted_is_broken_where_a_shell_allows_it():
    long = "--offload " + "x" * 90
    arguments = (
        f"--stage 3 --batch 2 {long} --set train.accumulate=2 --set activations.policy=recompute:12+selective:20 -v"
    )
    lines = command_lines(arguments)
    assert [line for line in lines if len(line) > 80] == [f"  {'x' * 90} \\"]
    assert lines[0] == "  --stage 3 --batch 2 --offload \\" and not lines[-1].endswith("\\")
    assert "".join(lines).replace("\\", "").split() == arguments.split()


def tiny_factory():
    from torch import nn

    return nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 3))


@pytest.mark.parametrize(
    "words",
    [
        ("llama3-8b", "--stage", "3"),
        pytest.param(("llama3-8b",), marks=pytest.mark.long),
        ("llama3-8b", "--stage", "3", "--auto"),
        pytest.param(("llama3-8b", "--max", "batch"), marks=pytest.mark.long),
        pytest.param(("llama3-8b", "--hardware", "h100,h200"), marks=pytest.mark.long),
        ("7.5B",),
        ("test_fit:tiny_factory",),
    ],
)
def test_states_without_a_place_are_3_with_a_document(words, capsys):
    words = (*words, "--offload", "optimizer=hbm:7B")
    assert cli.run(["fit", *words, "--json"]) == 3
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["schema"] == 1 and answer["fits"] is False and answer["best"] is None and answer["candidates"] == []
    assert "no place left" in answer["reason"] and answer["reason"] in shown.err and "try: a tier without" in shown.err
    assert answer["model"]["parameters"] == {"llama3-8b": 8030261248, "7.5B": 7500000000}.get(words[0])
    _, whole = ask(capsys, *words[:1])
    assert set(whole) - {"max"} <= set(answer)
    assert cli.run(["fit", *words]) == 3
    assert not capsys.readouterr().out


def test_a_factory_is_counted(capsys):
    _, answer = ask(capsys, "test_fit:tiny_factory", "--ranks", "2")
    assert answer["model"]["parameters"] == 143 and answer["model"]["whole"] is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["0B"], "below 1"),
        (["7.5X"], "not a parameter count"),
        (["--", "-7B"], "not a parameter count"),
        (["no-such-model"], "no bundled config"),
        (["llama3-8b", "--gpu-memory", "0"], "not above 0"),
        (["llama3-8b", "--gpu-memory", "lots"], "not a size"),
        (["llama3-8b", "--gpu-memory", "80"], "80 has no unit: did you mean 80GiB?"),
        (["llama3-8b", "--host-memory", "2048"], "2048 has no unit: did you mean 2048GiB?"),
        (["llama3-8b", "--nvme-space", "4000"], "4000 has no unit: did you mean 4000GiB?"),
        (["llama3-8b", "--set", "runtime.context=1"], "1 has no unit"),
        (["llama3-8b", "--set", "train.gpu_memory=80"], "80 has no unit: did you mean 80GiB?"),
        (["llama3-8b", "--host-memory", "-4GiB"], "not a size"),
        (["llama3-8b", "--ranks", "0"], "below 1"),
        (["llama3-8b", "--ranks", "6", "--tp", "4"], "tp 4 does not divide ranks 6"),
        (["llama3-8b", "--ranks", "6", "--tp", "3"], "tp 3 does not divide heads 32"),
        (["llama3-8b", "--ranks", "24", "--ranks-per-node", "6", "--tp", "4"], "layers between nodes of 6 ranks"),
        (["llama3-8b", "--ranks", "12", "--ranks-per-node", "8"], "8 ranks per node do not divide ranks 12"),
        (["llama3-8b", "--batch", "0"], "below 1"),
        (["llama3-8b", "--precision", "int3"], "int3"),
        (["llama3-8b", "--offload", "gpu"], "gpu"),
        (["llama3-8b", "--stage", "0", "--offload", "cpu"], "stage 0 partitions nothing"),
        (["llama3-8b", "--hardware", "h1000"], "did you mean h100?"),
        (["llama3-8b", "--set", "runtime.contxt=1GiB"], "runtime.contxt"),
        (["7.5B", "--set", "model.layers=4"], "has no shape"),
        (["no_such_package:thing"], "cannot import"),
        (["test_fit:no_such_name"], "cannot import"),
        (["json:dumps"], "failed"),
        (["sys:exit"], "failed"),
        (["llama3-8b", "--tokens", "many"], "not a number of tokens"),
        (["llama3-8b", "--price", "2"], "how many tokens"),
        (["llama3-8b", "--tokens", "1T", "--price", "nan"], "nan is not a finite number"),
        (["llama3-8b", "--tokens", "1T", "--price", "inf"], "inf is not a finite number"),
        (["llama3-8b", "--tokens", "1T", "--price", "1e308"], "a GPU-hour costs less than 1e+12"),
        (["llama3-8b", "--ranks", f"{10**400}"], "beyond 64 bits"),
        (["llama3-8b", "--set", "hardware.tflops=1e-300"], "a rate is above 0"),
        (["llama3-8b", "--set", "hardware.disk=nan"], "a rate is above 0"),
        ([], "which MODEL"),
    ],
)
def test_bad_input_is_2_with_one_clear_message(words, said, capsys):
    assert cli.run(["fit", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.startswith("error: ") and "Traceback" not in captured.err
    assert not captured.out


def test_a_budget_without_room_is_not_blamed_on_a_stage_that_was_not_asked_for(capsys):
    """Stage 0 refuses any placement of optimizer states; the other stages take it and have no room."""
    for words in (["--offload", "optimizer=cpu:1KiB"], ["--stage", "2", "--offload", "optimizer=cpu:1KiB"]):
        assert cli.run(["fit", "tiny", "--ranks", "2", *words]) == 3
        err = capsys.readouterr().err
        assert "no tier follows it" in err and "this stage" not in err
    assert cli.run(["fit", "tiny", "--stage", "0", "--offload", "optimizer=cpu:1KiB"]) == 2
    assert "this stage does not partition optimizer" in capsys.readouterr().err


GOOD = PUBLISHED["llama3-8b"][0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("not json", "JSON syntax"),
        (json.dumps(GOOD)[:-20], "JSON syntax"),
        ("[1, 2]", "no JSON object"),
        ("{}", "model_type"),
        (json.dumps(GOOD | {"model_type": "llamma"}), "did you mean llama?"),
        (json.dumps(GOOD | {"hidden_size": "wide"}), "hidden_size"),
        (json.dumps(GOOD | {"hidden_size": 4096.5}), "hidden_size"),
        (json.dumps(GOOD | {"num_hidden_layers": -1}), "num_hidden_layers"),
        (json.dumps(GOOD | {"vocab_size": 10**400}), "vocab_size"),
        (json.dumps(GOOD | {"num_hidden_layers": 10**9}), "num_hidden_layers"),
        (json.dumps(GOOD | {"num_key_value_heads": 7}), "does not divide"),
        (json.dumps(GOOD | {"tie_word_embeddings": "yes"}), "tie_word_embeddings"),
        (json.dumps({"model_type": "qwen2", "num_attention_heads": 16}), "give num_key_value_heads in"),
        ('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        (" " * (9 << 20), "bytes"),
        ("\xff\xfe", "error"),
    ],
    ids=range(16),
)
def test_a_bad_config_json_is_2_with_its_place(text, said, capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    assert cli.run(["fit", str(path)]) == 2
    err = capsys.readouterr().err
    assert said in err and "config.json" in err and "Traceback" not in err and len(err) < 4000


def test_the_flags_of_fit_are_these():
    options = [name for param in fit.command.params if isinstance(param, click.Option) for name in param.opts]
    assert sorted(options) == sorted(
        "--stage --offload --auto --ranks --ranks-per-node --tp --gpu-memory --host-memory --nvme-space --batch --seq "
        "--precision --max --lora --base --explain --trace --json --hardware --set --tokens --price "
        "--shard-ranks".split()
    )


def test_help_opens_with_what_it_needs(capsys):
    assert cli.run(["fit", "--help"]) == 0
    assert "Needs no GPU and trains nothing" in capsys.readouterr().out.split("MODEL is")[0]


def test_absurd_sizes_are_answered_too(capsys):
    """Nothing is counted one by one: not chunks of a table of positions, not ranks."""
    for words in (["tiny", "--seq", str(10**12)], ["tiny", "--ranks", str(10**9)], [f"{10**20}T"]):
        code, answer = ask(capsys, *words, "--offload", "nvme", "--stage", "3")
        assert code == 3 and not answer["fits"]


def test_the_highest_price_of_the_longest_run_is_a_number(capsys):
    """What is accepted as price, tokens and rate gives no cost beyond a float."""
    words = ("tiny", "--tokens", f"{10**29}T", "--price", "9e11", "--set", "hardware.tflops=1e-9")
    code = cli.run(["fit", *words, "--json"])
    out = capsys.readouterr().out
    assert code == 0 and "Infinity" not in out and "NaN" not in out
    assert all(0 < each["training"]["cost"] < math.inf for each in json.loads(out)["candidates"])


def test_runtime_constants_can_be_given(capsys):
    sizes = {}
    for value in ("0", "1GiB"):
        _, answer = ask(capsys, "tiny", "--ranks", "2", "--stage", "2", "--set", f"runtime.context={value}")
        sizes[value] = answer["candidates"][0]["tiers"]["hbm"]["needed"]
    assert sizes["1GiB"] - sizes["0"] == 2**30


def test_no_torch_for_a_known_family():
    import subprocess

    code = "import sys; from zerocli.cli import main as cli; cli.run(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = ["fit", "gpt2-124m", "--ranks", "1", "--stage", "0"]
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True).returncode == 0


def test_one_block_more_than_the_largest_model_does_not_fit():
    """Nothing that fits by its own plan is left out because the paper's whole master would not."""
    setup = Setup(stage=0, ranks=1, batch=1, seq=128, recompute=True)
    shape = shape_of(ModelConfig(layers=12, hidden=768, heads=12, vocab=1000), setup.seq)
    hardware = dataclasses.replace(PRESETS["h200"], gpus=1, gpu_memory=20 * 2**30)
    largest = largest_size(Formula(shape), Search(setup, hardware, hardware, [0], Placement()))
    assert largest is not None and search.weigh(largest, setup, hardware).fits
    deeper = largest.sized(setup, largest.blocks + 1, largest.dimensions["hidden"])
    assert not search.weigh(deeper, setup, hardware).fits
