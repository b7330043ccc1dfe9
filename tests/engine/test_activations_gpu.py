"""The laws of activation checkpoints where copies really run beside compute."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from gpu_stack import WIDTH, Stack, run_without_waiting, train_stack
from ranks import run_ranks

import zerocli
from zerocli.engine.events import Probe

pytestmark = pytest.mark.gpu
WAYS = ["activations=hbm", "activations=cpu", "activations=nvme", "activations=hbm:1MiB+cpu:256KiB+nvme"]


def test_checkpoints_never_change_a_loss_on_a_gpu(tmp_path):
    for precision in ("fp32", "bf16"):
        common = {"precision": precision, "nvme_path": (str(tmp_path),)}
        kept = train_stack(3, common)
        for count in (True, 1, 5, "selective", zerocli.Recompute(1, 3)):
            assert train_stack(3, common | {"recompute": count}) == kept, count
        for text in WAYS:
            for seed in (None, 1, 2):
                assert train_stack(3, common | {"offload": text}, seed) == kept, (text, seed)
    states = {"offload": "params=cpu,grads=cpu,optimizer=cpu,activations=cpu", "update": "stream"}
    assert train_stack(3, common | states, 3) == kept


def test_two_ranks_share_a_gpu_and_offload_checkpoints():
    kept = run_ranks(2, train_stack, 3, {"precision": "bf16"})
    for seed in (None, 1):
        assert run_ranks(2, train_stack, 3, {"precision": "bf16", "offload": "activations=cpu"}, seed) == kept


def test_checkpoints_on_the_host_never_make_the_host_wait():
    run_without_waiting(offload="activations=cpu")
    run_without_waiting(recompute=True)
    run_without_waiting(recompute="selective")


def test_checkpoints_leave_the_device():
    layers, batch, seq = 24, 64, 128
    checkpoint = batch * seq * WIDTH * 2
    peaks = {}
    for text in ("activations=hbm", "activations=cpu"):
        gc.collect()  # engines before this one
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        engine = zerocli.shard(Stack(layers).cuda(), stage=3, precision="bf16", offload=text)
        tokens = torch.randint(0, 97, (batch, seq), device="cuda")
        for step in range(3):
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
            engine.backward(engine(tokens))
            engine.step()
        torch.cuda.synchronize()
        peaks[text] = torch.cuda.max_memory_allocated() - before
        limit = layers if text.endswith("hbm") else 2
        assert engine.activations.peak_nbytes <= limit * checkpoint
        engine.close()
        del engine
    saved = peaks["activations=hbm"] - peaks["activations=cpu"]
    assert saved >= (layers - 3) * checkpoint, (saved / checkpoint, peaks)


def _split(settings: dict, delay_seed: int | None) -> list[float]:
    from zerocli.config import ModelConfig
    from zerocli.models import build

    dice = random.Random(delay_seed)

    def probe(name: str) -> None:
        if delay_seed is not None and dice.random() < 0.4:
            torch.cuda._sleep(int(dice.random() * 4_000_000))

    torch.manual_seed(0)
    model = build(ModelConfig(layers=4, hidden=256, heads=4, vocab=512, dropout=0.1), 64, "cuda")
    common = {"stage": 3, "precision": "bf16", "units": model.unit_modules(), "tp": 2, "events": Probe(probe)}
    engine = zerocli.shard(model, lr=1e-3, clip=1.0, **common, **settings)
    losses = []
    for step in range(6):
        torch.manual_seed(step % 2)
        tokens = torch.randint(0, 512, (8, 65), device="cuda")
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.close()
    return losses


def test_partitioned_checkpoints_are_right_on_real_streams():
    kept = run_ranks(2, _split, {}, None)
    assert kept[0][-1] < kept[0][0]
    for settings, seed in (({"recompute": True}, 1), ({"offload": "activations=cpu"}, 2)):
        assert run_ranks(2, _split, settings, seed) == kept, settings
