"""`activations.policy=auto` in a run: the memory of every rank's device, and one choice for all ranks."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from offload.placement import Placement
from zerocli.config import AUTO, Config, sharding_of
from zerocli.engine.precision import precision
from zerocli.errors import UserError
from zerocli.layout.recompute import WHOLE, Recompute
from zerocli.models.lora import adapted
from zerocli.plan.blocks.factory import build_external
from zerocli.plan.models.model import Model
from zerocli.plan.models.resolve import run_model
from zerocli.plan.models.traced import Traced, trace
from zerocli.plan.search.recompute import decide, room_here
from zerocli.plan.setup import Setup, setup_of
from zerocli.ranks.startup import STARTUP
from zerocli.ranks.store import read_all
from zerocli.ranks.words import by_words, ranks_of, runs

NOT_TRACED = "it was not traced"
_ROUNDS = itertools.count()
"""Every rank chooses equally often; each number is used once in the store."""


def choose_blocks(config: Config, traced: Model | str = NOT_TRACED, room: int | None = None) -> tuple[Recompute, str]:
    """Return which blocks a run recomputes, and why ("" unless the policy is `auto`).

    The same on all ranks: the smallest device decides. `traced` is what `trace_factory` returned, for a factory's
    model; `room` replaces this rank's memory. Collective.
    """
    asked = sharding_of(config).recompute
    if isinstance(asked, Recompute):
        return asked, ""
    setup = run_setup(config)
    room = device_room(config.train.gpu_memory, setup) if room is None else room
    problem = traced if config.model.external and isinstance(traced, str) else ""
    everyone = gather_values([room, problem], "agreeing on the blocks that are recomputed")
    if problems := [text for _, text in everyone if text]:
        return WHOLE, f"all blocks recomputed ({problems[0]})"
    try:
        model = run_model(config, setup) if isinstance(traced, str) else traced
        decided, reason = decide(model, setup, min(each for each, _ in everyone))
    except UserError as error:  # the engine says it in its own words, or knows better
        return WHOLE, f"all blocks recomputed (there is no plan: {error})"
    assert isinstance(decided.recompute, Recompute)
    return decided.recompute, reason


def ranks_here() -> tuple[int, int]:
    """Return the ranks, and how many of them are on each node; before the group is open, as the launcher says."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return world, math.gcd(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def run_setup(config: Config) -> Setup:
    world, local = ranks_here()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)  # as the engine does; else every rank would open a context on the first GPU
    name = precision(config.train.precision, device)[0].name
    return setup_of(config, device=device.type, precision=name, ranks=world, ranks_per_node=local)


def device_room(cap: int, setup: Setup) -> int:
    """Return the bytes that this rank may take of its device, at most `cap` (0: no cap): what is free, and what its
    allocator holds already.
    """
    if setup.device != "cuda":
        return room_here(setup.device, setup.local_ranks, cap)
    free, _ = torch.cuda.mem_get_info()
    sharing = -(-setup.local_ranks // torch.cuda.device_count())
    room = (free + torch.cuda.memory_reserved()) // sharing
    return min(room, cap) if cap else room


def gather_values(value: Any, stage: str) -> list[Any]:
    """Return every rank's JSON-able value; `stage` names the wait. Collective.

    Uses the store: a collective of NCCL would open a communicator that the engine may not need. Rank 0 reads all
    values, and the others read each that differs once.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    store, key = dist.distributed_c10d._get_default_store(), f"zerocli/values/{next(_ROUNDS)}"
    keys = [f"{key}/{rank}" for rank in range(dist.get_world_size())]
    with STARTUP.waiting(stage):
        store.set(keys[dist.get_rank()], json.dumps(value))
        if dist.get_rank() == 0:
            store.set(key, alike_text([each.decode() for each in read_all(store, keys)]))
        return from_alike(store.get(key).decode())


def alike_text(texts: Sequence[str]) -> str:
    """Return the JSON texts of all ranks as one, in which each that differs is written once."""
    found = by_words(dict(enumerate(texts)))
    return json.dumps([[text, runs(ranks)] for text, ranks in found.items()])


def from_alike(text: str) -> list[Any]:
    """Return the values of all ranks, from what `alike_text` returned."""
    found = {rank: each for each, where in json.loads(text) for rank in ranks_of(where)}
    return [json.loads(found[rank]) for rank in range(len(found))]


def trace_factory(config: Config, auto: Collection[str] = ()) -> Traced | str:
    """Trace an external model, if something is chosen by its memory; or say why there is no trace.

    `auto` are the keys that `--auto` chooses. Call it before the process group is opened: a trace may have its own.
    """
    if not config.model.external or (config.activations.policy != AUTO and not auto):
        return NOT_TRACED

    def make() -> Any:
        return adapted(build_external(config.model, config.train.seq), config)

    try:
        setup = replace(run_setup(config), offload=Placement())
        return trace(config.name, make, setup)
    except UserError as error:
        return f"it cannot be traced: {error}"
