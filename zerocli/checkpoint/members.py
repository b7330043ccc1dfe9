"""The ranks that save and load one model together, data-parallel and tensor-parallel, and the group they plan over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from zerocli.engine import Engine


@dataclass(frozen=True)
class Members:
    """Global ranks, and this one's place among them."""

    ranks: tuple[int, ...]
    rank: int

    @property
    def world(self) -> int:
        return len(self.ranks)


def members_of(engine: Engine) -> Members:
    """Return the ranks that hold a part of the engine's model."""
    here = dist.get_rank() if dist.is_initialized() else 0
    axis = getattr(engine, "tensor_parallel", None)
    split = axis.world if axis is not None else 1
    if engine.collectives.world * split == 1:
        return Members((here,), 0)
    if split > 1:
        if engine.collectives.world * split != dist.get_world_size():
            raise ValueError("a checkpoint of a model split by tp needs all ranks to be the model's")
        return Members(tuple(range(dist.get_world_size())), here)
    ranks = dist.get_process_group_ranks(engine.collectives.group or dist.group.WORLD)
    return Members(tuple(ranks), ranks.index(here))


def control_group(engine: Engine) -> dist.ProcessGroup | None:
    """Return a gloo group of the members, for plans and results; None for a process without others. Collective."""
    if not dist.is_initialized():
        return None
    ranks = list(members_of(engine).ranks)
    some = len(ranks) < dist.get_world_size()  # the others do not come here
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=some)
