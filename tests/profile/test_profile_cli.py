"""`zerocli profile` as a person runs it: its documents and files, finished runs, and folders that are none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from profiled import CELLAR, SMALL, profile, rows
from runs import as_rank_0

from tiers import registry
from zerocli.cli import main as cli
from zerocli.cli import train
from zerocli.profile import page
from zerocli.run.processes import launch

SETS = [word for text in SMALL for word in ("--set", text)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs that recorded themselves: one profiled, one merely trained."""
    folder = tmp_path_factory.mktemp("runs")
    profile(folder / "profiled", "zero.stage=3", "offload.placement=cpu")
    profile(folder / "trained", "zero.stage=2", plain=True)
    for run in ("profiled", "trained"):
        assert (folder / run / "metrics.jsonl").is_file()
    return folder


def test_profile_gives_what_the_contract_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("where the bytes lie and where the seconds go\n" * 200)
    files = ["--html", "page.html", "--trace-file", "trace.json", "--snapshot", "none.pickle"]
    words = ["profile", "tiny", *SETS, "--data", "text.txt", "--stage", "3", "--json", *files, "--run-dir", "run"]
    started = []  # as ranks are started is the test of `train`
    monkeypatch.setattr(launch, "launch", lambda config, options, command, **_: started.append(command) or 0)
    assert cli.run([*words, "--ranks", "1"]) == 0
    code, out, said = as_rank_0(tmp_path, *started)
    assert code == 0, said
    document = json.loads(out)
    assert document["schema"] == 1 and document["ranks"] == 1
    for row in document["rows"]:
        assert row.keys() >= {"category", "tier", "predicted", "measured"}
    assert document["peak"].keys() == {"hbm", "dram", "nvme"}
    assert all(peak.keys() >= {"predicted", "measured"} for peak in document["peak"].values())
    assert all(isinstance(document["step"][key], float) for key in ("seconds", "compute", "wait"))
    assert "no GPU, so no snapshot" in said and not (tmp_path / "none.pickle").exists()
    assert "blocks.0 activations" in (tmp_path / "page.html").read_text()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert any(event["name"] == "backward blocks.1" and event["dur"] > 0 for event in events)
    recorded = json.loads((tmp_path / "run/profile.json").read_text())
    assert {key: value for key, value in recorded.items() if key != "timeline"} == document


def test_evaluations_of_a_configuration_are_no_part_of_a_profiled_step(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(launch, "launch", lambda config, *others, **_: seen.append(config) or 0)
    monkeypatch.setattr(train, "refuse_no_run", lambda *_: None)
    own = tmp_path / "own.toml"
    own.write_text("[train]\neval_every = 1\npatience = 2\nsample_every = 3\n[checkpoint]\nbest = true\n")
    words = ["profile", str(own), "--run-dir", str(tmp_path / "run")]
    for more in ([], ["--eval-every", "2"], ["--set", "train.patience=2"], ["--resume"]):
        assert cli.run([*words, *more]) == 0
    done = [(each.train.eval_every, each.train.patience, each.train.sample_every) for each in seen]
    best = [each.checkpoint.best for each in seen]
    assert done == [(0, 0, 0), (2, 2, 3), (1, 2, 3), (1, 2, 3)] and best == [False, True, True, True]


def test_a_dry_run_shows_the_plan_and_runs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["profile", "tiny", "--stage", "3", "--offload", "cpu", "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["peak"]["dram"]["predicted"] > 0 and document["peak"]["hbm"]["measured"] is None
    assert os.listdir(tmp_path) == []


def test_a_finished_run_shows_what_it_recorded(runs, capsys):
    assert cli.run(["profile", str(runs / "profiled"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    recorded = json.loads((runs / "profiled/profile.json").read_text())
    assert document == {key: value for key, value in recorded.items() if key != "timeline"}
    assert cli.run(["profile", str(runs / "profiled")]) == 0
    shown = capsys.readouterr().out
    for words in ("predicted", "optimizer states", "unattributed", "peak of dram", "compute", "tokens/s", "overlap"):
        assert words in shown
    assert cli.run(["profile", str(runs / "trained")]) == 0
    shown = capsys.readouterr().out
    assert "activations are not in these rows, nor in the peak" in shown and "optimizer states" in shown


def test_two_runs_are_compared(runs, tmp_path, capsys):
    both = [str(runs / "trained"), str(runs / "profiled")]
    assert cli.run(["profile", *both, "--html", str(tmp_path / "both.html")]) == 0
    shown = capsys.readouterr().out
    assert "change" in shown and "dram" in shown and "step seconds" in shown
    assert cli.run(["profile", *both, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["runs"]) == both and document["schema"] == 1


@pytest.fixture(scope="module")
def cellar(tmp_path_factory):
    """A run with optimizer states on a tier of another package."""
    folder = tmp_path_factory.mktemp("runs") / "cellar"
    return folder, profile(folder, "zero.stage=3", "offload.placement=optimizer=cellar", "train.precision=fp32")


def test_a_tier_of_another_package_is_shown_with_what_it_holds(cellar, runs, tmp_path, capsys):
    folder, document = cellar
    held = rows(document, "cellar")
    states = [row for row in document["rows"] if (row["tier"], row["category"]) == ("cellar", "optimizer_states")]
    assert held["optimizer_states"] == states[0]["predicted"] > 0
    assert "optimizer_states" not in rows(document, "hbm")
    peak = document["peak"]["cellar"]
    assert sum(held.values()) == peak["measured"] >= held["optimizer_states"] and peak["predicted"] > 0
    assert peak["holders"][0]["category"] == "optimizer_states"
    assert document["timeline"]["memory"]["cellar"]["bytes"]["optimizer_states"][0] * 2 == held["optimizer_states"]
    assert cli.run(["profile", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("cellar (per node)")
    assert lines[at + 1].split()[:2] == ["optimizer", "states"] and any(x.startswith("peak of cellar: ") for x in lines)
    assert cli.run(["profile", str(runs / "trained"), str(folder), "--html", str(tmp_path / "both.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("cellar (per node)") + 1].split()[:4] == ["optimizer", "states", "0", "B"]


def test_a_dry_run_shows_a_tier_of_another_package(monkeypatch, capsys):
    monkeypatch.setattr(registry, "_paths", dict(registry._paths))
    registry.register(*CELLAR)
    command = ["profile", "tiny", "--stage", "3", "--offload", "optimizer=cellar", "--dry-run"]
    assert cli.run([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    needed = sum(row["predicted"] for row in document["rows"] if row["tier"] == "cellar")
    assert document["peak"]["cellar"]["predicted"] == needed > 0
    assert cli.run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("cellar (per node)") + 1].split()[:2] == ["optimizer", "states"]


def copy(runs: Path, tmp_path: Path, name: str = "profiled") -> Path:
    return Path(shutil.copytree(runs / name, tmp_path / "run"))


def test_a_torn_last_line_is_read_up_to_and_said(runs, tmp_path, capsys):
    run = copy(runs, tmp_path)
    (run / "profile.json").unlink()  # killed: it closed no books
    whole = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(whole[:-20])
    assert cli.run(["profile", str(run), "--json"]) == 0
    shown = capsys.readouterr()
    assert "line, 6, is incomplete and was ignored" in shown.err
    document = json.loads(shown.out)
    seconds = [json.loads(line)["seconds"] for line in whole.splitlines()[1:5]]
    assert document["step"]["seconds"] == pytest.approx(sum(seconds) / 4)
    assert document["peak"]["dram"]["measured"] > 0


def _newer(run: Path) -> None:
    (run / "profile.json").write_text(json.dumps({"schema": 2}))


def _torn_inside(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:30], *lines[2:]]) + "\n")


def _unlike(run: Path) -> None:
    (run / "profile.json").write_text("[1, 2]")


def _half(run: Path) -> None:
    (run / "profile.json").write_text(json.dumps({"schema": 1, "rows": {}}))


def _no_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def _no_steps(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


def _emptied(run: Path) -> None:
    shutil.rmtree(run)
    run.mkdir()


@pytest.mark.parametrize(
    "spoil, words",
    [
        (_newer, "of a newer version: schema 2, and this program reads up to 1"),
        (_torn_inside, "line 2: not what zerocli writes"),
        (_unlike, "it holds no table"),
        (_half, "is not what zerocli writes: there is no config"),
        (_no_metrics, "is not a run folder: it has no metrics.jsonl"),
        (_no_steps, "has not finished a step"),
        (_emptied, "is empty: no run was ever here"),
    ],
)
def test_a_folder_that_is_no_run_says_what_is_wrong(runs, tmp_path, capsys, spoil, words):
    run = copy(runs, tmp_path)
    spoil(run)
    assert cli.run(["profile", str(run)]) == 2
    shown = capsys.readouterr()
    assert words in shown.err and "try:" in shown.err and "Traceback" not in shown.err and not shown.out


def test_mistakes_of_the_command_line_are_told(runs, tmp_path, capsys):
    run = str(runs / "trained")
    for arguments, words in {
        (run, str(tmp_path / "nowhere")): "there is no such folder",
        ("tiny", "--html", str(tmp_path / "no/such/page.html")): "no file can be written there",
        (run, "--trace-file", str(tmp_path / "t.json")): "recorded no timeline",
        (run, "--snapshot", str(tmp_path / "s.pickle")): "--snapshot is of a live run",
    }.items():
        assert cli.run(["profile", *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_reader_that_has_had_enough_ends_no_rank():
    """As `| head` does: stdout is closed under a rank that still has to meet the others."""
    program = "from zerocli.console import show; show('x' * 10**6); import sys; print('met', file=sys.stderr)"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, timeout=300)
    finally:
        os.close(writer)
    assert done.returncode == 0 and done.stderr.decode().endswith("met\n")


# -- the page, in a browser --------------------------------------------------------------------------------------------

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def browse(folder: Path, address: str) -> subprocess.CompletedProcess:
    """Open an address in a headless Chromium; its document goes to stdout, its console to stderr."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--window-size=1200,1600",
        f"--user-data-dir={folder / 'browser'}",
        "--dump-dom",
        address,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def look(target: Path, extra: str = "") -> dict:
    """Open the page, let it try itself, and return what it found."""
    done = browse(target.parent, f"{target.as_uri()}#selftest{extra}")
    assert 'id="selftest"' in done.stdout, done.stderr[-2000:]
    text = done.stdout.partition('<pre id="selftest">')[2].partition("</pre>")[0]
    assert "CONSOLE" not in done.stderr, done.stderr[-2000:]
    return json.loads(text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def slow_optimizer(timeline: dict) -> None:
    """Change a timeline as if its longest span of the optimizer had taken nine tenths of the step."""
    span = timeline["seconds"]
    optimizers = [(start, end) for phase, _, start, end in timeline["compute"] if phase == "optimizer"]
    first, last = max(optimizers, key=lambda each: each[1] - each[0])

    def at(moment: float) -> float:
        return float(numpy.interp(moment, [0, first, last, span], [0, 0.05 * span, 0.95 * span, span]))

    for row in timeline["compute"]:
        row[2:4] = map(at, row[2:4])
    for row in timeline["spans"]:
        row[2:4] = map(at, row[2:4])
    for memory in timeline["memory"].values():
        memory["times"] = [at(moment) for moment in memory["times"]]
    for row in timeline["lives"]:
        row[3:5] = [moment if moment is None else at(moment) for moment in row[3:5]]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_renders_names_what_is_pointed_at_and_stays_light(runs, tmp_path):
    plain = tmp_path / "plain.html"
    plain.write_text("<p>here</p>")
    if "here" not in (tried := browse(tmp_path, plain.as_uri())).stdout:
        pytest.skip(f"Chromium shows no page at all here: {tried.stderr[-300:]}")
    document = json.loads((runs / "profiled/profile.json").read_text())
    trained = json.loads((runs / "trained/profile.json").read_text())
    target = tmp_path / "page.html"
    name = "<img src=x onerror=console.error(1)>"  # a module may be called so; then it is shown, and not run
    document["timeline"]["lives"][0] = [name, "activations", 2**40, 0.0, None, "mm 2x2"]
    slow_optimizer(document["timeline"])  # what the page shows must not depend on how fast this machine is
    page.write(str(target), [(name, document), ("b", trained)])
    found = look(target, "=100000")
    assert name in found["hover"][0]
    assert found["faults"] == [] and found["timelines"] == 1
    assert "blocks.0 activations (" in found["hover"][0] and "tensors, the largest " in found["hover"][0]
    assert any(text.startswith("compute: optimizer") for text in found["lanes"])  # its longest span
    assert any(text.startswith("reduce: ") for text in found["lanes"])
    assert 0.05 < found["painted"][0] < 1 and found["zoomed"]
    assert found["dragged"] == pytest.approx(0.3)  # by half of what was in view, from 0.4
    shown = [pytest.approx(view) for view in ([0, 1], [0.25, 0.75], [0.35, 0.85], [0, 1], [0, 1])]
    assert found["keys"] == shown  # all, zoomed in, moved right, zoomed out again, all
    # What is drawn is bounded by pixels, not by the 100,000 spans that were added.
    assert max(found["rects"]) <= found["width"] * (found["num_lanes"] + 9)
