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
EXCHANGE = "an exchange of control values"
"""The stage in which ranks wait for each other unless it has a name of its own."""


def collect_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value, in rank order, on the group's first rank, and nothing on the others. Collective.

    The group is one of gloo, or None: this process alone.
    """
    if group is None:
        return [value]
    text = json.dumps(value).encode()
    most = torch.tensor([len(text)])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    _check_sizes([nbytes := int(most)])
    padded = torch.frombuffer(bytearray(text.ljust(nbytes)), dtype=torch.uint8)  # JSON may end in spaces
    first = dist.get_rank(group) == 0
    everyone = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))] if first else []
    dist.gather(padded, everyone or None, group=group, group_dst=0)
    return [json.loads(bytes(memory_of(each))) for each in everyone]


def broadcast_json(value: Any, group: dist.ProcessGroup | None, source: int = 0) -> Any:
    """Return the value of rank `source` of the group. Collective over a gloo group, or None: this process alone."""
    if group is None:
        return value
    text = json.dumps(value).encode() if dist.get_rank(group) == source else b""
    size = torch.tensor([len(text)])
    dist.broadcast(size, group=group, group_src=source)
    _check_sizes([nbytes := int(size)])
    sent = torch.frombuffer(bytearray(text or nbytes), dtype=torch.uint8)
    dist.broadcast(sent, group=group, group_src=source)
    return json.loads(bytes(memory_of(sent)))


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
    _check_sizes([size * mine.itemsize for size in sizes])
    padded = mine.new_full((max(sizes),), padding)
    padded[: mine.numel()] = mine
    return gather(padded), sizes


def _check_sizes(sizes: list[int]) -> None:
    """Raise ValueError for a message that is too long; all ranks see the same sizes, so all raise and none waits."""
    if not all(0 < nbytes <= MOST_NBYTES for nbytes in sizes):
        raise ValueError(f"ranks exchange up to {MOST_NBYTES} bytes at once, and these say {sizes}")


def first_problem(
    problem: Exception | None, kinds: Sequence[type[Exception]], group: dist.ProcessGroup | None, stage: str = EXCHANGE
) -> Exception | None:
    """Return the first rank's problem, on every rank; None where no rank has one. Collective.

    Ranks wait for each other in `stage`.

    A problem is of one of `kinds`; it is sent as the kind's name and the problem's text.
    """
    if group is None:
        return problem
    named = {kind.__name__: kind for kind in kinds}
    said = None if problem is None else {"kind": type(problem).__name__, "text": str(problem)}
    if said is not None and said["kind"] not in named:
        raise TypeError(f"{said['kind']} is none of {', '.join(named)}") from problem
    world = dist.get_world_size(group)
    first = torch.tensor([world if said is None else dist.get_rank(group)])
    with STARTUP.waiting(stage):
        dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
        if int(first) == world:
            return None
        told = broadcast_json(said, group, int(first))
    return named[told["kind"]](told["text"])
