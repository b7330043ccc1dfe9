"""Learning-rate schedules: warm-up, then cosine, linear or constant. Pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES = ("cosine", "linear", "constant")


def make_schedule(kind: str, lr: float, steps: int, warmup: int = 0, min_lr: float = 0.0) -> Callable[[int], float]:
    """Return step -> learning rate; steps count from 1, `min_lr` is the final rate as a fraction of `lr`."""
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is not one of {', '.join(SCHEDULES)}")

    def at(step: int) -> float:
        if step <= warmup:
            return lr * step / warmup
        if kind == "constant":
            return lr
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        share = (1 + math.cos(math.pi * progress)) / 2 if kind == "cosine" else 1 - progress
        return lr * (min_lr + (1 - min_lr) * share)

    return at
