"""Law: delays anywhere in the schedule change no number."""

from __future__ import annotations

import random
import time

import pytest
from ranks import run_cases
from toys import train_uneven

from zerocli.engine.events import Probe


def _delayed(stage: int, recompute: bool, seed: int | None):
    import torch.distributed as dist

    dice = random.Random(None if seed is None else seed * 7 + dist.get_rank())
    met = set()

    def probe(name: str) -> None:
        met.add(name)
        if seed is not None and dice.random() < 0.3:
            time.sleep(dice.random() * 0.004)

    losses = train_uneven(steps=5, stage=stage, events=Probe(probe), recompute=recompute)
    return losses, sorted(met)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_random_delays_change_no_number(stage):
    plain, *delayed = run_cases(2, _delayed, [(stage, False, None), (stage, False, 1), (stage, True, 2)])
    met = ["forward", "gather", "optimizer", "reduce"]
    assert plain[0][1] == (met if stage else [name for name in met if name != "gather"])
    assert delayed == [plain, plain]
