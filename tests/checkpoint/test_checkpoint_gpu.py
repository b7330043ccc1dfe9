"""Asynchronous saves where copies really run beside compute: they change no number and hold their own step."""

from __future__ import annotations

import pytest
import torch
from gpu_stack import Stack
from ranks import run_ranks

import zerocli
from zerocli.checkpoint import Folder, Saver, load

pytestmark = pytest.mark.gpu
CASES = [
    {"stage": 3, "precision": "bf16"},
    {"stage": 1, "precision": "fp32"},
    {"stage": 3, "precision": "bf16", "offload": "cpu", "update": "stream", "staging_nbytes": 8 << 20},
    {"stage": 3, "precision": "bf16", "offload": "cpu", "update": "cpu", "staging_nbytes": 8 << 20},
    {"stage": 3, "precision": "fp32", "offload": "nvme", "staging_nbytes": 8 << 20, "read_ahead_nbytes": 8 << 20},
]


def engine_of(settings: dict, seed: int):
    torch.manual_seed(seed)
    model = Stack().cuda()
    return model, zerocli.shard(model, lr=1e-3, clip=1.0, weight_decay=0.1, bucket_nbytes=1 << 20, **settings)


def everything(engine) -> dict[str, torch.Tensor]:
    optimizer = engine.optimizer_state_dict()["state"]
    states = {f"{name}.{key}": value for name, each in optimizer.items() for key, value in each.items()}
    return engine.state_dict() | states


def trained(folder: str, settings: dict, saves: bool):
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, engine = engine_of(settings, 3)
    saver = Saver(engine, folder, keep=9, buffer_nbytes=64 << 20)
    losses, states = [], {}
    for step in range(1, 7):
        tokens = torch.randint(0, 97, (4, 33), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        if saves:
            if step == 3:
                states = everything(engine)
            saver.save(step)
    saver.close()
    assert saver.failure is None, saver.failure
    engine.close()
    return [loss.item() for loss in losses], states


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_saves_beside_training_change_no_number_and_hold_their_own_step(tmp_path, settings):
    settings = settings | {"nvme_path": (str(tmp_path),)}
    plain, _ = trained(str(tmp_path / "c"), settings, False)
    losses, states = trained(str(tmp_path / "c"), settings, True)
    assert losses == plain
    _, engine = engine_of(settings, 8)
    load(engine, Folder(tmp_path / "c").of(3))
    loaded = everything(engine)
    assert all(torch.equal(loaded[name], states[name]) for name in states)
    engine.close()


def test_two_ranks_save_on_one_gpu(tmp_path):
    settings = {"stage": 3, "precision": "bf16"}
    plain = run_ranks(2, trained, str(tmp_path / "c"), settings, False)
    assert [r[0] for r in run_ranks(2, trained, str(tmp_path / "c"), settings, True)] == [r[0] for r in plain]
