"""Exchange of JSON values between ranks, as byte tensors; never pickles, which can run code when loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tiers.pages import memory_of
from zerocli.ranks.startup import STARTUP

MOST_NBYTES = 64 << 20
"""Maximum size of a message; a larger length is rejected as invalid."""


def exchange_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, in rank order. Collective over a gloo group; values must be JSON-serializable."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, tensor, group=group)
        return torch.stack(everyone)

    with STARTUP.waiting("an exchange of control values"):
        return gather_json(value, gather)


def gather_json(
    value: Any, gather: Callable[[torch.Tensor], torch.Tensor], device: torch.device | None = None
) -> list[Any]:
    """Return every rank's value, in rank order; `gather` stacks every rank's copy of a tensor on `device`. Collective.

    Without a device the tensors are on the CPU.
    """
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device or "cpu")
    texts, sizes = gather_padded(mine, gather)
    return [json.loads(bytes(memory_of(text[:size]))) for text, size in zip(texts.cpu(), sizes, strict=True)]


def gather_padded(
    mine: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor], padding: int = 0
) -> tuple[torch.Tensor, list[int]]:
    """Return every rank's one-dimensional tensor, stacked and padded to the longest, and their lengths. Collective."""
    sizes = gather(torch.tensor([mine.numel()], device=mine.device)).flatten().tolist()
    # All ranks see the same sizes, so all raise and none waits.
    if not all(0 < size * mine.itemsize <= MOST_NBYTES for size in sizes):
        raise ValueError(f"ranks exchange up to {MOST_NBYTES} bytes at once, and these say {sizes}")
    padded = mine.new_full((max(sizes),), padding)
    padded[: mine.numel()] = mine
    return gather(padded), sizes


def first_problem(
    problem: Exception | None, kinds: Sequence[type[Exception]], group: dist.ProcessGroup | None
) -> Exception | None:
    """Return the first rank's problem, on every rank; None where no rank has one. Collective.

    A problem is of one of `kinds`; it is sent as the kind's name and the problem's text.
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
