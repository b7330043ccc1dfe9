"""A deep model of equal residual blocks, whose bytes tests do arithmetic with."""

from __future__ import annotations

import gc

import torch
from torch import nn

WIDTH, BLOCK_NUMEL = 64, 2 * 64 * 64 + 2 * 64


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(x)))


class Deep(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(layers))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


def live_nbytes() -> int:
    """Bytes of all tensor storages that are alive in this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.Tensor):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        except Exception:
            continue
    return sum(storages.values())
