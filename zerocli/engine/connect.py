"""Connecting: the channel between the ranks of an engine, and their groups."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from zerocli.engine.agreement import Channel, Member
from zerocli.engine.comm import Collectives, subgroup
from zerocli.engine.events import Events
from zerocli.engine.settings import Settings
from zerocli.layout.shards import check_shard_ranks
from zerocli.ranks.startup import STARTUP


def open_channel(
    collectives: Collectives, uneven: bool | None, member: Member, number: int, say: Callable[[], str]
) -> Channel | None:
    """Return the channel between the ranks, with a slot for the engine; None where ranks do not exchange messages.

    `uneven` is as in `Settings`. `number` stands for what is sharded and how, and must be the same on all ranks; `say`
    describes it. Collective.
    """
    if collectives.world == 1 or not (uneven or collectives.backend == "gloo"):
        return None
    channel = Channel.of(collectives)
    if collectives.device.type == "cpu" and uneven is not False:
        # With messages and collectives in one group, neither runs beside the other on the processor that computes.
        # Without messages before each gather, ranks may gather differently: then messages need a group of their own.
        collectives.issue_by(channel.gloo)
    channel.meet_to_shard(member, collectives, number, say)
    return channel


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


def sharded_as(model: nn.Module, settings: Settings) -> tuple[int, Callable[[], str]]:
    """Return a number that stands for the settings, which must be equal on all ranks, and their words.

    Whether the models are alike is compared where they are built: see `refuse_different_models`.
    """
    names = (
        "stage",
        "shard_ranks",
        "shard_states",
        "offload",
        "precision",
        "accumulate",
        "clip",
        "reduce",
        "lr",
        "weight_decay",
        "seed",
    )
    given = {name: getattr(settings, name) for name in names}
    plain = {name: value for name, value in given.items() if isinstance(value, int | float | str | None)}
    words = ", ".join(f"{name}={value!r}" for name, value in plain.items())
    return zlib.crc32(words.encode()), lambda: f"shards {type(model).__name__} with {words}"
