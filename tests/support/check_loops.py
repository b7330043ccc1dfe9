"""Models, loops and optimizers for tests of `zerocli.check`."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import zerocli


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, rank: int) -> Any:
    for step in range(3):
        loss = engine(batch(rank, step)).square().mean()
        engine.backward(loss)
        engine.step()
        yield loss


class Rule(torch.optim.Optimizer):
    """Elementwise, with a buffer."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    kept = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(kept.mul_(0.5).add_(p.grad), alpha=group["lr"])


def otherwise(engine: Any, rank: int) -> None:
    """Train at another rate under an engine, as if sharding changed the update."""
    if isinstance(engine, zerocli.Engine):
        for group in engine.optimizer.param_groups:
            group["lr"] *= 1.001
    for step in range(2):
        engine.backward(engine(batch(rank, step)).square().mean())
        engine.step()


def refused(engine: Any) -> None:
    loss = engine(batch(0, 0)).square().mean()
    if isinstance(engine, zerocli.Engine):
        raise zerocli.Refused("not like this: do that instead")
    engine.backward(loss)
    engine.step()


def stuck(engine: Any, rank: int) -> None:
    engine.backward(engine(batch(rank, 0)).square().mean())
    engine.step()
    while isinstance(engine, zerocli.Engine) and rank == 1:
        time.sleep(0.05)


def broken(engine: Any, rank: int) -> None:
    engine.backward(engine(batch(rank, 0)).square().mean())
    if isinstance(engine, zerocli.Engine) and rank == 1:
        raise ArithmeticError("on this rank only")
    engine.step()


def wrong(engine: Any) -> None:
    engine(torch.ones(1, 2))


def idle(engine: Any) -> None:
    """Make no step."""
