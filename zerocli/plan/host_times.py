"""The times of `hardware.HostTimes` on this machine: models so small that only the launching of kernels takes time.

The loops are those of training, so the figures have Python's, torch's and the engine's part, as this machine runs them.
"""

from __future__ import annotations

import gc
import statistics
import time

import torch

from zerocli.config import ModelConfig
from zerocli.engine import api
from zerocli.models import build

LAYERS, WIDTH, TOKENS = 16, 128, 32
STEPS, WARMUP = 8, 3
KINDS: dict[str, object] = {"block": False, "whole": True, "selective": "selective"}
FAMILIES = ("gpt2", "llama")


def measure_host(device: torch.device) -> dict[str, float]:
    """Return the seconds per block and step by the names of `Hardware`, the mean of both families."""
    found = dict.fromkeys(KINDS, 0.0)
    for family in FAMILIES:
        seconds = {kind: _step(family, recompute, device) for kind, recompute in KINDS.items()}
        kept = seconds.pop("block")
        found["block"] += kept / (LAYERS + 2)  # embedding and head are launched too
        for kind, took in seconds.items():
            found[kind] += max(0.0, took - kept) / LAYERS
    return {f"host_{kind}": total / len(FAMILIES) for kind, total in found.items()}


def _step(family: str, recompute: object, device: torch.device) -> float:
    """Return the seconds of a step of a tiny model."""
    shape = ModelConfig(family=family, layers=LAYERS, hidden=WIDTH, heads=2, vocab=512, tie=False)
    model = build(shape, TOKENS, "meta")
    precision = "bf16" if device.type == "cuda" else "fp32"
    engine = api.shard(
        *(model, "adamw", 1e-4), stage=3, precision=precision, clip=1.0, recompute=recompute, device=str(device),
        units=model.unit_modules(),
    )  # fmt: skip
    try:
        tokens = torch.zeros((1, TOKENS), dtype=torch.int64, device=device)
        seconds = []
        for _ in range(WARMUP + STEPS):
            began = time.perf_counter()
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
            loss.item()
            seconds.append(time.perf_counter() - began)
    finally:
        engine.close()
    del engine, model, loss, tokens  # which refer to each other
    gc.collect()
    return statistics.median(seconds[WARMUP:])
