"""Checkpoints do not know the degree of tensor parallelism: saved at any, loaded at any other, bit for bit."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from test_offload import NVME

import zerocli
from zerocli.checkpoint import Saver, load
from zerocli.checkpoint.manifest import read
from zerocli.config import ModelConfig
from zerocli.models import build

MODELS = {
    "gpt2": ModelConfig(layers=2, hidden=32, heads=4, vocab=64),
    "llama": ModelConfig(family="llama", layers=2, hidden=32, heads=4, kv_heads=2, vocab=62, tie=False, mlp_hidden=48),
}
SEQ = 8


def engine_of(family: str, seed: int, settings: dict) -> zerocli.Engine:
    model = build(MODELS[family], SEQ, "meta")
    common = {"seed": seed, "clip": 1.0, "units": model.unit_modules(), "staging_nbytes": 48000, **NVME}
    return zerocli.shard(model, **common, **settings)


def train(engine: zerocli.Engine, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 62, (4, SEQ + 1), generator=generator)
        each = 4 // engine.collectives.world
        mine = tokens[engine.collectives.rank * each : (engine.collectives.rank + 1) * each]
        loss = engine(mine[:, :-1], mine[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: zerocli.Engine) -> dict[str, list]:
    states = engine.optimizer_state_dict()["state"]
    found = {name: value.tolist() for name, value in engine.state_dict().items()}
    return found | {f"{name}.{key}": value.tolist() for name, s in states.items() for key, value in s.items()}


def _save(family: str, folder: str, settings: dict) -> tuple[dict, list[float]]:
    engine = engine_of(family, 1, settings)
    train(engine, range(3))
    saver = Saver(engine, folder, asynchronous=settings.get("stage") == 2)
    before = everything(engine)
    saver.save(3)
    after = train(engine, range(3, 6))
    saver.close()
    assert saver.failure is None
    engine.close()
    return before, after


def _load(family: str, folder: str, settings: dict) -> tuple[dict, list[float]]:
    engine = engine_of(family, 2, settings)
    load(engine, folder)
    loaded = everything(engine)
    losses = train(engine, range(3, 6))
    engine.close()
    return loaded, losses


@pytest.mark.parametrize("family", list(MODELS))
def test_a_checkpoint_goes_on_at_any_degree(tmp_path, family):
    swap = tmp_path / "swap"
    swap.mkdir()
    away = {"stage": 3, "offload": "nvme", "nvme_path": (str(swap),)}
    ways = {  # ranks in all, settings
        "one": (1, {"stage": 0}),
        "dp 2": (2, {"stage": 3}),
        "tp 2": (2, {"stage": 2, "tp": 2}),
        "tp 2 dp 2": (4, {"stage": 3, "tp": 2}),
        "tp 2 dp 2 nvme": (4, away | {"tp": 2}),
    }
    for name in ("one", "tp 2", "tp 2 dp 2 nvme"):
        ranks, settings = ways[name]
        folder = str(tmp_path / name.replace(" ", "-"))
        saved = run_ranks(ranks, _save, family, folder, settings)
        before = saved[0][0]
        for other, (count, how) in ways.items():
            for rank, (loaded, losses) in enumerate(run_ranks(count, _load, family, f"{folder}/step-00000003", how)):
                assert loaded == before, (name, other)
                if other == name:
                    assert losses == saved[rank][1]


def test_a_checkpoint_of_split_layers_names_whole_parameters(tmp_path):
    run_ranks(2, _save, "gpt2", str(tmp_path), {"stage": 1, "tp": 2})
    shapes = {name: tensor.shape for name, tensor in read(tmp_path / "step-00000003").tensors.items()}
    model = build(MODELS["gpt2"], SEQ, "meta")
    for name, parameter in model.named_parameters():
        assert shapes[f"parameters/{name}"] == tuple(parameter.shape)
        assert shapes[f"optimizer/exp_avg/{name}"] == tuple(parameter.shape)
