"""What ranks tell each other in words: JSON in tensors of bytes, never pickles, which can run code when read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tiers.pages import memory_of
from zerocli.engine.startup import STARTUP

MOST_NBYTES = 64 << 20
"""More than any rank has to say; a length beyond it is not one of ours."""


def exchange_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order. Collective over a group of gloo's; values are what JSON can say."""
    with STARTUP.waiting("an exchange of control values"):
        return _exchange(json.dumps(value).encode(), group)


def _exchange(text: bytes, group: dist.ProcessGroup | None) -> list[Any]:
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([mine.numel()]), group=group)
    sizes = [int(length) for length in lengths]
    if not all(0 < size <= MOST_NBYTES for size in sizes):  # the same on all ranks: none of them waits for the others
        raise ValueError(f"ranks exchange up to {MOST_NBYTES} bytes at once, and these say {sizes}")
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(memory_of(text[:size]))) for text, size in zip(texts, sizes, strict=True)]


def first_problem(
    problem: Exception | None, kinds: Sequence[type[Exception]], group: dist.ProcessGroup | None
) -> Exception | None:
    """Return the first rank's problem, on every rank; None where no rank has one. Collective.

    A problem is of one of `kinds`, and travels as the kind's name and the problem's text.
    """
    if group is None:
        return problem
    named = {kind.__name__: kind for kind in kinds}
    said = None if problem is None else {"kind": type(problem).__name__, "text": str(problem)}
    if said is not None and said["kind"] not in named:
        raise TypeError(f"{said['kind']} is none of {', '.join(named)}") from problem
    for each in exchange_json(said, group):
        if each is not None:
            return named[each["kind"]](each["text"])
    return None
