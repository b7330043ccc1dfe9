"""The engine for a loop of your own: `shard`, and the process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from zerocli.engine.engine import Engine
from zerocli.engine.optimizer.rules import OptimizerChoice, keywords_of
from zerocli.engine.recompute.compiled import tell_compiler
from zerocli.engine.settings import Keywords, Settings
from zerocli.errors import closest
from zerocli.ranks.attempts import never
from zerocli.ranks.store import CONNECT_SECONDS, open_store, stay_on_loopback


def shard(
    model: nn.Module,
    optimizer: OptimizerChoice = "adamw",
    lr: float | Callable[[int], float] | None = None,
    stage: int = 3,
    **settings: Unpack[Keywords],
) -> Engine:
    """Shard `model` over the data-parallel ranks and return the engine that trains it.

    This is `zerocli.shard` (zerocli/run/own_loop.py) without `offload="auto"`.
    """
    asked = settings_of(optimizer, lr, stage, settings)
    open_process_group(asked.device)
    tell_compiler()  # a user's own program may put torch.compile around the model
    return Engine(model, asked)


def settings_of(
    optimizer: OptimizerChoice, lr: float | Callable[[int], float] | None, stage: int, given: Mapping[str, Any]
) -> Settings:
    """Return the settings that keywords of `shard` mean: what is no field of `Settings` goes to the optimizer.

    Raises ValueError for a keyword that the optimizer does not take and that is probably a misspelled one of `shard`.
    """
    known = {key: value for key, value in given.items() if key in Settings.__dataclass_fields__}
    options = dict(known.pop("options", {})) | {k: v for k, v in given.items() if k not in known and k != "options"}
    takes = keywords_of(optimizer)
    for keyword in options:
        meant = closest(keyword, (*Settings.__dataclass_fields__, *takes, "example", "memory"))
        if takes and keyword not in takes and meant and meant not in takes:
            raise ValueError(f"shard takes no {keyword!r}; did you mean {meant}?")
    return Settings(stage=stage, optimizer=optimizer, lr=lr, options=options, **known)


def open_process_group(
    device: torch.device | str | None = None,
    connect_seconds: float = CONNECT_SECONDS,
    met: Callable[[dist.Store], None] = lambda store: None,
    told: Callable[[], str] = never,
) -> None:
    """Initialise the process group under torchrun, unless that was done already; a single process needs none.

    `met` is called with the ranks' store once all of them have come to it; `told` is as in `join_attempt`.
    """
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    on_gpu = torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda")
    backend = "gloo"
    if on_gpu:
        index = int(os.environ.get("LOCAL_RANK", "0"))
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
        torch.cuda.set_device(index % torch.cuda.device_count())
        backend = "gloo" if shared else "nccl"  # NCCL refuses two ranks on one GPU
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stay_on_loopback()
    store = open_store(rank, world, connect_seconds, told)
    met(store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
