"""Random configurations of small runs. Consecutive cases share one, so that its undisturbed run is made once."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from runs import TINY

NUM_SHARING = 8
"""Consecutive cases with one configuration."""
STEPS = 8
WATCHDOG_SECONDS = 15
PLACEMENTS = {
    0: [""],
    1: ["", "optimizer=cpu", "optimizer=nvme"],
    2: ["", "cpu", "nvme"],
    3: ["", "cpu", "nvme", "params=cpu,optimizer=nvme", "optimizer=nvme"],
}


@dataclass(frozen=True)
class Setup:
    """What a run is asked to do; the folders are added when it starts."""

    world: int
    sets: tuple[str, ...]
    steps: int = STEPS

    @property
    def key(self) -> str:
        return " ".join((f"ranks={self.world}", f"train.steps={self.steps}", *self.sets))

    def value(self, key: str) -> str:
        """Return what a key is set to; the last setting counts."""
        return next((each.partition("=")[2] for each in reversed(self.sets) if each.startswith(f"{key}=")), "")

    def having(self, *sets: str, world: int | None = None, steps: int | None = None) -> Setup:
        return replace(self, sets=(*self.sets, *sets), world=world or self.world, steps=steps or self.steps)


def draw_setup(seed: int, index: int) -> Setup:
    """Return the configuration of a case."""
    draw = random.Random(f"{seed}:setup:{index // NUM_SHARING}")
    world = draw.choice([1, 2, 2, 2, 2, 3])
    stage = draw.choice([0, 1, 2, 3, 3, 3])
    sets = [
        *TINY,
        f"zero.stage={stage}",
        f"offload.placement={draw.choice(PLACEMENTS[stage])}",
        f"offload.update={draw.choice(['auto', 'auto', 'cpu'])}",
        f"train.precision={draw.choice(['fp32', 'bf16', 'fp16'])}",
        f"train.accumulate={draw.choice([1, 1, 2])}",
        f"train.clip={draw.choice([0, 1])}",
        f"train.seed={draw.randrange(100)}",
        f"train.watchdog={WATCHDOG_SECONDS}",
        f"model.family={draw.choice(['gpt2', 'llama'])}",
        f"model.dropout={draw.choice([0, 0, 0.1])}",
        f"activations.policy={draw.choice(['keep', 'recompute'])}",
        f"optimizer.name={draw.choice(['adamw', 'adamw', 'sgd', 'nadam'])}",
        f"checkpoint.every={draw.choice([1, 2, 2, 3])}",
        f"checkpoint.keep={draw.choice([1, 2, 3])}",
        f"checkpoint.async={draw.choice(['true', 'true', 'false'])}",
        f"offload.verify={draw.choice(['true', 'false', 'false'])}",
    ]
    if world == 2 and draw.random() < 0.2:
        sets.append("parallel.tp=2")
    elif stage and world > 1 and draw.random() < 0.3:
        sets += ["parallel.shard_ranks=1", f"parallel.shard_states={draw.choice(['group', 'all', 'all'])}"]
    return Setup(world, tuple(sets))


def on_disk(setup: Setup) -> Setup:
    """Return the configuration with states on the nvme tier."""
    return setup.having("zero.stage=3", "offload.placement=nvme", "offload.update=auto")


def in_host_memory(setup: Setup) -> Setup:
    """Return the configuration with states on the dram tier."""
    return setup.having("zero.stage=3", "offload.placement=cpu", "offload.update=auto")
