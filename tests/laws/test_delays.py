"""Law: delays anywhere in the schedule change no number."""

from __future__ import annotations

import os
import random
import time

from ranks import run_ranks
from toys import train_uneven

from zerocli.engine.events import Probe

LONG = "ZEROCLI_TEST_LONG" in os.environ


def _delayed(stage: int, recompute: bool, seed: int | None):
    import torch.distributed as dist

    dice = random.Random(None if seed is None else seed * 7 + dist.get_rank())
    met = set()

    def probe(name: str) -> None:
        met.add(name)
        if seed is not None and dice.random() < 0.3:
            time.sleep(dice.random() * 0.004)

    losses = train_uneven(steps=8, stage=stage, events=Probe(probe), recompute=recompute)
    return losses, sorted(met)


def test_random_delays_change_no_number():
    for stage in (0, 1, 2, 3):
        expected = ["forward", "gather", "optimizer", "reduce"] if stage else ["forward", "optimizer", "reduce"]
        plain = run_ranks(2, _delayed, stage, False, None)
        assert plain[0][1] == expected
        for seed in (1, 2) if LONG or stage in (1, 3) else (1 + (stage == 2),):
            assert run_ranks(2, _delayed, stage, seed == 2, seed) == plain, f"stage {stage}"
