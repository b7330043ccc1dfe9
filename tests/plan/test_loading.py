"""Host memory while a model is loaded: the plan compared with what building and reading take on CPU ranks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from ranks import run_ranks

from zerocli.checkpoint.imports import load_weights
from zerocli.cli import main as cli
from zerocli.config import ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Settings
from zerocli.layout import constants
from zerocli.models import build
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.measure import LiveBytes
from zerocli.plan.memory.build import plan_model
from zerocli.plan.setup import Setup

SMALL = ModelConfig(layers=2, hidden=64, heads=4, vocab=3000)
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"family": "llama", "tie": False}, {"stage": 0, "precision": "fp32"}),
    ({"family": "llama", "tie": False}, {"stage": 0, "precision": "bf16"}),
    ({"family": "llama"}, {"stage": 1, "precision": "bf16", "master": "fp32"}),
    ({"family": "llama"}, {"stage": 2, "precision": "bf16"}),
    ({"family": "llama", "tie": False}, {"stage": 3, "precision": "bf16"}),
    ({}, {"stage": 3, "precision": "fp32"}),
    ({"family": "llama", "tie": False}, {"stage": 3, "precision": "bf16", "offload": "cpu"}),
]


def _measure(folder: str) -> list[tuple[int, int]]:
    """Return each case's peaks of live bytes: while the engine is built, and until weights are read."""
    found = []
    for number, (changes, setup) in enumerate(CASES):
        model = dataclasses.replace(SMALL, **changes)
        live = LiveBytes()
        with live:
            decoder = build(model, 8, "meta")
            engine = Engine(decoder, Settings(**setup, units=decoder.unit_modules(), device="cpu"))
            random = live.peak
        engine.close()
        del decoder, engine
        live = LiveBytes()
        with live:  # of this thread: the buffers of those that read are bounded by the plan, not measured
            decoder = build(model, 8, "meta")
            engine = Engine(decoder, Settings(**setup, units=decoder.unit_modules(), device="cpu", empty=True))
            load_weights(engine, f"{folder}/{number}", model)
        found.append((random, live.peak))
        engine.close()
    return found


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_loading_takes_what_the_plan_says(world, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    for number, (changes, _) in enumerate(CASES):
        decoder = build(dataclasses.replace(SMALL, **changes), 8)
        (tmp_path / str(number)).mkdir()
        named = {name: p.detach().clone() for name, p in decoder.named_parameters()}
        safetensors.save_file(named, tmp_path / str(number) / "model.safetensors")
    ranks = run_ranks(world, _measure, str(tmp_path))
    for (changes, setup), *found in zip(CASES, *ranks, strict=True):
        shape = shape_of(dataclasses.replace(SMALL, **changes), 8)
        plan = plan_model(shape, Setup(**setup, ranks=world, ranks_per_node=world, device="cpu", batch=1, seq=8))
        # The tiers' own arenas, one of parameters and one of other states, are not memory of tensors.
        tiers = 2 * world * constants.FIRST_ARENA_NBYTES if "offload" in setup else 0
        for kind, peaks in zip(("random", "init_from"), zip(*found, strict=True), strict=True):
            loading, taken = plan.loading[kind] - tiers, max(peaks) * world
            most = 1.01 * taken
            if kind == "init_from":
                each = min(1 << 20, 4 * 3000 * 64)  # a MiB, or the largest tensor
                most += world * constants.LOAD_THREADS * constants.LOAD_COPIES * each
            assert 0.98 * taken <= loading <= most, (changes, setup, kind, loading / taken)


def test_fit_says_what_loading_takes(capsys, no_gpu):
    """Of one rank: a pinned buffer for each thread that reads, beside Python and what is offloaded."""
    words = ["fit", "llama3-8b", "--ranks", "1", "--stage", "3", "--hardware", "h200"]
    assert cli.run([*words, "--offload", "", "--json"]) == 0
    loading = json.loads(capsys.readouterr().out)["candidates"][0]["loading"]
    buffers = loading["init_from"] - loading["random"]
    assert buffers == constants.LOAD_THREADS * constants.load_nbytes(2 * 8_030_261_248) < 128 << 20
    assert cli.run([*words, "--offload", "cpu"]) == 0
    assert "host memory while loading: " in capsys.readouterr().out
    assert cli.run([*words, "--offload", "cpu", "--host-memory", "106.4GiB"]) == 0
    assert "more than there are" in " ".join(capsys.readouterr().out.split())
