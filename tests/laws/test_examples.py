"""The examples run, and the tier from another package keeps the laws of tiers and changes no number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toys import train_uneven

from tiers import registry
from tiers.conformance import TierConformance

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES / "shelf_tier"))

from shelf_tier import ShelfTier  # noqa: E402


class TestShelfTier(TierConformance):
    def make_tier(self, tmp_path, capacity):
        return ShelfTier(capacity=capacity)


def test_a_tier_from_another_package_changes_no_number(monkeypatch):
    monkeypatch.setitem(registry._paths, "shelf", "shelf_tier:ShelfTier")
    plain = train_uneven(steps=5, stage=3)
    assert train_uneven(steps=5, stage=3, offload="params=shelf,optimizer=shelf") == plain


@pytest.mark.parametrize("command", [
    pytest.param([sys.executable, str(EXAMPLES / "own_loop.py")], marks=pytest.mark.long, id="alone"),
    pytest.param([sys.executable, str(EXAMPLES / "averaged_weights.py")], marks=pytest.mark.long, id="average"),
    pytest.param(["torchrun", "own_loop.py"], marks=pytest.mark.long, id="torchrun"),
    pytest.param(["torchrun", "encoder_decoder.py"], marks=pytest.mark.long, id="encoder-decoder"),
    pytest.param(["torchrun", "vision.py"], marks=pytest.mark.long, id="vision"),
])  # fmt: skip
def test_the_examples_run(command):
    if command[1] in ("encoder_decoder.py", "vision.py"):
        pytest.importorskip("transformers", reason="transformers is an optional extra")
    if command[0] == "torchrun":
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*start, str(EXAMPLES / command[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "loss" in done.stdout
    if "averaged" not in command[-1]:
        losses = [float(line.split()[-1]) for line in done.stdout.splitlines()]
        assert len(losses) == 4 and losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.parametrize("factory, seq", [("encoder_decoder:make", "16")])
def test_models_that_are_not_causal_train_by_a_factory(tmp_path, factory, seq):
    pytest.importorskip("transformers", reason="transformers is an optional extra")
    flags = ["--steps", "3", "--batch", "2", "--seq", seq, "--stage", "3", "--ranks", "2", "--check", "3"]
    run = [sys.executable, "-m", "zerocli", "train", factory, *flags, "--run-dir", str(tmp_path / "run"), "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["check"]["equal"]
