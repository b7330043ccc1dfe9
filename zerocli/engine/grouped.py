"""The collectives of all data-parallel ranks in two steps: inside groups of neighbours, and across groups.

Every byte crosses between groups once, not once per rank of a group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zerocli.engine.comm import Collectives, Pending, subgroup
from zerocli.engine.events import Events
from zerocli.layout.shards import check_shard_ranks
from zerocli.ranks.startup import STARTUP


class Grouped:
    """All ranks, in an order in which the slices of the ranks with one position in their groups are adjacent.

    So the slices that a rank gathers across groups are one slice of what it gathers inside its group.
    """

    def __init__(self, inside: Collectives, across: Collectives) -> None:
        self.inside, self.across, self.device = inside, across, inside.device
        self.world = inside.world * across.world
        self.rank = inside.rank * across.world + across.rank

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str = "") -> Pending:
        """See `Collectives.all_gather`. On a CPU the host waits for the first step."""
        part = self._part(full)
        self.across.all_gather(part, shard, what).wait()
        return self.inside.all_gather(full, part, what)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, what: str = "") -> Pending:
        """See `Collectives.reduce_scatter`; overwrites `full`. On a CPU the host waits for the first step."""
        part = self._part(full)
        self.inside.reduce_scatter(part, full, what).wait()
        return self.across.reduce_scatter(shard, part, what)

    def all_reduce(self, tensor: torch.Tensor, what: str = "") -> Pending:
        """See `Collectives.all_reduce`; each rank sums its slice across groups. On a CPU the host waits."""
        part = self._part(tensor)
        self.inside.reduce_scatter(part, tensor, what).wait()
        self.across.all_reduce(part, what).wait()
        return self.inside.all_gather(tensor, part, what)

    def _part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a buffer inside its group."""
        each = full.numel() // self.inside.world
        return full[self.inside.rank * each : (self.inside.rank + 1) * each]


Shards = Collectives | Grouped
"""The ranks over which states are partitioned."""


def open_groups(collectives: Collectives, shard_ranks: int, events: Events) -> tuple[Collectives, Collectives]:
    """Return the ranks inside this rank's group, and those across groups that have its position.

    A group is `shard_ranks` neighbours. 0 stands for one group of all ranks, which is not made again. Collective.
    """
    ranks, device = collectives.world, collectives.device
    check_shard_ranks(shard_ranks, ranks)
    if shard_ranks in (0, ranks):
        return collectives, Collectives.alone(device)
    group = collectives.group or dist.group.WORLD
    assert group is not None
    everyone = dist.get_process_group_ranks(group)
    number, place = divmod(collectives.rank, shard_ranks)

    def axis(members: list[int]) -> Collectives:
        if len(members) == 1:
            return Collectives.alone(device)
        return Collectives(subgroup(group, members), device, events)

    with STARTUP.waiting("making the process groups of shards and replicas"):
        neighbours = everyone[number * shard_ranks : (number + 1) * shard_ranks]
        return axis(neighbours), axis(everyone[place::shard_ranks])
