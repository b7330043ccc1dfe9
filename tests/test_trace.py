"""Laws of `--trace`: the real engine without memory agrees with the formulas, and takes models that none knows."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zerocli import cli
from zerocli.config import ModelConfig
from zerocli.errors import UserError
from zerocli.models import build
from zerocli.plan.flats import plan_flats
from zerocli.plan.inputs import shape_of
from zerocli.plan.setup import Setup
from zerocli.plan.step import Replay
from zerocli.plan.trace import run

MODEL = ModelConfig(layers=4, hidden=128, heads=4, vocab=3000)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(
    ("changes", "setup"),
    [
        ({}, {"stage": 0, "ranks": 1}),
        ({"tie": False}, {"stage": 3, "ranks": 1024, "policy": "recompute"}),
        ({"family": "llama", "kv_heads": 2, "tie": False}, {"stage": 3, "ranks": 4096}),
        ({"family": "llama"}, {"stage": 2, "ranks": 64, "precision": "bf16", "policy": "recompute"}),
    ],
)
def test_formula_and_trace_agree(changes, setup):
    model = dataclasses.replace(MODEL, **changes)
    asked = Setup(**({"batch": 4, "seq": 128, "device": "cpu", "precision": "fp32"} | setup))
    traced = run(build(model, 128, "meta"), asked)
    shape = shape_of(model, 128)
    replay = Replay(shape, asked, plan_flats(shape, asked))
    peaks = replay.run()
    resting = sum(storage.nbytes for storage in replay._kept if storage._category != "activations")
    assert peaks.steady.nbytes - resting == pytest.approx(traced, rel=0.02)


class Graph(nn.Module):
    """A graph network: no family's formulas know it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x + x.mean(1, keepdim=True)))
        return F.cross_entropy(x.flatten(0, 1), targets.flatten() % 16)


def test_a_model_that_no_formula_knows_is_traced(capsys):
    words = ["test_trace:Graph", "--ranks", "8", "--stage", "2", "--batch", "4", "--seq", "64", "--precision", "fp32"]
    assert cli.run(["fit", *words, "--trace", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"] == answer["model"] | {"parameters": 50 * 16 + 3 * (16 * 16 + 16), "whole": True}
    rows = {row["category"]: row["bytes"] for row in answer["candidates"][0]["rows"] if row["tier"] == "hbm"}
    kept = 4 * 64 * 16 * 4  # one activation: the input of each layer and each relu's output are kept
    assert 6 * kept <= rows["activations"] <= 20 * kept


def picky() -> nn.Module:
    class Picky(nn.Linear):
        def forward(self, tokens, targets):  # type: ignore[override]
            raise ValueError("wants images")

    return Picky(2, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["test_trace:picky"], "wants images"),
        (["7.5B"], "names none that is built in"),
        (["tiny", "--tp", "2"], "takes no --tp"),
        (["tiny", "--ranks", "8192"], "at most 4096"),
    ],
)
def test_what_cannot_be_traced_is_2_and_says_why(words, said, capsys):
    assert cli.run(["fit", *words, "--stage", "2", "--trace"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.startswith("error: ") and "Traceback" not in err


def test_a_trace_leaves_nothing_behind():
    before = torch.Tensor.data_ptr
    with pytest.raises(UserError):
        run(picky(), Setup(ranks=2, batch=1, seq=4, precision="fp32"))
    assert torch.Tensor.data_ptr is before and not torch.distributed.is_initialized()
    assert bool(torch.ones(())) and torch.ones(1).data_ptr()
