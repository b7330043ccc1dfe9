"""Laws of the network's model and of the schedule of a step's collectives, by arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from test_seconds import EIGHT, MODEL, timed

from zerocli.plan.time.hardware import PRESETS
from zerocli.plan.time.network import PROTOCOLS, Group
from zerocli.plan.time.schedule import UnitTimes, replay

NODE = PRESETS["h100"]
RANKS = (8, 64, 512, 4096, 16384)


def test_a_large_gather_takes_what_its_bytes_take():
    """Inside a node over its links, between nodes over all of its adapters; delays are a small part of it."""
    assert Group(8, 8).gather(64e9, NODE) == pytest.approx(64e9 * 7 / 8 / (NODE.links * 1e9), rel=1e-3)
    assert Group(64, 8).gather(64e9, NODE) == pytest.approx(64e9 * 7 / 8 / (8 * NODE.network * 1e9), rel=0.01)
    # Ranks of one node in other groups have their own adapters: this group has one of the eight.
    assert Group(8, 1).gather(64e9, NODE) == pytest.approx(64e9 * 7 / 8 / (NODE.network * 1e9), rel=1e-3)
    assert Group(1, 8).gather(64e9, NODE) == Group(1, 1).all_reduce(64e9, NODE) == 0.0


def test_the_delay_of_a_ring_grows_with_its_ranks_and_that_of_a_tree_with_its_nodes_logarithm():
    rings = [Group(ranks, 8).gather(1.0, NODE) for ranks in RANKS]
    trees = [Group(ranks, 8).all_reduce(1.0, NODE) for ranks in RANKS]
    assert rings[-1] / rings[-2] == pytest.approx(4, rel=0.05)
    steps = [later - before for before, later in itertools.pairwise(trees)]
    assert max(steps) < 4 * min(steps) and trees[-1] < 20 * trees[0] < rings[-1]
    begin, link, network = PROTOCOLS[0].ring
    assert rings[0] == pytest.approx((begin + 7 * link) * 1e-6, rel=1e-3) and network > link


def test_pieces_cost_delays_and_no_bytes():
    group = Group(512, 8)
    one, many = (group.gather(1e9, NODE, pieces) for pieces in (1, 100))
    assert one < many < 100 * group.gather(1e7, NODE) * 1.001
    assert group.gather(1e13, NODE, 100) == pytest.approx(group.gather(1e13, NODE), rel=0.05)


def drawn(drawing: random.Random) -> list[UnitTimes]:
    return [
        UnitTimes(*(drawing.choice([0.0, drawing.random()]) for _ in range(4))) for _ in range(drawing.randint(1, 9))
    ]


def followed(units: list[UnitTimes], buffers: int, shared: bool) -> float:
    """Return when all is done, by following every piece of work and what it waits for, one event after another."""
    done: dict[tuple[str, int], float] = {}
    links: list[tuple[str, int]] = []  # in the order in which they are issued
    for at in range(len(units)):
        first = range(at + buffers) if at == 0 else (at + buffers - 1,)
        links += [("gather", each) for each in first if each < len(units)]
        links.append(("reduce", at))
    free = {"links": 0.0, "across": 0.0}
    for kind, at in links:
        if kind == "gather":
            ready = done["compute", at - buffers] if at >= buffers else 0.0
            free["links"] = done["gather", at] = max(free["links"], ready) + units[at].gather
            continue
        before = done["compute", at - 1] if at else 0.0
        done["compute", at] = max(before, done["gather", at]) + units[at].compute
        if not units[at].reduce and not units[at].across:
            continue
        free["links"] = max(free["links"], done["compute", at]) + units[at].reduce
        free["across"] = max(free["across"], free["links"]) + units[at].across
        if shared:
            free["links"] = free["across"]
    return max(*done.values(), *free.values())


def test_the_schedule_is_what_follows_from_its_rules():
    drawing = random.Random(3)
    for _ in range(300):
        units, buffers, shared = drawn(drawing), drawing.randint(1, 4), drawing.random() < 0.5
        found = replay(units, buffers, shared=shared)
        assert found == pytest.approx(followed(units, buffers, shared))
        compute = sum(each.compute for each in units)
        alone = sum(each.gather + each.reduce for each in units)
        everything = compute + alone + sum(each.across for each in units)
        assert max(compute, alone) <= found + 1e-12 and found <= everything + 1e-12


def test_what_is_hidden():
    """Of equal units all but the first gather and the last reduction, if compute takes longer than both."""
    units = [UnitTimes(1.0, 0.3, 0.2)] * 10
    assert replay(units, 2) == pytest.approx(10 + 0.3 + 0.2)
    assert replay(units, 2, ahead=1.0) == pytest.approx(10 + 0.2)
    assert replay([UnitTimes(1.0, 3.0)] * 10, 2) == pytest.approx(30 + 1)  # bound by the links
    assert replay([UnitTimes(1.0, 3.0)] * 10, 1) == pytest.approx(40)  # one buffer: one after the other
    # Sums across groups beside gathers inside, and after them if both cross nodes.
    both = [UnitTimes(1.0, 0.6, 0.0, 0.6)] * 10
    assert replay(both, 2) == pytest.approx(10 + 0.6 + 0.6) and replay(both, 2, shared=True) > 12


def test_groups_of_a_node_keep_what_plain_sharding_loses_on_many_nodes():
    asked = {"hardware": NODE, "batch": 2, "seq": 8192}
    plain = {ranks: timed(EIGHT, ranks=ranks, **asked) for ranks in RANKS}
    groups = {ranks: timed(EIGHT, ranks=ranks, shard_ranks=8, **asked) for ranks in RANKS}
    assert plain[8].seconds == groups[8].seconds and plain[8].hidden > 0.9
    seconds = [plain[ranks].seconds for ranks in RANKS[1:]]
    assert seconds == sorted(seconds) and plain[16384].hidden < 0.5
    assert groups[16384].seconds < 1.1 * groups[64].seconds < plain[16384].seconds


def test_one_rank_waits_for_no_network():
    slow = dataclasses.replace(NODE, links=1e-6, network=1e-6)
    assert timed(MODEL, ranks=1, hardware=slow).seconds == timed(MODEL, ranks=1, hardware=NODE).seconds
    assert timed(MODEL, ranks=1).hidden == 1.0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_groups_on_one_node_are_not_faster_over_the_same_links(stage):
    """Sums across groups then pass the links of the gathers, and both together move no less."""
    asked = {"hardware": PRESETS["rtx4090"], "stage": stage, "ranks": 4, "batch": 1, "seq": 128}
    plain, halves = timed(EIGHT, **asked), timed(EIGHT, shard_ranks=2, **asked)
    assert plain.bound == "collectives" and halves.seconds >= plain.seconds
