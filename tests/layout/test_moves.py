"""Laws of the order of moves: no tier ever holds more than the placement before or after, if any order allows that."""

from __future__ import annotations

import random
from collections import Counter

from zerocli.layout.moves import Move, in_order

TIERS = ("hbm", "dram", "nvme")


def drawn(rng: random.Random) -> tuple[list[Move], Counter[str]]:
    """Draw moves, and what each tier holds before them: the pieces that move and others that stay."""
    held: Counter[str] = Counter({tier: rng.randrange(50) for tier in TIERS})
    moves = []
    for number in range(rng.randrange(1, 12)):
        source, target = rng.sample(TIERS, 2)
        moves.append(Move(number, "optimizer", rng.randrange(1, 30), source, target))
        held[source] += moves[-1].nbytes
    return moves, held


def test_no_tier_holds_more_than_before_or_after_but_for_one_piece():
    for seed in range(300):
        moves, held = drawn(random.Random(seed))
        after = Counter(held)
        for move in moves:
            after[move.target] += move.nbytes
            after[move.source] -= move.nbytes
        most = {tier: max(held[tier], after[tier]) for tier in TIERS}
        ordered, now = in_order(moves, held), Counter(held)
        assert sorted(ordered, key=lambda move: move.flat) == moves
        for at, move in enumerate(ordered):
            now[move.target] += move.nbytes
            if now[move.target] > most[move.target]:  # a cycle: none that is left would have fitted
                left = ordered[at:]
                before = {tier: now[tier] - (move.nbytes if tier == move.target else 0) for tier in TIERS}
                assert all(before[each.target] + each.nbytes > most[each.target] for each in left)
                assert move.nbytes == min(each.nbytes for each in left)
            now[move.source] -= move.nbytes
        assert now == after


def test_what_leaves_makes_room_for_what_comes():
    out, come = Move(0, "optimizer", 10, "hbm", "dram"), Move(1, "parameters", 8, "nvme", "hbm")
    assert in_order([come, out], {"hbm": 10, "nvme": 8}) == [out, come]
