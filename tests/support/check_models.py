"""Factories for tests of `zerocli check`: a sound model, and models whose numbers sharding really changes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class Sound(nn.Module):
    """A sum of two losses, each of a layer of its own: what is wrong in one leaves the other's gradient alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.embed.weight.requires_grad_(False)
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def weigh(self) -> float:
        """Return the weight of the right layer's loss."""
        return 1.0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, y = self.embed(tokens), self.embed(targets)
        left = (torch.tanh(self.left(x)) - y).square().mean()
        return left + self.weigh() * (torch.tanh(self.right(x)) - y).square().mean()


class ByRank(Sound):
    """Reads its rank: the right layer's gradient is off by one part in two thousand."""

    def weigh(self) -> float:
        return 1.0 + 0.001 * dist.get_rank()


class Stateful(Sound):
    """Counts its calls, of which the unsharded run makes one for each rank."""

    calls = 0

    def weigh(self) -> float:
        self.calls += 1
        return 1.0 / self.calls


class Refusing(Sound):
    """Fails on every rank, but not where one process trains alone."""

    def weigh(self) -> float:
        if "forward" in vars(self):  # calls of a sharded module go through the engine
            raise ArithmeticError("no engine, please")
        return 1.0
