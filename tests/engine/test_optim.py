"""Optimizers on flat shards do what torch.optim does on whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_cases
from torch import nn
from toys import Uneven, split, uneven_batch

import zerocli
from zerocli.config import OptimizerConfig
from zerocli.engine.optimizer.rules import make_optimizer
from zerocli.run.schedule import make_schedule

CASES = {
    "adamw": ({"betas": (0.8, 0.95), "eps": 1e-6}, {"weight_decay": 0.1}),
    "adam": ({"betas": (0.9, 0.99)}, {"weight_decay": 0.1}),
    "sgd": ({"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}),
    "RMSprop": ({"alpha": 0.9, "momentum": 0.5}, {"weight_decay": 0.1}),
    "Adagrad": ({"initial_accumulator_value": 0.3}, {"weight_decay": 0.1}),
    "NAdam": ({}, {"weight_decay": 0.1}),
    "ASGD": ({}, {"weight_decay": 0.1}),
    "Rprop": ({}, {}),
}


def theirs(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    model = Uneven()
    options, decay = CASES[name]
    kinds = {kind.lower(): value for kind, value in vars(torch.optim).items()}
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], **decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], **dict.fromkeys(decay, 0.0)},
    ]
    optimizer = kinds[name.lower()](groups, lr=1e-2, **options)
    for step in range(1, 5):
        optimizer.zero_grad()
        model(*uneven_batch(step, slice(0, 24))).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def _ours(name: str, stage: int):
    import torch.distributed as dist

    torch.manual_seed(7)
    model = Uneven()
    options, decay = CASES[name]
    engine = zerocli.shard(model, optimizer=name, lr=1e-2, stage=stage, **options, **decay)
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(1, 5):
        engine.backward(model(*uneven_batch(step, split(rank, world))))
        engine.step()
    return {name: value.numpy() for name, value in engine.state_dict().items()}


@pytest.fixture(scope="module")
def of_two_ranks():
    """What each optimizer makes of the parameters at stage 3, as the second of two ranks has it."""
    return dict(zip(CASES, (ranks[1] for ranks in run_cases(2, _ours, [(name, 3) for name in CASES])), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_torchs(of_two_ranks, name):
    expected = theirs(name)
    for result in (_ours(name, 2), of_two_ranks[name]):
        for key, value in expected.items():
            # Rprop works on signs, so a gradient that rounds to the other side of zero may step the other way.
            close = torch.isclose(torch.from_numpy(result[key]), value, rtol=1e-4, atol=2e-6)
            assert close.float().mean() > (0.99 if name == "Rprop" else 0.9999), (name, key)


def test_optimizers_that_cannot_be_sharded_are_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        make_optimizer("lbfgs", {})
    with pytest.raises(ValueError, match="is not one of"):
        make_optimizer("adamww", {})
    with pytest.raises(ValueError, match="beta.*betas"):
        make_optimizer("adamw", {"beta": 1})


def test_weight_decay_spares_norms_and_biases():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    engine = zerocli.shard(model, optimizer="sgd", lr=0.5, weight_decay=0.1)
    engine.backward(model(torch.zeros(1, 4)).sum() * 0)
    engine.step()
    after = engine.state_dict()
    assert after["0.weight"].unique().tolist() == pytest.approx([0.95])
    for name in ("0.bias", "1.weight", "1.bias"):
        assert after[name].unique().tolist() == [1.0]


def test_schedules():
    def make(kind: str, lr: float, steps: int, min_lr: float = 0.0, **keys: Any) -> Callable[[int], float]:
        return make_schedule(OptimizerConfig(schedule=kind, lr=lr, min_lr=min_lr, **keys), steps)

    cosine = make("cosine", 1.0, steps=110, warmup=10, min_lr=0.1)

    assert [cosine(s) for s in (1, 10)] == pytest.approx([0.1, 1.0])
    assert cosine(60) == pytest.approx(0.55) and cosine(110) == pytest.approx(0.1)
    linear = make("linear", 2.0, steps=10)
    assert linear(5) == pytest.approx(1.0) and linear(10) == 0.0
    assert make("constant", 3.0, 10, warmup=2)(7) == 3.0
    for decay in (0.2, 20):  # a share of the steps, or a number of them
        wsd = make("wsd", 2.0, steps=100, warmup=10, min_lr=0.5, decay=decay)
        assert [wsd(s) for s in (5, 10, 11, 80)] == [1.0, 2.0, 2.0, 2.0]
        assert wsd(90) == pytest.approx(1.5) and wsd(100) == wsd(120) == pytest.approx(1.0)
    assert make("wsd", 1.0, steps=10, warmup=8, decay=0.9)(9) == 0.5  # it never begins within the warm-up
    log = make("constant", 1.0, 100, warmup=16, warmup_shape="log")
    assert [log(s) for s in (1, 4, 16, 17)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
