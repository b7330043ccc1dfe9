"""Small models and batches that tests share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lengths import LONG
from torch import nn

import zerocli


class Uneven(nn.Module):
    """Shapes that divide by nothing: (7, 15), (15, 3), one element, and one parameter far larger than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(15, 7)
        self.blocks = nn.ModuleList(Uneven.Block() for _ in range(3))
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.large = nn.Parameter(torch.randn(7, 997) * 0.1)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(7, 15), nn.LayerNorm(15), nn.Linear(15, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.norm(self.up(x))))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = x + torch.tanh(x @ self.large).mean(-1, keepdim=True)
        return F.mse_loss(self.last(x) * self.scale, y)


def uneven_batch(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the step's joined batch of 24 samples."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(24, 15, generator=generator)
    y = torch.randn(24, 3, generator=generator)
    return x[rows], y[rows]


def split(rank: int, world: int, micro: int = 0, accumulate: int = 1, total: int = 24) -> slice:
    """The rows of the joined batch that one rank sees in one micro-step."""
    each = total // (world * accumulate)
    start = (micro * world + rank) * each
    return slice(start, start + each)


def train_uneven(steps: int = 20 if LONG else 5, **settings: Any) -> list[float]:
    """Train on the joined batch, split over the ranks there are; return the mean loss of each step."""
    import torch.distributed as dist

    torch.manual_seed(7)
    model = Uneven()
    accumulate = settings.get("accumulate", 1)
    settings = {"lr": 1e-2, "clip": 0.5, "weight_decay": 0.1, "bucket_nbytes": 4096} | settings
    engine = zerocli.shard(model, **settings)
    rank, world = engine.collectives.rank, engine.collectives.world
    losses = []
    for step in range(1, steps + 1):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(accumulate):
            loss = model(*uneven_batch(step, split(rank, world, micro, accumulate)))
            engine.backward(loss)
            total += loss.detach().double()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world / accumulate)
        engine.step()
    return losses
