"""The fault campaign's own tests: a small, fixed part of it, and that it finds what it looks for.

`python benchmarks/torture.py --minutes M --seed S` is the campaign itself; ZEROCLI_TEST_LONG=1 runs some minutes of it.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from torture import damage, leftovers, loading, soak  # noqa: E402
from torture.cases import Campaign, Numbers  # noqa: E402
from torture.inside import Inside, make_fixtures  # noqa: E402
from torture.tally import Result, Tally  # noqa: E402

from zerocli.checkpoint import Folder, Resumed, load  # noqa: E402


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory) -> list[loading.Fixture]:
    folders = make_fixtures(tmp_path_factory.mktemp("good"), ["llama-1rank", "gpt2-2ranks"])
    return [loading.Fixture.of(folder) for folder in folders]


def test_a_run_killed_in_a_save_resumes_to_the_same_numbers(tmp_path):
    result = Campaign(5, tmp_path, "kill in a save").run(0)
    assert result.struck and result.kills and result.outcome == "resumed" and not result.failed, result.report()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", damage.KINDS)
def test_damage_of_every_kind_is_survived_or_refused(fixtures, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(damage, "KINDS", {kind: damage.KINDS[kind]})
    result = loading.case(kind, random.Random(1), fixtures, tmp_path / "case")
    assert not result.failed, result.report()


@pytest.mark.parametrize("defect", ["number", "silence", "older", "outside", "crash"])
def test_a_resume_with_a_defect_is_found(fixtures, tmp_path, monkeypatch, defect):
    """Such as one that loads another number, or an older checkpoint because the disk failed."""

    def resume(engine, folder, say, judge):
        if defect == "crash":
            raise KeyError("a mistake of ours")
        steps = sorted(Folder(folder).committed(), key=lambda found: found.step)
        path = steps[-2 if defect in ("silence", "older") else -1].path
        load(engine, path)
        if defect == "number":
            engine.updates += 1
        elif defect == "older":
            say("the newest was skipped")
        elif defect == "outside":
            (tmp_path / "case/outside/written").touch()
        return Resumed(int(path.name[5:]), path)

    kind = "file: permission" if defect == "older" else "reading: short"
    monkeypatch.setattr(damage, "KINDS", {kind: damage.KINDS[kind]})
    monkeypatch.setattr(loading, "resume", resume)
    assert loading.case("a case", random.Random(0), fixtures, tmp_path / "case").wrong


def test_other_numbers_leftovers_and_growth_are_found(tmp_path):
    same, other = Numbers({1: ("1.0",)}, {"w": "a"}, {"steps": 1}), Numbers({1: ("1.5",)}, {"w": "a"}, {"steps": 2})
    assert same.differences(same) == [] and len(same.differences(other)) == 2
    for name in ("nvme/.zerocli-swap-1", "tmp/left", "run/config.json.7.part", "run/checkpoints/step-00000001.tmp/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert len(leftovers.files(tmp_path, 1, 2, finished=False)) == 2
    assert len(leftovers.files(tmp_path, 1, 2, finished=True)) == 5
    rows = soak.growth([(float(t), dict.fromkeys(soak.ALLOWED, 5.0) | {"threads": 5.0 + t // 10}) for t in range(40)])
    assert [name for name, row in rows.items() if row["last"] > row["first"]] == ["threads"]


def test_a_tally_fails_for_what_is_wrong_left_or_hangs():
    tally = Tally()
    tally.add(Result("1:run:0", "kill", "", "resumed", True, 1))
    assert not tally.failed and tally.total["resumed"] == 1
    tally.add(Result("1:run:1", "kill", "", "resumed", True, 2, leftovers=["a file"]))
    assert tally.failed and tally.total["kills"] == 3 and tally.total["resumed"] == 1
    assert "--case '1:run:1'" in tally.failures[0].report()


@pytest.mark.long
def test_some_minutes_of_the_campaign(tmp_path):
    tally, campaign = Tally(), Campaign(7, tmp_path)
    with Inside(7, tmp_path) as inside:
        for index in range(24):
            tally.add(campaign.run(index))
            inside.run(20 * index, 20 * index + 20, tally.add)
    assert not tally.failed, "\n".join(result.report() for result in tally.failures)
    assert tally.total["kills"] >= 10 and tally.total["cases"] == 24 * 21
    shutil.rmtree(tmp_path, ignore_errors=True)
