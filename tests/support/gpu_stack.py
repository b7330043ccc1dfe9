"""A stack of blocks large enough for a GPU, and its training with delays or without waits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerocli
from zerocli.engine.events import Events, Probe

WIDTH = 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, layers: int = 6):
        super().__init__()
        self.embed = nn.Embedding(97, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 97)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def train_stack(
    stage: int,
    settings: dict,
    delay_seed: int | None = None,
    steps: int = 8,
    events: Events | None = None,
    after_step: Callable[[nn.Module, torch.Tensor], None] = lambda model, tokens: None,
):
    import torch.distributed as dist

    torch.use_deterministic_algorithms(True, warn_only=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    dice = random.Random(delay_seed)

    def probe(name: str) -> None:
        if delay_seed is not None and dice.random() < 0.4:
            torch.cuda._sleep(int(dice.random() * 4_000_000))  # cycles on the current stream

    torch.manual_seed(3)
    model = Stack().cuda()
    engine = zerocli.shard(
        model,
        lr=1e-3,
        clip=1.0,
        weight_decay=0.1,
        stage=stage,
        bucket_nbytes=1 << 20,
        events=events or Probe(probe),
        **settings,
    )
    losses = []
    for step in range(steps):
        total = torch.zeros((), device="cuda")
        for micro in range(settings.get("accumulate", 1)):
            generator = torch.Generator().manual_seed(step % 2 * 100 + rank * 10 + micro)
            tokens = torch.randint(0, 97, (8, 32), generator=generator).cuda()
            loss = model(tokens)
            engine.backward(loss)
            total += loss.detach()
        engine.step()
        after_step(model, tokens)
        losses.append(total.item())
    return losses


def run_without_waiting(**settings) -> None:
    """Train two steps to warm up and two in which any wait for the device raises."""
    torch.manual_seed(3)
    model = Stack().cuda()
    engine = zerocli.shard(model, stage=3, precision="bf16", clip=1.0, **settings)
    tokens = torch.randint(0, 97, (8, 32), device="cuda")
    try:
        for step in range(4):
            if step == 2:
                torch.cuda.set_sync_debug_mode("error")
            engine.backward(model(tokens))
            result = engine.step()
        with pytest.raises(RuntimeError, match="synchroniz"):  # the check bites: reading a value is such a wait
            result.grad_norm.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        engine.close()
