"""A small GPT-2 with dropout, for tests of recomputation and of activation checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from toy_tiers import NVME

import zerocli
from zerocli.config import ModelConfig
from zerocli.models import build

LAYERS, BATCH, SEQ, HIDDEN = 4, 2, 16, 32  # bf16 takes 100 times as long as fp32 on some CPUs
CHECKPOINT = BATCH * SEQ * HIDDEN * 4


def make(
    layers: int = LAYERS, dropout: float = 0.1, hidden: int = HIDDEN, frozen: bool = False, **settings: Any
) -> zerocli.Engine:
    """Return an engine of the model; with `frozen` the matrices of its blocks are not trained."""
    torch.manual_seed(0)
    shape = ModelConfig(layers=layers, hidden=hidden, heads=2, vocab=64, dropout=dropout)
    model = build(shape, SEQ, "cpu")
    for unit in model.unit_modules() if frozen else ():
        for parameter in unit.parameters():
            parameter.requires_grad_(parameter.dim() == 1)
    return zerocli.shard(model, **{"stage": 3, "clip": 0.5, "units": model.unit_modules(), **NVME} | settings)


def train(engine: zerocli.Engine, steps: int = 3, seq: int = SEQ) -> list[float]:
    return [loss for step in range(steps) for loss in train_step(engine, step, seq)]


def train_step(engine: zerocli.Engine, step: int, seq: int = SEQ) -> list[float]:
    """Train one step on tokens drawn for it and the rank; return the losses of its micro-steps."""
    losses = []
    for micro in range(engine.settings.accumulate):
        torch.manual_seed(100 * step + 10 * micro + engine.collectives.rank)
        tokens = torch.randint(0, 64, (BATCH, seq + 1))
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        losses.append(loss.item())
    engine.step()
    return losses
