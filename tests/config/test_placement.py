"""Law: one grammar. Every way in reads a placement's text alike, into the same placement or the same words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import CHARACTERS

from offload.placement import ACTIVATIONS, HBM, KINDS, Placement, PlacementError, Share
from tiers import registry
from zerocli.cli import main as cli
from zerocli.cli.fit_question import flags_of
from zerocli.config import from_dict, load, placement_at, read_placement, refuse_placement, to_dict
from zerocli.engine.settings import Settings
from zerocli.errors import UserError
from zerocli.plan.blocks.inputs import read_source
from zerocli.plan.setup import Setup, setup_of

some = settings(max_examples=300 if "ZEROCLI_TEST_LONG" in os.environ else 20, deadline=None)
OTHER = "papertape"


@pytest.fixture(scope="module", autouse=True)
def other_tier():
    """A tier that another package offers; its code is not there, and no reader of a placement asks for it."""
    registry.register(OTHER, "no_such_package.tape:PaperTape")
    yield
    del registry._paths[OTHER]


def spaced(*words: str) -> st.SearchStrategy[str]:
    return st.tuples(*[st.sampled_from(["", "", " ", "  "])] * (len(words) + 1)).map(
        lambda gaps: gaps[0] + "".join(word + gap for word, gap in zip(words, gaps[1:], strict=True))
    )


TIERS = st.sampled_from(["cpu", "cpu", "dram", "nvme", "hbm", "null", OTHER, "tape", "CPU", ""])
BUDGETS = st.sampled_from(["20GiB", "1.5 GB", "7000", "10", "1KiB", "7B", "0", "ten", "-1GiB", "1G", ""])
WORDS = st.sampled_from(["params", "parameters", "grads", "gradients", "optimizer", "optim", ACTIVATIONS, "weights"])
SHARES = st.one_of(TIERS, st.tuples(TIERS, BUDGETS).flatmap(lambda each: spaced(each[0], ":", each[1])))
PARTS = st.tuples(WORDS, st.lists(SHARES, min_size=1, max_size=3)).flatmap(
    lambda each: spaced(each[0], "=", each[1][0], *(word for share in each[1][1:] for word in ("+", share)))
)
TEXTS = st.one_of(
    TIERS.flatmap(spaced),
    st.lists(PARTS, min_size=1, max_size=4).map(",".join),
    st.tuples(TIERS, PARTS).map(" , ".join),
    st.text("cpu=+:, nvme0", max_size=12),
    st.text(CHARACTERS.replace("\0", ""), max_size=6),
)


def outcome(read: Callable[[], Placement]) -> Placement | str:
    """Return the placement, or the words of its refusal."""
    try:
        return read()
    except (ValueError, UserError) as error:
        return str(error)


def flagged(found: Placement | str, text: str) -> Placement | str:
    """Return an outcome as it is told of a flag: the place first, then the same words."""
    return f"--offload {text}: {found}" if isinstance(found, str) else found


@pytest.mark.longer
@some
@given(TEXTS)
def test_every_way_in_reads_a_text_alike(text):
    found = outcome(lambda: read_placement(text))
    assert outcome(lambda: Settings(offload=text).offload) == found  # type: ignore[arg-type]
    assert outcome(lambda: Setup(offload=text).offload) == found  # type: ignore[arg-type]
    given = dict.fromkeys(("batch", "seq", "precision", "lora", "base")) | {"offload": text}
    ways = [
        lambda: load("tiny", flags={"offload.placement": text}).offload.placement,
        lambda: setup_of(read_source("tiny", (), flags_of(given)).config).offload,
        lambda: setup_of(read_source("7B", (), flags_of(given)).config).offload,
        lambda: refuse_placement(text) or read_placement(text),
    ]
    for way in ways:
        assert outcome(way) == flagged(found, text)
    written = outcome(lambda: from_dict({"offload": {"placement": text}}).offload.placement)
    assert written == (f"offload.placement: {found}" if isinstance(found, str) else found)


@pytest.mark.longer
@some
@given(TEXTS, st.integers(0, 3))
def test_engine_plan_and_commands_refuse_a_stage_in_the_same_words(text, stage):
    placement = outcome(lambda: read_placement(text))
    if isinstance(placement, str):
        return
    found = outcome(lambda: placement_at(placement, stage))
    assert outcome(lambda: Setup(stage=stage, offload=placement, ranks=1).placement()) == found
    told = outcome(lambda: refuse_placement(placement, stage) or placement_at(placement, stage))
    assert told == flagged(found, str(placement))
    if isinstance(found, str):
        assert "partition" in found
    else:
        leaving = {kind for kind in KINDS if any(share.tier != HBM for share in found.of(kind))}
        assert leaving <= set(("optimizer", "gradients", "parameters")[:stage])


@pytest.mark.longer
@some
@given(TEXTS)
def test_a_placement_is_written_as_it_is_read(text):
    placement = outcome(lambda: read_placement(text))
    if isinstance(placement, Placement):
        assert read_placement(str(placement)) == placement
        config = load("tiny", flags={"offload.placement": text})
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_spaces_mean_nothing():
    placement = read_placement(" optimizer = hbm : 20 GiB + cpu , activations = cpu ")
    assert placement == Placement({"optimizer": (Share(HBM, 20 << 30), Share("dram")), ACTIVATIONS: (Share("dram"),)})
    assert str(placement) == "optimizer=hbm:20GiB+cpu,activations=cpu"


@pytest.mark.parametrize("budget", ["0", "7B", "1024B", "1000B", "7001", "1KiB", "20GiB", "1.5GiB", "3TB"])
def test_budgets_are_written_exactly(budget):
    placement = read_placement(f"params=cpu:{budget}")
    assert read_placement(str(placement)) == placement


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("optimizer=cpu,activations = cpu", 3),
        ("cpu,activations=cpu", 3),
        ("optimizer=tape", 3),
        ("optimizer=cpu:ten", 3),
        ("optimizer=cpu:10", 3),
        ("optimizer=hbm:1KiB+cpu", 1),
        ("params=cpu", 2),
        ("cpu", 0),
        (f"optimizer={OTHER}", 1),
    ],
)
def test_fit_profile_and_train_answer_alike(text, stage, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["tiny", "--stage", str(stage), "--offload", text]
    told = []
    for command in (["fit", *words], ["train", *words, "--dry-run"], ["profile", *words, "--dry-run"]):
        code = cli.run(command)
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        told.append((code, [line.removeprefix("error: ").removeprefix(f"--offload {text}: ") for line in errors]))
    assert told[0] == told[1] == told[2]
    assert told[0][0] == (2 if told[0][1] else 0)


def test_the_stage_is_checked_where_both_are_known():
    with pytest.raises(AssertionError, match="not resolved"):
        read_placement("cpu").of("parameters")
    assert placement_at(read_placement("nvme"), 2) == Placement(
        {"gradients": (Share("dram"),), "optimizer": (Share("nvme"),)}
    )
    with pytest.raises(PlacementError, match="does not partition parameters"):
        placement_at(read_placement("params=cpu"), 2)


def test_placements_are_read_without_torch():
    modules = "offload.placement, tiers.registry, tiers.limits, zerocli.config, zerocli.plan.setup"
    read = "zerocli.config.read_placement('params=cpu,optimizer=nvme')"
    program = f"import sys, {modules}; {read}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


# -- a tier that another package offers --------------------------------------------------------------------------------


def test_a_plan_counts_another_packages_tier_under_its_own_name(capsys):
    words = ["fit", "gpt2-124m", "--ranks", "2", "--stage", "3", "--offload"]
    documents = {}
    for tier in ("cpu", OTHER):
        assert cli.run([*words, f"optimizer={tier}", "--json"]) == 0
        [documents[tier]] = json.loads(capsys.readouterr().out)["candidates"]
    other, host = documents[OTHER], documents["cpu"]
    states = [row for row in host["rows"] if (row["category"], row["tier"]) == ("optimizer_states", "dram")]
    assert other["tiers"][OTHER] == {"needed": states[0]["bytes"], "available": None} and other["fits"]
    assert [row["tier"] for row in other["rows"] if row["category"] == "optimizer_states" and row["bytes"]] == [OTHER]
    assert set(host["tiers"]) == {"hbm", "dram", "nvme"}
    assert cli.run([*words, f"optimizer={OTHER}", "--explain"]) == 0
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if line.startswith(f"  {OTHER}: ")]
    assert "capacity unknown" in line
    assert any(line.split()[:2] == [OTHER, "optimizer"] for line in out.splitlines())


def test_a_bare_count_and_checkpoints_of_blocks_have_other_tiers_too(capsys):
    assert cli.run(["fit", "7B", "--stage", "3", "--offload", f"optimizer={OTHER}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"][0]["tiers"][OTHER]["needed"] == 12 * 7_000_000_000
    assert cli.run(["fit", "tiny", "--stage", "1", "--offload", f"activations={OTHER}", "--json"]) == 0
    [candidate] = json.loads(capsys.readouterr().out)["candidates"]
    assert candidate["tiers"][OTHER]["needed"] == sum(
        row["bytes"] for row in candidate["rows"] if (row["category"], row["tier"]) == ("activations", OTHER)
    )


def test_no_placement_is_none_too():
    """`shard(model, offload=None)` is without offload."""
    assert read_placement(None) == read_placement("")
