"""A training loop of your own around a model of your own, sharded at stage 3 with its states in host memory.

python examples/own_loop.py                                       one process
torchrun --standalone --nproc-per-node 2 examples/own_loop.py     two
"""

from __future__ import annotations

import os

import torch
from torch import nn

import zerocli


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x).squeeze(-1), target)


def main() -> None:
    torch.manual_seed(0)
    model = Regressor()
    engine = zerocli.shard(model, optimizer="adamw", lr=3e-3, stage=3, offload="cpu", clip=1.0)
    rank = int(os.environ.get("RANK", "0"))
    generator = torch.Generator().manual_seed(rank)  # each rank has data of its own
    for step in range(1, 41):
        x = torch.randn(16, 32, generator=generator)
        loss = engine(x.to(engine.device), x.sum(-1).sin().to(engine.device))
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    engine.close()


if __name__ == "__main__":
    main()
