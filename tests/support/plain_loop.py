"""A plain torch training loop, which sharded loops are compared with."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import lr_scheduler
from toys import Uneven, uneven_batch

STEPS = 6


def fresh() -> Uneven:
    torch.manual_seed(7)
    return Uneven()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler=None, steps: int = STEPS) -> dict:
    """Train as any torch program does, on the joined batch."""
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = model(*uneven_batch(step, slice(0, 24)))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([float(step > 2)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return {name: value.detach().clone() for name, value in model.named_parameters()}
