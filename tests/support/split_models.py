"""Small models of both families that tensor parallelism splits, and their batches."""

from __future__ import annotations

import torch

from zerocli.config import ModelConfig

LAYERS, HIDDEN, SEQ, VOCAB, BATCH, STEPS = 2, 32, 16, 50, 4, 3
MODELS = {
    "gpt2": ModelConfig(family="gpt2", layers=LAYERS, hidden=HIDDEN, heads=4, vocab=VOCAB, mlp_hidden=40),
    "llama": ModelConfig(
        family="llama", layers=LAYERS, hidden=HIDDEN, heads=8, kv_heads=2, vocab=VOCAB, mlp_hidden=40, tie=False
    ),
}


def batch(step: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))[rows]
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
