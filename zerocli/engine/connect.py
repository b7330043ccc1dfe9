"""Connecting: the gatherer, the reducer and the agreement between ranks, made together for the current flats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerocli.engine.agreement import Agreement
from zerocli.engine.comm import Collectives
from zerocli.engine.events import Events
from zerocli.engine.gather import Gatherer
from zerocli.engine.reduce import Reducer
from zerocli.engine.startup import STARTUP
from zerocli.engine.streams import Waits
from zerocli.engine.tensor_parallel import TensorParallel
from zerocli.engine.unit import Flat, Unit
from zerocli.layout.flats import Sizing


class Connected(NamedTuple):
    """What issues the collectives of the current flats."""

    gatherer: Gatherer
    reducer: Reducer
    agreement: Agreement


def connect(
    units: list[Unit],
    sizing: Sizing,
    collectives: Collectives,
    tensor_parallel: TensorParallel,
    device: torch.device,
    waits: Waits,
    events: Events,
    uneven: bool | None,
    deferred: bool,
    before_gather: Callable[[Flat], None],
    look_ahead: Callable[[Sequence[Unit], Sequence[Unit]], None],
    unexpected: Callable[[str], None],
) -> Connected:
    """Return the gatherer, the reducer and the agreement for the current flats of the units.

    `uneven` is as in `Settings`, `deferred` is its `defer_update`. `before_gather` and `look_ahead` are the gatherer's,
    `unexpected` the reducer's.
    """
    flats = [flat for unit in units for flat in unit.flats]
    places = {id(flat): place for place, flat in enumerate(flats)}
    gatherer = Gatherer(
        units,
        collectives,
        device,
        waits,
        events,
        sizing,
        deferred,
        before_gather=before_gather,
        look_ahead=look_ahead,
        agree=lambda flat: agreement.agree(places[id(flat)]),
    )
    together = gatherer.moves and collectives.world > 1
    together = together and (collectives.backend == "gloo" if uneven is None else uneven)
    reducer = Reducer(
        units,
        sizing,
        collectives,
        device,
        waits,
        events,
        # If parameters are gathered, hooks report when a unit's backward is done; otherwise its last gradient does.
        eager=not gatherer.moves,
        together=together,
        tensor_parallel=tensor_parallel,
        unexpected=unexpected,
    )

    def about(place: int) -> tuple[str, str]:
        """Return (kind, what) of the collective being prepared: the gather of the flat at `place`, or a reduction."""
        if place >= 0:
            return "all_gather", f"parameters of {flats[place].unit.title}"
        flat = reducer.newest
        return ("reduce_scatter", f"gradients of {flat.unit.title}") if flat is not None else ("all_gather", "")

    agreement = Agreement(
        _control(collectives) if together else collectives,
        together,
        waits,
        ready=lambda: reducer.ready,
        launch=reducer.launch,
        join=lambda place: gatherer.join(flats[place]),
        about=about,
        name_of=lambda place: flats[place].unit.title,
    )
    return Connected(gatherer, reducer, agreement)


def _control(collectives: Collectives) -> Collectives:
    """Return collectives for control values over gloo, so that the host does not wait for the GPU."""
    if collectives.backend == "gloo":
        return collectives
    ranks = dist.get_process_group_ranks(collectives.group or dist.group.WORLD)
    with STARTUP.waiting("making a process group for control values"):
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return Collectives(group, torch.device("cpu"))
