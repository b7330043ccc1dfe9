"""The laws again where the streams are real: one GPU with NCCL, and two ranks sharing one over gloo."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import nn

import zerocli
from zerocli.engine.events import Probe

pytestmark = pytest.mark.gpu
WIDTH = 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, layers: int = 6):
        super().__init__()
        self.embed = nn.Embedding(97, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 97)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def _train(stage: int, settings: dict, delay_seed: int | None = None, steps: int = 8):
    import torch.distributed as dist

    torch.use_deterministic_algorithms(True, warn_only=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    dice = random.Random(delay_seed)

    def probe(name: str) -> None:
        if delay_seed is not None and dice.random() < 0.4:
            torch.cuda._sleep(int(dice.random() * 4_000_000))  # cycles on the current stream

    torch.manual_seed(3)
    model = Stack().cuda()
    engine = zerocli.shard(
        model,
        lr=1e-3,
        clip=1.0,
        weight_decay=0.1,
        stage=stage,
        bucket_nbytes=1 << 20,
        events=Probe(probe),
        **settings,
    )
    losses = []
    for step in range(steps):
        total = torch.zeros((), device="cuda")
        for micro in range(settings.get("accumulate", 1)):
            generator = torch.Generator().manual_seed(step % 2 * 100 + rank * 10 + micro)
            tokens = torch.randint(0, 97, (8, 32), generator=generator).cuda()
            loss = model(tokens)
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        losses.append(total.item())
    return losses


def test_one_gpu_over_nccl_is_the_same_at_every_stage(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for settings in ({}, {"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "accumulate": 3}):
            reference = _train(0, settings)
            assert reference[-1] < reference[0]
            for stage in (1, 2, 3):
                assert _train(stage, settings) == reference, (stage, settings)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "accumulate": 2}, {"recompute": True}], ids=str)
def test_two_ranks_on_one_gpu_are_the_same_at_every_stage(settings):
    reference = run_ranks(2, _train, 0, settings)
    for stage in (1, 2, 3):
        if settings.get("accumulate", 1) > 1 and stage >= 2:
            for mine, other in zip(run_ranks(2, _train, stage, settings), reference, strict=True):
                assert mine == pytest.approx(other, rel=1e-2)
        else:
            assert run_ranks(2, _train, stage, settings) == reference, stage


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_delays_on_the_streams_change_no_number(stage):
    reference = run_ranks(2, _train, stage, {})
    for seed, settings in ((1, {}), (2, {"recompute": True}), (3, {"gather_buffers": 3})):
        assert run_ranks(2, _train, stage, settings, seed) == reference, (seed, settings)


def run_without_waiting(**settings) -> None:
    """Train two steps to warm up and two in which any wait for the device raises."""
    torch.manual_seed(3)
    model = Stack().cuda()
    engine = zerocli.shard(model, stage=3, precision="bf16", clip=1.0, **settings)
    tokens = torch.randint(0, 97, (8, 32), device="cuda")
    try:
        for step in range(4):
            if step == 2:
                torch.cuda.set_sync_debug_mode("error")
            engine.backward(model(tokens))
            result = engine.step()
        with pytest.raises(RuntimeError, match="synchroniz"):  # the check bites: reading a value is such a wait
            result.grad_norm.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()


def test_a_bare_cuda_is_the_current_gpu():
    engine = zerocli.shard(Stack(1), device="cuda")
    assert engine.device == torch.device("cuda", torch.cuda.current_device())


def test_steady_state_never_waits_for_the_device():
    run_without_waiting()


def _compiled(stage: int, settings: dict):
    return _train(stage, settings, steps=4)


def test_compiled_blocks_are_right_at_stage_3():
    reference = run_ranks(2, _compiled, 0, {"compile": True}, seconds=300)
    for recompute in (False, True):
        got = run_ranks(2, _compiled, 3, {"compile": True, "recompute": recompute}, seconds=300)
        for mine, other in zip(got, reference, strict=True):
            assert mine == pytest.approx(other, rel=1e-4)
