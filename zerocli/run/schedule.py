"""Learning-rate schedules: warm-up, then cosine, linear, constant or WSD. Pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from zerocli.config.schema import FIELDS, SCHEDULES, Config, get


def make_schedule(
    kind: str,
    lr: float,
    steps: int,
    warmup: float = 0,
    min_lr: float = 0.0,
    decay: float = 0.2,
    warmup_shape: str = "linear",
) -> Callable[[int], float]:
    """Return step -> learning rate; steps count from 1, `min_lr` is the final rate as a fraction of `lr`.

    A `warmup` below 1 is a share of the steps.
    `wsd` (warm-up, stable, decay) stays at `lr` and falls linearly over the last `decay` steps, or that share of them.
    """
    if kind not in SCHEDULES:
        raise ValueError(f"schedule {kind!r} is not one of {', '.join(SCHEDULES)}")
    warmup = steps_of(warmup, steps)
    falling = min(decay_steps(decay, steps), max(1, steps - warmup))

    def at(step: int) -> float:
        if step <= warmup and warmup_shape == "log" and warmup > 1:
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


def decay_steps(decay: float, steps: int) -> int:
    """Return the steps of a decay that is given as a share of `steps` (up to 1) or as a number of steps (above 1)."""
    return max(1, round(decay * steps) if decay <= 1 else int(decay))
