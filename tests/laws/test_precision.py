"""Precision: bf16 and fp16 with an fp32 master, dynamic loss scaling, accumulation in fp32, exact clipping."""

from __future__ import annotations

import math

import pytest
import torch
from lengths import spread
from ranks import run_cases, run_ranks
from torch import nn
from toys import train_uneven, uneven_batch

import zerocli
from zerocli.engine.precision import LossScale


def _train(settings):
    return train_uneven(**settings)


@pytest.mark.longer
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_the_same_at_every_stage_and_close_to_fp32(precision):
    exact = train_uneven(stage=0)
    stages = spread(2 if precision == "bf16" else 1, range(4))
    reference, *others = run_cases(2, _train, [({"stage": stage, "precision": precision},) for stage in stages])
    assert reference[0] == pytest.approx(exact, rel=0.05)
    assert others == [reference] * len(others)


def test_accumulation_is_in_fp32():
    """In bf16, 256 + 1 is 256: a sum in bf16 would lose every later micro-step."""
    model = nn.Linear(1, 1, bias=False)
    for stage in (0, 2):
        engine = zerocli.shard(nn.Linear(1, 1, bias=False), stage=stage, precision="bf16", accumulate=4)
        for scale in (256.0, 1.0, 1.0, 1.0):
            engine.backward(engine(torch.full((1, 1), scale)).sum())
        assert engine.units[0].trainable[0].gradient.held[0].item() == 259.0, stage
    assert model.weight.dtype == torch.float32


def test_the_loss_scale_is_halved_by_an_overflow_and_doubled_after_steps_without_one():
    scale, seen = LossScale(True, torch.device("cpu"), initial=8.0, interval=3), []
    for overflow in (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0):
        scale.update(torch.tensor(overflow))
        seen.append(scale.value.item())
    assert seen == [8.0, 8.0, 16.0, 8.0, 8.0, 8.0, 16.0]


class Overflows(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.factor = 1.0

    def forward(self, x):
        return (x * self.weight).mean() * self.factor


def _overflow(stage: int, precision: str):
    import torch.distributed as dist

    model = Overflows()
    engine = zerocli.shard(model, stage=stage, precision=precision, lr=0.1)
    seen = []
    for step in range(4):
        model.factor = float("inf") if step == 1 and dist.get_rank() == 1 else 1.0
        engine.backward(model(torch.ones(8)))
        result = engine.step()
        weights = engine.state_dict()["weight"].tolist()
        seen.append((result.skipped.item(), engine.loss_scale.value.item(), weights[0]))
    return seen


def test_one_ranks_overflow_skips_the_step_on_all():
    (first, second), *others = run_cases(2, _overflow, [(stage, "fp16") for stage in range(4)])
    assert first == second
    assert others == [[first, first]] * 3
    assert [row[0] for row in first] == [0.0, 1.0, 0.0, 0.0]
    assert [row[1] for row in first] == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
    weights = [row[2] for row in first]
    assert weights[1] == weights[0] > weights[2] > weights[3]
    # AdamW's bias correction counts updates made, not steps tried: three equal gradients move it 3 x lr.
    assert weights[3] == pytest.approx(1 - 0.3, abs=1e-3)


def test_gradients_that_are_not_finite_never_reach_the_weights():
    for rows, _ in run_cases(2, _overflow, [(2, "fp32"), (2, "bf16")]):
        assert rows[1][0] == 1.0 and rows[1][2] == rows[0][2]
        assert all(math.isfinite(row[2]) for row in rows)


def test_clipping_is_by_the_exact_global_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(15, 9), nn.Tanh(), nn.Linear(9, 3))
    x, y = uneven_batch(1, slice(0, 24))
    loss = (model(x) - y).square().sum() * 10
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    clipped = {n: p.grad.clone() for n, p in model.named_parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    engine = zerocli.shard(model, optimizer="sgd", lr=1.0, clip=0.25)
    engine.backward((model(x) - y).square().sum() * 10)
    result = engine.step()
    assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for name, value in engine.state_dict().items():
        assert torch.allclose(before[name] - value, clipped[name], rtol=1e-5, atol=1e-7), name


def test_reduction_in_fp32_on_request():
    losses = run_ranks(2, _train, {"stage": 3, "precision": "bf16", "reduce": "fp32", "steps": 5})
    assert losses[0] == pytest.approx(train_uneven(stage=0, steps=5), rel=0.02)


@pytest.mark.parametrize("settings", [{}, {"cast_inputs": True}], ids=str)
def test_running_statistics_in_fp32_are_refused_by_name_and_the_layer_can_stay_in_fp32(settings):
    def train(**more):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        engine = zerocli.shard(model, stage=1, device="cpu", precision="bf16", **settings, **more)
        engine.backward(engine(torch.randn(4, 6)).float().square().mean())
        engine.step()
        engine.close()

    with pytest.raises(zerocli.Refused, match=r"^1 has weights in torch.bfloat16 .* keep_fp32='\^1\[\.\]'"):
        train()
    train(keep_fp32="^1[.]")
