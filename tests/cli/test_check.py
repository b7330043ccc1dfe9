"""`zerocli check`: equal where sharding changes nothing, and the first wrong tensor by name where it does."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_loops
import click
import pytest
import torch
from ranks import run_ranks

import zerocli
from zerocli import config as configs
from zerocli.check import table
from zerocli.check.compare import Outcome, Tolerance, differences
from zerocli.check.rows import FACTOR, Checklist, Row, choose_rows
from zerocli.cli import check
from zerocli.cli import main as cli
from zerocli.engine.units.norms import _norm
from zerocli.errors import UserError

SUPPORT = Path(__file__).parents[1] / "support"
SMALL = ["train.batch=2", "train.seq=16", "model.layers=2", "model.hidden=32", "model.heads=2", "optimizer.lr=1e-2"]


def checked(source: str, rows: list[Row], sets: list[str], nvme_path: str = "") -> tuple[dict, list[dict]]:
    """Run a check on these ranks; return the reference and the rows' results (of rank 0)."""
    sys.path.insert(0, str(SUPPORT))
    from zerocli.check.ranks import Ranks

    config = configs.load(source, sets=sets, flags={"offload.nvme_path": (nvme_path,) if nvme_path else None})
    kept: list[dict[str, Any]] = []
    Ranks(config, 3).run(Checklist(tuple(rows), 3), kept.append)
    return (kept[0], kept[1:]) if kept else ({}, [])


def checked_many(sources: list[str], rows: list[Row], sets: list[str]) -> dict[str, tuple[dict, list[dict]]]:
    return {source: checked(source, rows, sets) for source in sources}


LOW = ["train.precision=bf16", "train.accumulate=2"]


@pytest.mark.parametrize(
    ("extra", "some"),
    [
        ([], [0]),  # some of each stage and placement, without or with recomputation
        pytest.param([], [1, 2, 3], marks=pytest.mark.long),
        pytest.param(LOW, [0, 3, 6, 9], marks=pytest.mark.long),  # some of each stage and placement
    ],
    ids=["fp32", "fp32, others", "bf16"],
)
def test_every_stage_and_placement_equals_plain_torch(tmp_path, extra, some):
    rows = list(choose_rows((), (), 40_000, 2, nvme=True, compiler=False))
    assert len(rows) == 2 * (1 + 3 * 4)
    rows = [row for index, row in enumerate(rows) if index % (12 if extra else 4) in some]
    about, results = run_ranks(2, checked, "tiny", rows, [*SMALL, *extra], str(tmp_path))[0]
    assert about["reference"] == "plain torch"
    assert [result["verdict"] for result in results] == ["equal"] * len(rows), results
    assert all(result["optimizer"]["name"] for result in results)  # the moments were compared as well
    digests = {result["digest"] for row, result in zip(rows, results, strict=True) if extra == [] or row.stage == 3}
    assert len(digests) == 1


def test_the_unsharded_run_shows_its_progress(monkeypatch, capsys):
    """Two runs of three steps, the second off by one rounding: a line for each forward and backward."""
    monkeypatch.setattr("zerocli.console.LINE_SECONDS", 0.0)
    checked("tiny", [], SMALL)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("training without sharding: ")]
    assert [line.rpartition(": ")[2] for line in said] == [f"{100 * done // 6} %" for done in range(1, 7)]


def test_the_unsharded_run_has_the_whole_schedule():
    sets = ["train.steps=3", "optimizer.schedule=wsd", "optimizer.decay=3", "optimizer.min_lr=0"]
    for more in ([], ["optimizer.warmup=3", "optimizer.warmup_shape=log"]):
        results = checked("tiny", [Row(0)], [*SMALL, *sets, *more])[1]
        assert results[0]["verdict"] in ("identical", "equal"), results


def test_what_sharding_changes_is_found_and_named():

    sources = [f"check_models:{name}" for name in ("Sound", "ByRank", "Stateful", "Refusing")]
    rows = [Row(0), Row(3, "cpu", "cpu", recompute=True)]
    found = run_ranks(2, checked_many, sources, rows, ["train.seq=16", "train.batch=2", "train.clip=0"])[0]
    _, sound = found["check_models:Sound"]
    assert [result["verdict"] for result in sound] == ["equal", "equal"], sound
    for name in ("ByRank", "Stateful"):
        for result in found[f"check_models:{name}"][1]:
            assert result["verdict"] == "differs"
            assert result["first"]["name"] == "right.weight", result  # left's numbers are right
            assert "loss of step 1" in result["message"]
    _, refusing = found["check_models:Refusing"]
    assert [(r["verdict"], r["message"]) for r in refusing] == [("error", "ArithmeticError: no engine, please")] * 2


def test_an_optimizer_that_torch_has_not_is_compared_with_the_engine_on_one_rank():
    sets = [*SMALL, "train.clip=0"]  # ranks add up the norm in another order
    about, results = run_ranks(2, checked_without_torchs_optimizer, "tiny", [Row(2)], sets)[0]
    assert about["reference"] == "the engine on one rank" and "has no" in about["note"]
    # The same sums, in the same order; kernels of an ARM core round apart (torch 2.13).
    verdicts = ["identical"] if platform.machine() == "x86_64" else ["identical", "equal"]
    assert [result["verdict"] in verdicts for result in results] == [True], results


def checked_without_torchs_optimizer(*args: Any) -> tuple[dict, list[dict]]:
    from zerocli.check import plain

    def none_such(name: str) -> None:
        raise plain.NotPlain(f"torch.optim has no {name}")

    plain.optimizer_class = none_such  # type: ignore[assignment]  # in this rank's own process
    return checked(*args)


def outcome(**changes: float) -> Outcome:
    values = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}
    for name, by in changes.items():
        values[name] = values[name] * (1 + by)
    return Outcome([1.0, 1.0], [3.0, 3.0], values)


def test_a_tensor_may_differ_by_what_rounding_changes_in_it_and_no_more():
    noise = differences(outcome(b=1e-3), outcome())
    tolerance = Tolerance(6e-8, noise)
    assert tolerance.first_over(differences(outcome(b=FACTOR * 0.9e-3), outcome()), FACTOR) is None
    gap, allowed = tolerance.first_over(differences(outcome(b=FACTOR * 1.1e-3), outcome()), FACTOR)
    assert gap.name == "b" and allowed == pytest.approx(FACTOR * 1e-3, rel=1e-3)
    gap, _ = tolerance.first_over(differences(outcome(a=1e-3), outcome()), FACTOR)  # rounding leaves this one alone
    assert gap.name == "a"
    for wrong in (outcome(a=float("nan")), outcome(a=float("inf"))):
        assert tolerance.first_over(differences(wrong, outcome()), FACTOR)[0].name == "a"
    late = Outcome([1.0, float("nan")], [3.0, 3.0], outcome().parameters)
    assert tolerance.first_step(differences(late, outcome()), FACTOR)[:2] == ("loss", 2)


def test_a_refusal_is_no_wrong_number_and_no_proof_either():
    equal, refused, differs = ({"verdict": word} for word in ("equal", "refused", "differs"))
    assert table.ok({0: equal, 1: refused}) and not table.ok({0: refused}) and not table.ok({0: equal, 1: differs})


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{SUPPORT}{os.pathsep}{os.environ.get('PYTHONPATH', SUPPORT.parents[1])}"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CXX": "no-such-compiler", "PATH": ""}
    command = [sys.executable, "-m", "zerocli", "check", *words]
    return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_a_wrong_factory_is_exit_1_with_one_document(tmp_path):
    words = [
        "check_models:ByRank",
        "--stage",
        "1",
        "--offload",
        "none",
        "--seq",
        "16",
        "--set",
        "train.clip=0",
        "--json",
    ]
    done = run(tmp_path, *words)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema"], document["ok"], document["steps"]) == (1, False, 3)
    row = document["rows"][0]
    assert (row["stage"], row["offload"], row["recompute"], row["verdict"]) == (1, "", False, "differs")
    assert row["first"]["name"] == "right.weight" and row["grad_norm"] > 1e-5
    assert "first to differ: right.weight" in done.stderr and "FAILED: 0 of 2" in done.stderr
    assert max(len(line) for line in done.stderr.splitlines() if "error" not in line) <= 80
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_a_row_that_ends_its_ranks_is_an_error_and_new_ranks_go_on(tmp_path, monkeypatch, capsys):
    started = []

    class FakeJob:
        signals = ()

        def __init__(self, command: list[str], num_ranks: int, folder: Path) -> None:
            self.folder, self.todo = folder, Checklist.from_dict(json.loads((folder / check.CHECKLIST).read_text()))

        def run(self) -> int:
            started.append(self.todo.first)
            check._keep(self.folder, {"reference": "plain torch"})
            for row in range(self.todo.first, len(self.todo.rows)):
                if row == 1:
                    return 1
                check._keep(self.folder, {"row": row, "verdict": "equal"})
            return 0

        failure = staticmethod(lambda: "rank 1 was killed")

    monkeypatch.setattr(check, "Job", FakeJob)
    checklist = Checklist((Row(0), Row(1), Row(2)), 3)
    assert check._launch(checklist, tmp_path, 2, ["check"], False) is None
    assert started == [0, 2]
    results = check._results(tmp_path)
    assert [results[i]["verdict"] for i in range(3)] == ["equal", "error", "equal"]
    assert results[1]["message"] == "rank 1 was killed" and "ERROR" in capsys.readouterr().out


def test_a_norm_on_a_cpu_keeps_its_digits_in_a_long_bucket():
    piece = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(piece.double())
    assert abs(_norm(piece).double() - exact) < 1e-6 * exact
    assert abs(torch.linalg.vector_norm(piece).double() - exact) > 1e-5 * exact  # torch's own does not


@pytest.fixture
def small_machine(monkeypatch):
    monkeypatch.setattr(check.machine, "gpus", lambda: [])
    monkeypatch.setattr(check.machine, "memory", lambda: SimpleNamespace(available=2**30))
    for name in ("RANK", "ZEROCLI_PARENT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["gpt2-xl"], 3, "too large to be trained without sharding here: host memory"),
        (["tiny", "--offload", "params=tape"], 2, "there is no tier 'tape'"),
        (["tiny", "--stage", "4"], 2, "--stage"),
        (["tiny", "--tp", "2", "--ranks", "2", "--set", "model.dropout=0.1"], 2, "model.dropout=0"),
        (["tiny", "--nvme-path", "/no/such/folder"], 2, "there is no such folder"),
    ],
)
def test_what_cannot_be_checked_is_said_before_anything_starts(words, code, said, small_machine, monkeypatch, capsys):
    monkeypatch.setattr(check, "_launch", lambda *_: pytest.fail("ranks were started"))
    assert cli.run(["check", *words]) == code
    assert said in capsys.readouterr().err


ONE_ROW = {"stages": (1,), "offload": ("",), "lr": 0.05}


def test_a_loop_and_an_optimizer_of_ones_own_are_certified():
    report = zerocli.check(
        check_loops.make, check_loops.train, functools.partial(check_loops.Rule, lr=0.1), stages=(0, 3)
    )
    assert report.ok, report
    assert [(row.stage, row.offload) for row in report.rows] == [(0, ""), (3, ""), (3, "cpu")]
    assert report.compared > 240 and "ok: 3 of 3 equal plain torch" in str(report)


@pytest.mark.parametrize(
    ("loop", "verdict", "said"),
    [
        (check_loops.otherwise, "differs", r"first to differ: losses of rank 0 \(number 1: .* instead of"),
        (check_loops.refused, "refused", "not like this: do that instead"),
        (check_loops.broken, "error", "rank 1: ArithmeticError: on this rank only"),
        pytest.param(check_loops.stuck, "hung", "1 did not finish within 4 s", marks=pytest.mark.long),
    ],
    ids=["differs", "refused", "error", "hung"],
)
def test_a_loop_that_is_not_certified_says_why(loop, verdict, said):
    report = zerocli.check(check_loops.make, loop, **ONE_ROW, seconds=4 if verdict == "hung" else 600)
    (row,) = report.rows
    assert row.verdict == verdict and re.search(said, row.message), row
    assert not report.ok and row.verdict.upper() in str(report) and "FAILED: 0 of 1" in str(report)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loop": lambda engine: None}, "loop cannot be sent to the ranks"),
        ({"optimizer": lambda params: None}, "optimizer cannot be sent to the ranks"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "made for the parameters of another model"),
        ({"precision": "bf16"}, "compares in fp32"),
        ({"groups": ()}, "no groups="),
        ({"loop": check_loops.wrong}, "the loop fails in plain torch: RuntimeError"),
        ({"loop": check_loops.idle}, "made no step and yielded nothing"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_what_a_check_of_a_loop_cannot_do_is_one_sentence(change, said):
    with pytest.raises(UserError, match=said):
        zerocli.check(**{"make_model": check_loops.make, "loop": check_loops.train} | ONE_ROW | change)


def test_a_program_that_ranks_cannot_read_again_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(UserError, match="this program is <stdin>"):
        zerocli.check(check_loops.make, check_loops.train, **ONE_ROW)


def test_a_loop_is_checked_from_the_command_line(capsys):
    words = ["check_loops:make", "--stage", "3", "--offload", "none", "--json", "--loop"]
    assert cli.run(["check", *words, "check_loops:train", "--optimizer", "check_loops:Rule"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["ok"], document["loop"]) == (1, True, "train")
    assert document["rows"][0]["verdict"] in ("identical", "equal")
    assert cli.run(["check", *words, "check_loops:refused"]) == 1
    assert "REFUSED" in capsys.readouterr().err
    assert cli.run(["check", *words, "check_loops:nothing"]) == 2
    assert cli.run(["check", *words, "check_loops:train", "--steps", "4"]) == 2
    assert "--steps has no meaning with --loop" in capsys.readouterr().err


def test_the_flags_of_check_are_these():
    options = [name for param in check.command.params if isinstance(param, click.Option) for name in param.opts]
    assert sorted(options) == sorted(
        "--stage --offload --nvme-path --ranks --tp --steps --batch --seq --precision --lora --base --data --seed "
        "--set --all --json --loop --optimizer --shard-ranks".split()
    )
