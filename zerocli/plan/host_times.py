"""The times of `hardware.HostTimes` on this machine: models so small that only the launching of kernels takes time.

The loops are those of training, so the figures have Python's, torch's and the engine's part, as this machine runs them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
import time

import torch

from zerocli.config import ModelConfig
from zerocli.engine import api
from zerocli.engine.engine import Engine
from zerocli.models import build

LAYERS, WIDTH, TOKENS = 16, 128, 32
STEPS, WARMUP = 20, 3
BLOCK = "block"
KINDS: dict[str, tuple[object, str, str, int]] = {
    BLOCK: (False, "", "", LAYERS + 2),  # embedding and head are launched too
    "whole": (True, "", BLOCK, LAYERS),
    "selective": ("selective", "", BLOCK, LAYERS),
    "updated": (False, "optimizer=cpu", BLOCK, 2 * LAYERS + 3),  # chunks: matrices, and vectors but for the embedding
    "reduced": (False, "optimizer=cpu,grads=cpu", "updated", LAYERS + 2),
    "moved": (False, "optimizer=cpu,grads=cpu,params=cpu", "reduced", 2 * (LAYERS + 2)),
    "kept": (True, "activations=cpu", "whole", LAYERS),
}
"""How each time is measured: what is recomputed and offloaded, the kind that it is beyond, and how often it is in a
step."""
FAMILIES = ("gpt2", "llama")


def measure_host(device: torch.device) -> dict[str, float]:
    """Return the seconds by the names of `Hardware`, per block or as `HostTimes` says: the mean of both families."""
    found = dict.fromkeys(KINDS, 0.0)
    for family in FAMILIES:
        took = _steps(family, device)
        gc.collect()  # engines and models refer to each other
        for kind, (_, _, beyond, number) in KINDS.items():
            found[kind] += max(0.0, took[kind] - took.get(beyond, 0.0)) / number
    return {f"host_{kind}": total / len(FAMILIES) for kind, total in found.items()}


def _steps(family: str, device: torch.device) -> dict[str, float]:
    """Return the seconds of a step of each kind. They take turns: a host is slower at times, and differences count."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tokens = torch.zeros((1, TOKENS), dtype=torch.int64, device=device)
    with contextlib.ExitStack() as closing:
        engines = {}
        for kind, (recompute, offload, *_) in KINDS.items():
            engines[kind] = _engine(family, recompute, offload, device)
            closing.callback(engines[kind].close)
        for _, kind in itertools.product(range(WARMUP + STEPS), KINDS):
            seconds[kind].append(_step(engines[kind], tokens))
    return {kind: statistics.median(each[WARMUP:]) for kind, each in seconds.items()}


def _engine(family: str, recompute: object, offload: str, device: torch.device) -> Engine:
    """Return an engine of a tiny model."""
    shape = ModelConfig(family=family, layers=LAYERS, hidden=WIDTH, heads=2, vocab=512, tie=False)
    model = build(shape, TOKENS, "meta")
    precision = "bf16" if device.type == "cuda" else "fp32"
    return api.shard(
        *(model, "adamw", 1e-4), stage=3, precision=precision, clip=1.0, recompute=recompute, offload=offload,
        device=str(device), units=model.unit_modules(), defer_update=True,
    )  # fmt: skip


def _step(engine: Engine, tokens: torch.Tensor) -> float:
    """Return the seconds of a training step."""
    began = time.perf_counter()
    loss = engine(tokens, tokens)
    engine.backward(loss)
    engine.step()
    loss.item()
    return time.perf_counter() - began
