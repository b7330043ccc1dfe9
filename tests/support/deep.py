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


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Every tensor storage that is alive in this process, by its address. While the answer is kept, none of them ends,
    so none of these addresses is given to another."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        try:
            if isinstance(thing, torch.Tensor):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage
        except Exception:
            continue
    return storages


def live_nbytes(besides: dict[int, torch.UntypedStorage] | None = None) -> int:
    """Bytes of all storages that are alive, without those in `besides`: an earlier case's may end at any time, since a
    collective's thread drops its tensors after its waiter went on."""
    return sum(storage.nbytes() for address, storage in live_storages().items() if address not in (besides or {}))
