"""Laws: a config.json of a built-in family is planned as it is trained: its parameters, its units, its bytes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hf_models import CASES, SEQ, load_config, values_of
from ranks import run_ranks

from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Settings
from zerocli.models import build
from zerocli.plan.blocks.inputs import model_of, read_source, shape_of
from zerocli.plan.measure import LiveBytes
from zerocli.plan.memory.build import plan_model
from zerocli.plan.memory.flats import plan_flats
from zerocli.plan.setup import Setup


@pytest.mark.parametrize("name", CASES)
def test_fit_and_train_read_the_same_model(name, tmp_path):
    config = load_config(values_of(name), tmp_path)
    source = read_source(str(tmp_path / "config.json"), [], {"train.seq": SEQ})
    trained, planned = shape_of(config.model, SEQ), source.shape
    assert planned is not None and not any("factory" in note for note in source.notes)
    assert dataclasses.replace(planned, max_positions=0, norm_bias=trained.norm_bias) == trained
    assert model_of(planned) is not None
    decoder = build(config.model, SEQ, "meta")
    assert trained.numel == sum(p.numel() for p in decoder.parameters())
    engine = Engine(decoder, Settings(stage=2, units=decoder.unit_modules(), device="cpu"))
    assert [f.total for f in plan_flats(trained, Setup(stage=2))] == [f.layout.total for f in engine.flats()]
    engine.close()


@pytest.mark.long
def test_fit_traces_the_built_in_model(tmp_path, capsys):
    name = "qwen3-window"
    load_config(values_of(name), tmp_path)
    words = ["--ranks", "2", "--stage", "3", "--seq", str(SEQ), "--trace", "--json"]
    assert cli.run(["fit", str(tmp_path / "config.json"), *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model"]["parameters"] == shape_of(load_config(values_of(name), tmp_path).model, SEQ).numel
    assert not any("transformers" in note for note in answer["notes"])


SMALL = ModelConfig(family="llama", layers=3, hidden=32, heads=4, kv_heads=2, vocab=150)
LONG = 96
"""Tokens of a row: a mask is then a good part of all memory."""
MODELS: dict[str, dict[str, Any]] = {
    "biases": {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "norms": {"qk_norm": True, "head_dim": 12, "tie": False},
    "window": {"window": 8},
    "some windows": {"window": 8, "window_layers": "1"},
    "no window so short": {"window": 2 * LONG},
    "positions": {"family": "gpt2", "kv_heads": 0, "positions": 1000},
    "packed": {"packed": True},
    "packed windows": {"packed": True, "window": 8, "window_layers": "0,2", "kv_heads": 0},
    "packed gpt2": {"packed": True, "family": "gpt2", "kv_heads": 0},
}
SETUPS: list[dict[str, Any]] = [{"stage": 2}, {"stage": 3, "recompute": True}, {"stage": 3, "tp": 2}]


def of(changes: dict[str, Any]) -> ModelConfig:
    return dataclasses.replace(SMALL, **{key: value for key, value in changes.items() if key != "packed"})


def measured(changes: dict[str, Any], setup: dict[str, Any]) -> int:
    """Return the most bytes alive at once while the real engine is built and takes two steps."""
    with LiveBytes() as live:
        decoder = build(of(changes), LONG, "meta")
        engine = Engine(decoder, Settings(**setup, units=decoder.unit_modules(), device="cpu", clip=1.0))
        for _ in range(2):
            batch = list(torch.randint(150, (2, 4, LONG)).unbind())
            if changes.get("packed"):
                batch.append(torch.arange(LONG).remainder(40).repeat(4, 1))
            engine.backward(engine(*batch))
            del batch
            engine.step()
    engine.close()
    return live.peak


def _measure_all(cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[int]:
    return [measured(changes, setup | {"precision": "fp32"}) for changes, setup in cases]


QUICK = ("norms", "packed")


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(set(MODELS) - set(QUICK)), marks=pytest.mark.long)], ids=["quick", "others"]
)
def test_a_plan_is_never_below_the_measured_and_hardly_above_it(names):
    cases = [(MODELS[name], setup) for name in names for setup in SETUPS]
    cases = cases[1::4] if names == QUICK else cases
    found = [max(peaks) for peaks in zip(*run_ranks(2, _measure_all, cases), strict=True)]
    for (changes, setup), peak in zip(cases, found, strict=True):
        common = {"ranks": 2, "ranks_per_node": 2, "batch": 4, "seq": LONG, "device": "cpu", "precision": "fp32"}
        packed = {"packed": changes.get("packed", False)}
        planned = plan_model(shape_of(of(changes), LONG), Setup(**(common | setup | packed))).allocated
        assert peak <= planned <= peak * 1.04, (changes, setup, planned / peak)
