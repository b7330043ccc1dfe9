"""What a plan reserves on a GPU: the allocator's arenas, and driver's counts of real runs on an H200."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from zerocli import config as configs
from zerocli.plan.arena import PAGE_NBYTES, Arena, Arenas
from zerocli.plan.build import plan_model
from zerocli.plan.inputs import shape_of
from zerocli.plan.ledger import Ledger, Storage
from zerocli.plan.setup import setup_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from random_cases import draw_cases

MIB = 2**20


def test_allocations_never_overlap_and_freed_ranges_join():
    rng, arena, live = random.Random(3), Arena(PAGE_NBYTES), {}
    for _ in range(3000):
        if live and rng.random() < 0.48:
            start = rng.choice(list(live))
            arena.give(start, live.pop(start))
        else:
            size = 512 * rng.randint(1, 200_000)
            start = arena.take(size)
            assert start + size <= arena.nbytes and start not in live
            live[start] = size
        ordered = sorted(live.items())
        assert all(at + size <= after for (at, size), (after, _) in zip(ordered, ordered[1:], strict=False))
    for start, size in live.items():
        arena.give(start, size)
    before = arena.nbytes
    arena.take(before)
    assert arena.nbytes == before  # all free ranges are one again


def test_the_smallest_range_that_holds_it_is_taken():
    arena = Arena(MIB)
    starts = [arena.take(size * MIB) for size in (3, 1, 8, 1)]
    arena.give(starts[0], 3 * MIB)
    arena.give(starts[2], 8 * MIB)
    assert arena.take(2 * MIB) == starts[0] and arena.take(5 * MIB) == starts[2]
    reserved = arena.nbytes
    arena.take(4 * MIB)  # 1 and 3 MiB are free, but not in one range
    assert arena.nbytes == reserved + 4 * MIB


def test_streams_and_small_allocations_have_arenas_of_their_own():
    arenas = Arenas()
    arenas.give(arenas.take(30 * MIB, "a"), 30 * MIB, "a")
    assert arenas.nbytes == 40 * MIB
    arenas.take(30 * MIB, "b")
    assert arenas.nbytes == 80 * MIB
    arenas.take(512, "a")
    assert arenas.nbytes == 82 * MIB


def test_a_ledger_follows_what_is_only_counted():
    ledger = Ledger(512, Arenas())
    kept = Storage(ledger, 10 * MIB)
    ledger.add({"activations": 70 * MIB})
    assert ledger.total == 80 * MIB and ledger.reserved == 80 * MIB
    ledger.add({"activations": -30 * MIB})
    again = Storage(ledger, 30 * MIB)
    assert ledger.reserved == 80 * MIB
    ledger.add({"activations": -40 * MIB})
    del kept, again
    assert ledger.total == 0
    rest = Storage(ledger, 80 * MIB)
    assert ledger.reserved == 80 * MIB and rest.nbytes == 80 * MIB


MEASURED = (3172, 2256, 2092, 5720, 6376, 2138, 4072, 6038, 3574, 4214, 8852, 14776, 1792, 4576, 2014)
"""MiB by the driver's count: `accuracy.py --random 20 --seed 23 --device cuda` on an H200, its first 15 cases."""


@pytest.mark.parametrize(("case", "measured"), [*zip(draw_cases(15, 23, "cuda"), MEASURED, strict=True)])
def test_plans_are_near_what_the_driver_counted(case, measured):
    config = configs.load("tiny", sets=(*case.sets, 'offload.nvme_path=["/nvme"]'), flags={})
    update = config.offload.update if config.offload.update != "auto" else "stream"
    setup = setup_of(config, device="cuda", precision=config.train.precision, ranks=1, ranks_per_node=1, update=update)
    if config.activations.policy == "auto":  # all had room to keep everything but the one that offloads checkpoints
        setup = setup_of(
            config, device="cuda", precision=config.train.precision, ranks=1, ranks_per_node=1, update=update,
            recompute="activations" in str(config.offload.placement),
        )  # fmt: skip
    plan = plan_model(shape_of(config.model, config.train.seq), setup)
    assert -0.01 <= plan.needed("hbm") / (measured * MIB) - 1 <= 0.06
