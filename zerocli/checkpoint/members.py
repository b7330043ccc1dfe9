"""The ranks of both axes that save and load one model together, and their process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from zerocli.ranks.startup import STARTUP
from zerocli.ranks.store import connecting_when_needed

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


def rank_of(engine: Engine) -> int:
    """Return this rank's index among those that hold a part of the engine's model. The first call is collective."""
    return engine.ranks.index(dist.get_rank() if dist.is_initialized() else 0)


def control_group(engine: Engine) -> dist.ProcessGroup | None:
    """Return a gloo group of the members, for plans and results; None for a single process. Collective."""
    if not dist.is_initialized():
        return None
    ranks = list(engine.ranks)
    some = len(ranks) < dist.get_world_size()  # the other ranks do not call this
    with STARTUP.waiting("making the process group of checkpoints"), connecting_when_needed():
        group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=some)
    return group
