"""Learning-rate schedules: warm-up, then cosine, linear, constant or WSD. Pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from zerocli.config.schema import FIELDS, Config, OptimizerConfig, get


def make_schedule(optimizer: OptimizerConfig, steps: int) -> Callable[[int], float]:
    """Return step -> learning rate of a run of `steps`, which count from 1.

    `wsd` (warm-up, stable, decay) stays at `lr` and falls linearly over the last `decay` steps, or that share of them.
    """
    kind, lr, min_lr, decay = optimizer.schedule, optimizer.lr, optimizer.min_lr, optimizer.decay
    warmup = steps_of(optimizer.warmup, steps)
    falling = min(max(1, round(decay * steps) if decay <= 1 else int(decay)), max(1, steps - warmup))

    def at(step: int) -> float:
        if step <= warmup and optimizer.warmup_shape == "log" and warmup > 1:
            return lr * math.log(step) / math.log(warmup)
        if step <= warmup:
            return lr * step / warmup
        if kind == "constant":
            return lr
        if kind == "wsd":
            progress = min(1.0, max(0, step - (steps - falling)) / falling)
        else:
            progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        share = (1 + math.cos(math.pi * progress)) / 2 if kind == "cosine" else 1 - progress
        return lr * (min_lr + (1 - min_lr) * share)

    return at


def steps_of(number: float, steps: int) -> int:
    """Return a number of steps that is given as it is or, below 1, as a share of all `steps`."""
    return math.ceil(number * steps) if 0 < number < 1 else int(number)


def with_whole_steps(config: Config) -> Config:
    """Return the config with numbers of steps for keys that are given as a share of the run's steps."""
    shares = {key: get(config, key) for key, field in FIELDS.items() if field.metadata.get("share")}
    return config.with_values({key: steps_of(n, config.train.steps) for key, n in shares.items() if 0 < n < 1})
