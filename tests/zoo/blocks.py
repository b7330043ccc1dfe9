"""Small models that cases share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, WORDS = 8, 11


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int = WIDTH, hidden: int = 12) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Embedding, blocks, head: the plainest language model with units; returns the loss of the next token."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.loss(self.body(self.embed(tokens)), tokens)


class Regressor(nn.Module):
    """Blocks on raw data: the first unit's input has no gradient."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.body(x), y)


def pairs(run, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch for a `Regressor`."""
    return run.randn(step, 4, WIDTH), run.randn(step + 100, 4, WIDTH)
