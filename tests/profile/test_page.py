"""The profile's page: what it says without scripts, colours by meaning, coordinates in range, runs compared."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from profiled import profile

from zerocli.cli import main as cli
from zerocli.profile import charts, colours, page, sheets
from zerocli.profile.charts import Bar, bars

VOID = {"meta", "br", "input", "link", "img"}


class Page(HTMLParser):
    """Reads a page as a browser without scripts does: its text, its shapes, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.shapes: list[tuple[str, dict[str, str]]] = []
        self.boxes: list[list[float]] = []
        self.feed(text)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        about = {name: value or "" for name, value in attrs}
        if tag == "svg":
            self.boxes.append([float(each) for each in about["viewbox"].split()])
        if tag in ("rect", "line", "text"):
            self.shapes.append((tag, about | {"box": json.dumps(self.boxes[-1])}))
        assert not any(value.startswith(("http", "//")) for value in about.values()), "needs the network"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("page")
    profile(found / "one", "zero.stage=3", "offload.placement=cpu")
    return found


@pytest.fixture(scope="module")
def document(folder) -> dict[str, Any]:
    return json.loads((folder / "one/profile.json").read_text())


def wide(document: dict[str, Any]) -> dict[str, Any]:
    """The document as if of eight ranks, of which one is slow, on a device that is nearly full, with nvme in use."""
    found = copy.deepcopy(document)
    first = found["everyone"][0]
    found["everyone"] = [
        first | {"rank": rank, "node": f"n{rank // 4}", "compute": 1.0 + (rank == 5) * 0.3, "wait": 0.2, "seconds": 1.5}
        for rank in range(8)
    ]
    found["capacity"]["hbm"] = found["peak"]["hbm"]["measured"] * 5 // 4
    found["peak"]["nvme"] |= {
        "measured": 4096,
        "holders": [{"name": "blocks.1 <b>", "category": "gradients", "bytes": 4096}],
    }
    found["rows"].append({"category": "gradients", "tier": "nvme", "predicted": 4096, "measured": 4096})
    found["made"]["command"] = "zerocli profile tiny --stage 3 </script>"
    return found


def test_a_profile_records_its_ranks_units_machine_and_versions(document):
    assert [each["rank"] for each in document["everyone"]] == [0, 1]
    for each in document["everyone"]:
        assert each["compute"] > 0 and each["wait"] > 0 and each["hbm"] > 0
        assert each["seconds"] == pytest.approx(each["compute"] + each["wait"])
    units = {each["unit"]: each for each in document["units"]}
    assert {"the rest", "blocks.0", "blocks.1", "blocks.2"} <= units.keys()
    assert sum(each["parameters"] for each in document["units"]) == document["parameters"]
    assert all(each["forward"] > 0 and each["backward"] > 0 for each in units.values())
    held = sum(each["held"].get("dram", 0) for each in document["units"])
    offloaded = sum(row["measured"] for row in document["rows"] if row["tier"] == "dram")
    assert 0 < 2 * held <= offloaded  # both ranks' pieces are in the node's rows, with the tiers' own buffers
    activations = [row["measured"] for row in document["rows"] if row["category"] == "activations"]
    assert 0 < sum(each["activations"] for each in document["units"]) <= activations[0]
    assert document["capacity"]["hbm"] * 2 <= document["capacity"]["dram"] and document["made"]["versions"]["torch"]


def test_the_page_says_everything_but_the_timeline_without_scripts(document):
    text = page.render([("run", wide(document))])
    assert len(text) < 400_000
    shown = Page(text).text
    for words in (
        "zerocli profile tiny --stage 3 </script>",
        document["made"]["date"],
        f"torch {document['made']['versions']['torch']}",
        "capacity",
        "largest holders of dram",
        "largest holders of nvme",
        "blocks.1 <b>",
        "rank 5 computes 30% longer than the median",
        "straggler",
        "most of compute",
        "held on dram",
        "optimizer states",
        "wait",
    ):
        assert words in shown, words
    for unit in document["units"]:
        assert unit["unit"] in shown


def test_all_shapes_are_within_their_drawing(document):
    found = Page(page.render([("a", wide(document)), ("b" * 60, document)]))
    assert len(found.shapes) > 40
    for tag, about in found.shapes:
        _, _, width, height = json.loads(about["box"])
        xs = [float(about[name]) for name in ("x", "x1", "x2") if name in about]
        ys = [float(about[name]) for name in ("y", "y1", "y2") if name in about]
        if tag == "rect":
            xs.append(xs[0] + float(about["width"]))
            ys.append(ys[0] + float(about["height"]))
        assert min(xs) >= 0 and max(xs) <= width and min(ys) >= 0 and max(ys) <= height, about


def test_a_colour_has_one_meaning_in_every_chart_and_run(document):
    """A name has one colour on the whole page; names that share one are of one thing, as forward and activations."""
    text = page.render([("a", wide(document)), ("b", document)])
    colour_of: dict[str, set[str]] = {}
    for colour, name in re.findall(r'fill="(#\w+)"><title>([a-z ]+):', text):
        colour_of.setdefault(name, set()).add(colour)
    for colour, name in re.findall(r'class="chip" style="background:(#\w+)"></i>([a-z ]+)<', text):
        colour_of.setdefault(name, set()).add(colour)
    assert {"parameters", "optimizer states", "compute", "collectives"} <= colour_of.keys()
    assert all(len(found) == 1 for found in colour_of.values()), colour_of
    for name, colour in colours.CATEGORIES.items():
        assert colour_of.get(name.replace("_", " "), {colour}) == {colour}
    assert len(set(colours.CATEGORIES.values())) == len(colours.CATEGORIES)
    script = text.partition("<script>")[2]
    for table in (colours.CATEGORIES, colours.PHASES, colours.LANES):  # the timeline has the same ones
        assert json.dumps(table) in script


def test_the_capacity_is_drawn_to_scale_or_written():
    rows = [Bar("a", {"parameters": 50.0})]
    near = bars(rows, {}, str, capacity=100)
    x = float(re.search(r'<line class="capacity" x1="([\d.]+)"', near)[1])
    end = float(re.search(r'<rect x="[\d.]+" y="\d+" width="([\d.]+)"', near)[1])
    assert x - charts.LABEL == pytest.approx(2 * end, rel=1e-3)
    far = bars(rows, {}, str, capacity=100_000)
    assert "<line" not in far and "capacity 100000, beyond this scale" in far


def test_stragglers_are_those_that_compute_longer():
    ranks = [{"rank": rank, "compute": 1.0 + rank * 0.01} for rank in range(4)]
    assert sheets.stragglers(ranks) == []
    assert [
        rank for rank, _ in sheets.stragglers([*ranks, {"rank": 4, "compute": 2.0}, {"rank": 5, "compute": 3.0}])
    ] == [5, 4]
    assert sheets.stragglers([{"rank": 0, "compute": None}]) == []


def test_a_run_is_compared_with_what_json_wrote(folder, document, tmp_path, capsys):
    run, saved, html = str(folder / "one"), tmp_path / "saved.json", tmp_path / "both.html"
    assert cli.run(["profile", run, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    before["settings"]["zero"]["stage"] = 2
    before["step"]["seconds"] = document["step"]["seconds"] * 2
    saved.write_text(json.dumps(before))
    assert cli.run(["profile", run, "--compare", str(saved), "--html", str(html)]) == 0
    assert re.search(r"step seconds .* -50\.0%", capsys.readouterr().out)
    shown = Page(html.read_text()).text
    assert "compared" in shown and "settings that differ" in shown and "zero.stage 2 3" in shown and "-50.0%" in shown
    for bad, words in (
        (str(tmp_path / "typo.json"), "there is no such file or folder"),
        (str(tmp_path / "typo"), "there is no such folder"),
    ):
        assert cli.run(["profile", run, "--compare", bad]) == 2
        assert words in capsys.readouterr().err
    saved.write_text(json.dumps({"schema": 1, "runs": {}}))
    assert cli.run(["profile", run, "--compare", str(saved)]) == 2
    assert "holds two profiles" in capsys.readouterr().err
    assert cli.run(["profile", run, run, "--compare", str(saved)]) == 2
    assert "are compared already" in capsys.readouterr().err


def test_a_dry_run_of_profile_chooses_as_train_does(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["tiny", "--auto", "--stage", "3", "--offload", "cpu", "--ranks", "2", "--dry-run"]
    said = []
    for command in ("profile", "train"):
        assert cli.run([command, *words]) == 0
        said.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("auto: ")])
    assert said[0] and said[0] == said[1]
