"""`zerocli train` as a person runs it: real processes, real files, real mistakes."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import runs
from commands import SMALL, lines, run
from lengths import LONG

from zerocli import config as configs
from zerocli.cli import main as cli
from zerocli.config.options import RunOptions
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.memory.build import plan_model
from zerocli.plan.setup import setup_of
from zerocli.plan.time.traffic import traffic
from zerocli.run.output.report import next_commands

KEYS = {"step", "loss", "grad_norm", "lr", "tokens", "seconds", "tokens_per_second", "peak", "comm", "wait"}


def test_a_run_leaves_what_the_contract_says(tmp_path):
    done = run(tmp_path, "train", *SMALL, "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and document["ranks"] == 2 and document["steps"] == 4
    rows = lines(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["peak"].keys() == {"hbm", "dram", "nvme"} and row["peak"]["hbm"] > 0
        assert row["comm"].keys() == {"all_gather", "reduce_scatter", "all_reduce"}
        assert row["wait"].keys() == {"collectives", "transfers", "optimizer", "data"}
        assert row["tokens"] == 2 * 2 * 32
        assert 0 <= sum(row["wait"].values()) <= row["seconds"] * 1.05
    assert json.loads((tmp_path / "run/config.json").read_text())["model"]["hidden"] == 32
    assert Path(document["checkpoint"], "manifest.json").is_file() and document["checkpoint"].endswith("step-00000004")
    assert "loss" in done.stderr and "stage 0" in done.stderr
    assert 'try: zerocli generate run "..."\ntry: zerocli export run OUT\n' in done.stderr


COPIES = ["zero.stage=3", "train.batch=1", "parallel.shard_ranks=2", "parallel.shard_states=all"]


@pytest.mark.longer
def test_stages_worlds_and_splits_see_the_same_data(tmp_path):
    """One global batch of 4: two ranks, one rank, with two micro-steps too, four ranks."""
    losses = {}
    for name, world, sets in (
        ("two", 2, ["zero.stage=3", "train.batch=2"]),
        ("one", 1, ["zero.stage=0", "train.batch=4"]),
        ("four", 4, ["zero.stage=1", "train.batch=1", "parallel.shard_ranks=2"]),
        ("accumulated", 1, ["zero.stage=2", "train.batch=2", "train.global_batch=4"]),
        *([("copies", 4, COPIES)] if LONG else []),
    ):
        ended = runs.train(tmp_path / name, "train.seq=32", "train.steps=4", "checkpoint.every=0", *sets, world=world)
        assert ended.codes == [0] * world, ended.said
        losses[name] = [row["loss"] for row in lines(tmp_path / name)]
        assert len(losses[name]) == 4
    for name, values in losses.items():
        assert values == pytest.approx(losses["two"], rel=1e-5), name
    # Two groups of two: an all-reduce of half of the gradient, counted twice, beside a reduce-scatter of all of it.
    one, *others = (lines(tmp_path / name)[0] for name in ("four", "two", "one"))
    assert one["comm_across"] == {"all_gather": 0, "reduce_scatter": 0, "all_reduce": one["comm"]["reduce_scatter"]}
    assert one["comm_across"]["all_reduce"] > 0
    assert not any(value for each in others for value in each["comm_across"].values())
    # And what a plan says: no more than padding apart.
    for name, world in (("four", 4), ("two", 2), *([("copies", 4)] if LONG else [])):
        row, config = lines(tmp_path / name)[0], configs.load(str(tmp_path / name / "config.json"))
        setup = setup_of(config, ranks=world, ranks_per_node=world, device="cpu", precision="fp32")
        planned = traffic(plan_model(shape_of(config.model, config.train.seq), setup))
        for moved, counted in ((planned.inside, row["comm"]), (planned.across, row["comm_across"])):
            assert 0.9 * sum(counted.values()) <= moved <= sum(counted.values()), name


@pytest.mark.long
def test_torchrun_starts_the_same_run(tmp_path):
    sets = ["train.steps=4", "train.seq=32", "model.hidden=32", "model.heads=4", "zero.stage=3", "checkpoint.every=0"]
    here = runs.train(tmp_path / "here", *sets)
    there = run(
        tmp_path,
        *[
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "zerocli",
            "train",
            *SMALL,
            "--stage",
            "3",
            "--run-dir",
            "there",
        ],
        module="torch.distributed.run",
        OMP_NUM_THREADS="1",
    )
    assert here.codes == [0, 0] and there.returncode == 0, there.stderr
    assert [row["loss"] for row in lines(tmp_path / "here")] == [row["loss"] for row in lines(tmp_path / "there")]


@pytest.mark.long
def test_check_compares_with_unsharded_training(tmp_path):
    done = run(tmp_path, "train", *SMALL, "--stage", "3", "--check", "3", "--run-dir", "run", "--json")
    assert done.returncode == 0, done.stderr
    check = json.loads(done.stdout)["check"]
    assert check["equal"] and check["steps"] == 3 and check["largest_relative_difference"] < 1e-5


def test_dry_run_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shape = ["gpt2-xl", "--stage", "3", "--ranks", "8", "--precision", "bf16", "--set", "model.vocab=256"]
    code = cli.run(["train", *shape, "--dry-run", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["fits"] else 3)  # 34 GiB without a GPU
    psi = document["parameters"]
    held = {category: row["held"] for category, row in document["memory"].items()}
    assert held == {k: -(-n * psi // 8) for k, n in (("parameters", 2), ("gradients", 2), ("optimizer_states", 10))}
    assert not (tmp_path / "runs").exists()


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path):
    wild = ["optimizer.lr=1e30", "train.clip=0", "optimizer.warmup=0", "train.steps=8", "checkpoint.every=0"]
    ended = runs.train(tmp_path / "run", *wild)
    assert ended.codes == [1, 1]
    assert "at step" in ended.said[0] and "no checkpoint" in ended.said[0] and "Traceback" not in ended.said[0]
    last = lines(tmp_path / "run")[-1]
    assert not math.isfinite(last["loss"]) or not math.isfinite(last["grad_norm"])
    assert last["step"] < 8
    assert runs.train(tmp_path / "on", *wild, "train.on_nan=continue").codes == [0, 0]
    assert lines(tmp_path / "on")[-1]["step"] == 8


@pytest.fixture
def mistakes(tmp_path: Path) -> dict[str, tuple[list[str], list[str]]]:
    (tmp_path / "empty.txt").write_text("")
    np.array([1, 2, 3, 400, 5] * 200, dtype=np.uint16).tofile(tmp_path / "beyond.bin")
    (tmp_path / "bad.toml").write_text('[train]\nstepz = 3\nbatch = "two"\n[modle]\nlayers = 2\n[zero]\nstage = 7\n')
    (tmp_path / "code.toml").write_text('[model]\nfactory = "os:getcwd"\n')
    (tmp_path / "blocked").write_text("a file")
    return {
        "unknown key": (["bad.toml"], ["bad.toml:2", "did you mean", "bad.toml:3", "bad.toml:4", "bad.toml:7"]),
        "stage": (["--stage", "5"], ["stage 5 is not one of 0, 1, 2, 3"]),
        "heads": (["--set", "model.heads=5"], ["heads 5 does not divide hidden"]),
        "global batch": (["--set", "train.global_batch=5"], ["global batch 5 is not a multiple of batch 2 x 2 ranks"]),
        "no data": (["--data", "nowhere.txt"], ["nowhere.txt"]),
        "empty data": (["--data", "empty.txt"], ["empty.txt", "empty"]),
        "token beyond the vocabulary": (["--data", "beyond.bin"], ["400", "element 3", "0 to 255"]),
        "run folder": (["--run-dir", "blocked/run"], ["blocked"]),
        "factory in a file": (["code.toml"], ["code.toml:2", "no code is run"]),
        "factory": (["no.such:factory"], ["cannot import no.such:factory"]),
        "optimizer": (["--set", "optimizer.name=adamww"], ["adamww"]),
    }


MISTAKES = (
    "unknown key, stage, heads, global batch, no data, empty data, token beyond the vocabulary, "
    "run folder, factory in a file, factory, optimizer"
).split(", ")


SLOW = ("global batch", "empty data", "token beyond the vocabulary", "factory", "optimizer")
"""Mistakes that only the ranks find, or that tests/cli/test_mistakes.py tries too."""


@pytest.mark.parametrize("name", [pytest.param(each, marks=[pytest.mark.long] * (each in SLOW)) for each in MISTAKES])
def test_a_users_mistake_gets_facts_and_no_traceback(tmp_path, mistakes, name, monkeypatch, capfd):
    arguments, facts = mistakes[name]
    plain = [] if arguments[0].endswith((".toml", "factory")) else SMALL
    if "--run-dir" not in arguments:
        arguments = [*arguments, "--run-dir", "run"]
    if name in SLOW:
        done = run(tmp_path, "train", *arguments, *plain)
        code, said = done.returncode, done.stderr
    else:  # nothing is started
        monkeypatch.chdir(tmp_path)
        code, said = cli.run(["train", *arguments, *plain]), capfd.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    for fact in facts:
        assert fact in said, said


def children(pid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"PPid:\t{pid}\n" in (entry / "status").read_text():
                    found |= {int(entry.name)} | children(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.long
def test_an_interrupt_ends_every_rank(tmp_path, how):
    command = [sys.executable, "-m", "zerocli", "train", *SMALL, "--steps", "100000", "--run-dir", "run"]
    command += ["--save-every", "never"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = children(process.pid)
    assert len(ranks) >= 2
    process.send_signal(how)
    assert process.wait(600) == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert all(json.loads(line) for line in metrics.read_text().splitlines())  # whole lines only


@pytest.mark.long
def test_a_run_that_saves_and_resumes_does_not_import_torchs_checkpoints():
    """Importing them takes longer than many a small run's steps."""
    code = "import sys, zerocli.run.trainer, zerocli.checkpoint.saver, zerocli.checkpoint.loader; "
    code += "sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


@pytest.mark.parametrize(
    "sets, words",
    [
        (["data.path=my chats.jsonl"], "zerocli train tiny --data 'my chats.jsonl' --stage 3 --offload cpu"),
        (["data.mix=a.jsonl:2,b.jsonl"], "zerocli train tiny --data a.jsonl:2 --data b.jsonl --stage 3 --offload cpu"),
        ([], "zerocli train tiny --stage 3 --offload cpu"),
    ],
)
def test_the_next_command_trains_on_the_same_data(tmp_path, sets, words):
    config = configs.load("tiny", ["zero.stage=3", *sets])
    assert next_commands(config, RunOptions(str(tmp_path)), saved=False) == [words]
