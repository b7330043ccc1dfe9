"""Connecting: the gatherer, the reducer and the agreement between ranks, made together for the current flats."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from offload.mover import StagedStore
from zerocli.engine.agreement import Agreement, Channel, Member
from zerocli.engine.comm import Collectives, subgroup
from zerocli.engine.context import Context
from zerocli.engine.events import Events
from zerocli.engine.settings import Settings
from zerocli.engine.streams import StreamEvent
from zerocli.engine.units.gather import Gatherer
from zerocli.engine.units.reduce import Reducer
from zerocli.engine.units.unit import Flat, Unit
from zerocli.layout.shards import check_shard_ranks
from zerocli.ranks.startup import STARTUP

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


class Connected(NamedTuple):
    """What issues the collectives of the current flats."""

    gatherer: Gatherer
    reducer: Reducer
    agreement: Agreement


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


def connect(engine: Engine, context: Context) -> Connected:
    """Return the gatherer, the reducer and the agreement for the current flats of the engine's units."""
    units, channel, uneven = engine.units, engine.channel, engine.settings.uneven
    flats = [flat for unit in units for flat in unit.flats]
    places = {id(flat): place for place, flat in enumerate(flats)}
    gatherer = Gatherer(
        units,
        context,
        engine.settings.defer_update,
        before_gather=lambda flat, own=None, free=None: _apply_pending_updates(engine, flat, own, free),
        look_ahead=lambda now, then: _look_ahead(engine, now, then),
        agree=lambda flat: agreement.agree(places[id(flat)]),
    )
    active = channel is not None and gatherer.moves and uneven is not False
    reducer = Reducer(
        units,
        context,
        # If parameters are gathered, hooks report when a unit's backward is done; otherwise its last gradient does.
        eager=not gatherer.moves,
        # The collectives of several engines are launched where their ranks exchange messages, in one order.
        together=lambda: active or (channel is not None and channel.num_slots > 1),
        finish_meeting=channel.finish_meeting if channel is not None else lambda: None,
        unexpected=engine.passes.join,
    )

    agreement = Agreement(engine, flats, gatherer, reducer, active)
    return Connected(gatherer, reducer, agreement)


def _apply_pending_updates(engine: Engine, flat: Flat, own: torch.Tensor | None, free: StreamEvent | None) -> bool:
    """Issue the rest of a flat's update; the host may have to wait for states on a disk, which delays compute.

    With `own`, memory for this rank's parameters that is free after an event, return whether they are written there.
    """
    engine.updater.run_ahead()
    if not engine.updater.has_pending_update(flat):
        return False
    with engine.waits.waiting("optimizer"):
        if own is not None and free is not None:
            return engine.updater.issue_into(flat, own, free)
        engine.updater.issue_updates(flat)
    return False


def _look_ahead(engine: Engine, now: Sequence[Unit], then: Sequence[Unit]) -> None:
    """Tell the mover which parameters are used next: `now` in this step, `then` in the next one.

    Parameters that this step or a pending update will still change are not read ahead.
    """
    soon = [(flat, not engine.updater.has_pending_update(flat)) for unit in now for flat in unit.flats]
    later = [(flat, not flat.trainable) for unit in then for flat in unit.flats]
    uses = [(f.param_store, read) for f, read in (*soon, *later) if isinstance(f.param_store, StagedStore)]
    if uses:
        engine.mover.expect(uses)


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
