"""Run folders as `zerocli profile RUN` finds them: resumed, killed, or touched by somebody."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from profiled import profile, rows

from zerocli.cli import main as cli
from zerocli.errors import UserError
from zerocli.profile import page, runs, table, trace
from zerocli.profile.ledger import UNATTRIBUTED


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of two profiled steps, with transfers, and small batches: its buffers are most of its memory."""
    found = tmp_path_factory.mktemp("runs") / "run"
    profile(found, "zero.stage=3", "offload.placement=cpu", "train.steps=2", "train.batch=1", "train.seq=7")
    return found


@pytest.fixture
def run(folder, tmp_path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "run"))


@pytest.fixture(scope="module")
def document(folder) -> dict[str, Any]:
    return json.loads((folder / "profile.json").read_text())


def test_the_first_steps_are_whole_too(document):
    """Where all steps are followed they are all there is to time; what went before the first is not in it."""
    step = document["step"]
    assert step["steps"] == 2 and any("every step was followed" in note for note in document["notes"])
    assert step["wait"] + step["compute"] == pytest.approx(step["seconds"], rel=0.02)


def test_a_resumed_run_is_profiled_from_its_first_step_on(tmp_path):
    """What it took to read the checkpoint is no step's, and steps have the run's own numbers."""
    sets = ("zero.stage=2", "model.layers=2", "checkpoint.every=2")
    profile(tmp_path, *sets, "train.steps=2")
    resumed = profile(tmp_path, *sets, "train.steps=4", resume=True)
    step, timeline = resumed["step"], resumed["timeline"]
    assert resumed["steps"] == [3, 4] and timeline["step"] in (3, 4) and timeline["memory_step"] == 4
    assert step["wait"] + step["compute"] == pytest.approx(step["seconds"], rel=0.02)
    assert any("give --steps 5 or more" in note for note in resumed["notes"])  # the run's, as the flag counts them


def test_memory_of_the_collectives_own_is_attributed(document):
    """gloo's copy of what it reduces shows when it is cut into parts; here that is at the peak."""
    found = rows(document, "hbm")
    assert sum(found.values()) == document["peak"]["hbm"]["measured"]
    assert abs(found[UNATTRIBUTED]) <= 0.02 * document["peak"]["hbm"]["measured"]


# -- a trace, as its viewers take it -----------------------------------------------------------------------------------


def test_a_trace_has_threads_on_which_nothing_overlaps(document):
    timeline = copy.deepcopy(document["timeline"])
    timeline["spans"] += [["reduce", "a", 0.0, 2e-3, 1], ["reduce", "b", 1e-3, 3e-3, 1], ["reduce", "c", 2e-3, 4e-3, 1]]
    events = list(trace.events(timeline))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = defaultdict(list)
    for event in events:
        assert event["pid"] > 0  # 0 is the idle process
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and event["tid"] in names
            assert names[event["tid"]].startswith(event["cat"])
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for thread in spans.values():
        assert thread == sorted(thread)
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in zip(thread, thread[1:], strict=False))
    assert sum(map(len, spans.values())) == len(timeline["compute"]) + len(timeline["spans"])
    for tier, memory in timeline["memory"].items():
        counts = [event for event in events if event["ph"] == "C" and event["name"] == tier]
        assert [event["ts"] for event in counts] == sorted(event["ts"] for event in counts)
        totals = [sum(event["args"].values()) for event in counts]
        assert max(totals) == max(map(sum, zip(*memory["bytes"].values(), strict=True)))


# -- runs that went on, and what nobody looked at ----------------------------------------------------------------------


def test_books_that_were_closed_before_the_run_went_on_are_said_to_be_old(run, capsys):
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    with (run / "metrics.jsonl").open("a") as metrics:  # resumed, and killed before it wrote its profile again
        metrics.write(json.dumps(line | {"step": 3}) + "\n" + json.dumps(line | {"step": 4}) + "\n")
    assert cli.run(["profile", str(run)]) == 0
    assert "note: this run went on to step 4 and ended there without writing a profile" in capsys.readouterr().out
    assert "this one is of step 2" in runs.read(str(run))["notes"][-1]
    with (run / "metrics.jsonl").open("a") as metrics:  # a new, shorter run in the same folder
        metrics.write(json.dumps(line | {"step": 1}) + "\n" + json.dumps(line | {"step": 2}) + "\n")
    assert not any("went on" in note for note in runs.read(str(run))["notes"])


def test_of_a_step_that_was_done_again_the_later_line_counts(run):
    (run / "profile.json").unlink()
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    texts = [
        json.dumps(line | {"step": step, "seconds": seconds}) for step, seconds in ((1, 9), (2, 9), (2, 4), (3, 2))
    ]
    (run / "metrics.jsonl").write_text("\n".join(texts) + "\n")
    assert runs.read(str(run))["step"]["seconds"] == (4 + 2) / 2


def test_what_nobody_followed_is_not_shown_as_nothing(document):
    """train measures what the engine holds; activations and logits are predicted, and unmeasured, which is not 0."""
    plain = copy.deepcopy(document) | {"followed": False}
    for row in plain["rows"]:
        if row["category"] in table.UNSEEN:
            row["measured"] = 0
    shown = {line[:24].strip(): line[24:].split() for line in table.render(plain).splitlines() if line.startswith("  ")}
    assert shown["logits"][2:] == ["-", "-"]
    hbm = table.render(plain).partition("dram")[0].splitlines()
    assert [line.split()[-1] for line in hbm if line.startswith("  peak")] == ["-"]  # not all of it was measured
    assert table.error(1000, 1000) == table.error(99_999, 100_000) == "+0.0%"


def test_a_killed_run_shows_what_its_metrics_say_and_no_more(run, document, capsys):
    (run / "profile.json").unlink()
    assert cli.run(["profile", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "unknown device" in shown and "ended before it recorded" in shown and "OS view" not in shown
    assert cli.run(["profile", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == document["parameters"]
    compared = table.compare(found, document, ("killed", "whole")).splitlines()
    assert next(line.split()[1:] for line in compared if line.startswith("  gathered"))[0] == "-"  # not 0 bytes


# -- files that somebody touched ---------------------------------------------------------------------------------------


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place in a JSON value, of each list the first item alone."""
    yield path
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


def changed(value: Any, path: tuple, to: Any) -> Any:
    """The value with another in one place; `...` takes the place away."""
    value = copy.copy(value)
    if len(path) > 1:
        value[path[0]] = changed(value[path[0]], path[1:], to)
    elif to is ...:
        del value[path[0]]
    else:
        value[path[0]] = to
    return value


ODD = (..., None, True, -1, 0, 10**400, float("nan"), float("inf"), "<b>", [], {}, [[]], [None], {"": 0})


OTHER_FILES = ("metrics.jsonl", "config.json")


@pytest.mark.parametrize(
    ("file", "every"),
    [("profile.json", 15), *(pytest.param(f, 1, marks=pytest.mark.long) for f in ("profile.json", *OTHER_FILES))],
)
def test_whatever_stands_in_a_file_the_run_is_shown_or_refused_in_words(run, file, every):
    """No value in any place leads to anything but a report, a page and a trace, or an error that says what is wrong."""
    text = (run / file).read_text()
    whole = json.loads(text.splitlines()[0] if file == "metrics.jsonl" else text)
    if file == "profile.json":
        timeline = whole["timeline"]
        timeline |= {name: timeline[name][:2] for name in ("compute", "spans", "lives")}
        timeline["memory"] = {"dram": timeline["memory"]["dram"]}
        whole["settings"] = {name: whole["settings"][name] for name in ("zero", "offload")}
        whole |= {name: whole[name][:1] for name in ("everyone", "units", "boundaries")}
    else:
        (run / "profile.json").unlink()
    refused = 0
    for path in list(places(whole))[1::every]:
        for to in ODD:
            (run / file).write_text(json.dumps(changed(whole, path, to)) + "\n")
            try:
                found = runs.read(str(run))
            except UserError as error:
                refused += 1
                assert str(run) in str(error) and error.hint and error.exit_code == 2
                continue
            json.dumps(found, allow_nan=False)
            table.render(found)
            table.compare(found, found, ("a", "b"))
            page.render([("a", found)])
            if "timeline" in found:
                list(trace.events(found["timeline"]))
    assert refused > 20


@pytest.mark.parametrize("text", [b"\xff\xfe\x00garbage", b"[" * 100_000, b"", b"9" * 5000])
@pytest.mark.parametrize("file", ["profile.json", "metrics.jsonl", "config.json"])
def test_garbage_is_told(run, capsys, file, text):
    (run / file).write_bytes(text)
    assert cli.run(["profile", str(run), "--json"]) == 2
    shown = capsys.readouterr()
    assert not shown.out and "error: " in shown.err and "try: " in shown.err and "bug" not in shown.err


def test_a_file_that_is_none_is_told(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert cli.run(["profile", str(run), str(tmp_path / "file")]) == 2
    assert "file is not a run: Not a directory" in capsys.readouterr().err
    (run / "profile.json").unlink()
    (run / "profile.json").symlink_to("profile.json")  # a loop
    assert cli.run(["profile", str(run)]) == 2
    assert "profile.json is a link" in capsys.readouterr().err


def test_a_finished_run_is_shown_without_torch(run):
    words = ["profile", str(run)]
    program = f"import sys; from zerocli.cli.main import run; run({words!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300).returncode == 0


def test_a_run_that_is_over_is_not_told_what_to_do(run, tmp_path, capsys):
    for arguments, words in {
        ("--stage", "2", "--set", "train.steps=3"): "--stage --set: ",
        ("--dry-run",): "--dry-run: ",
        (str(run), "--trace-file", str(tmp_path / "t.json")): "--trace-file is of one run, and two are given",
    }.items():
        assert cli.run(["profile", str(run), *arguments]) == 2
        shown = capsys.readouterr()
        assert words in shown.err and "try: " in shown.err and not shown.out
    assert not (tmp_path / "t.json").exists()
