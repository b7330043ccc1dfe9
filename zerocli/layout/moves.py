"""Moves: which pieces change their tier when a placement replaces another, and in what order. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerocli.layout.flats import FlatSpec, Sizing


@dataclass(frozen=True)
class Move:
    """One piece on its way to another tier."""

    flat: int
    """The number of its flat."""
    kind: str
    nbytes: int
    source: str
    target: str


def moves_between(before: Sequence[FlatSpec], after: Sequence[FlatSpec], sizing: Sizing) -> list[Move]:
    """Return the pieces whose tier differs, in an order that `in_order` describes."""
    held: Counter[str] = Counter()
    moves = []
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        for kind, nbytes in old.pieces(sizing).items():
            held[old.tiers[kind]] += nbytes
            if old.tiers[kind] != new.tiers[kind]:
                moves.append(Move(number, kind, nbytes, old.tiers[kind], new.tiers[kind]))
    return in_order(moves, held)


def in_order(moves: Sequence[Move], held: Mapping[str, int]) -> list[Move]:
    """Return the moves in an order in which no tier ever holds more than before or after them, if there is one.

    `held` are the bytes on each tier before. A piece is on both tiers until it has moved. Where every piece that is
    left waits for room that another one takes, the smallest moves first: it is then all that is on a tier too much.
    """
    now, most = Counter(held), Counter(held)
    for move in moves:
        most[move.source] -= move.nbytes
        most[move.target] += move.nbytes
    most = most | Counter(held)
    left, ordered = list(moves), []
    while left:
        fitting = (move for move in left if now[move.target] + move.nbytes <= most[move.target])
        chosen = next(fitting, None) or min(left, key=lambda move: move.nbytes)
        left.remove(chosen)
        ordered.append(chosen)
        now[chosen.target] += chosen.nbytes
        now[chosen.source] -= chosen.nbytes
    return ordered
