"""Checksums on a GPU in one launch per transfer: a dozen launches per transfer would keep the host busy.

Imported only if triton is installed. The sums equal those of `offload.checksum`: integer addition has no order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WORDS = 2048
"""Words that one program holds at a time."""
_ROUNDS = 8
"""Iterations per program; each program adds its sums to memory once, at the end."""


def add_up(words: torch.Tensor, factors: torch.Tensor, first: int, each: int, count: int, found: torch.Tensor) -> None:
    """Add the checksums of `count` cells to `found`: the first has `first` words, the others `each`, the last the rest.

    `words` is flat int64 memory and holds exactly these cells.
    """
    grid = (triton.cdiv(max(first, each), _WORDS * _ROUNDS), count)
    _add_up[grid](words, factors, found, first, each, words.numel(), factors.numel(), _WORDS, _ROUNDS)


def note_difference(found: torch.Tensor, written: torch.Tensor, flag: torch.Tensor, number: int) -> None:
    """Set `flag`, if it is 0, to `number` where the checksums differ."""
    _note_difference[(1,)](found, written, flag, number, found.numel(), 1024)


@triton.jit(do_not_specialize=["first", "each", "total"])
def _add_up(
    words, factors, found, first, each, total, columns: tl.constexpr, block: tl.constexpr, rounds: tl.constexpr
):
    cell = tl.program_id(1).to(tl.int64)
    start = tl.where(cell > 0, first + (cell - 1) * each, 0)
    stop = tl.minimum(first + cell * each, total)
    place = tl.program_id(0) * (block * rounds) + tl.arange(0, block)
    total_sum = tl.zeros((block,), dtype=tl.int64)
    for _ in range(rounds):
        inside = start + place < stop
        word = tl.load(words + start + place, mask=inside, other=0)
        total_sum += word * tl.load(factors + place % columns)
        place += block
    tl.atomic_add(found + cell, tl.sum(total_sum))


@triton.jit(do_not_specialize=["number", "count"])
def _note_difference(found, written, flag, number, count, block: tl.constexpr):
    differs = tl.zeros((block,), dtype=tl.int32)
    for start in range(0, count, block):
        place = start + tl.arange(0, block)
        inside = place < count
        mine = tl.load(found + place, mask=inside, other=0)
        theirs = tl.load(written + place, mask=inside, other=0)
        differs |= (mine != theirs).to(tl.int32)
    before = tl.load(flag)
    # The sum of zeros and ones is above zero where any differs.
    tl.store(flag, tl.where((before == 0) & (tl.sum(differs) > 0), number, before))
