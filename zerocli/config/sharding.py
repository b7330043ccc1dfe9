"""`Sharding`: the description of how a model is sharded, placed and stepped. (No torch.)

`sharding_of` makes it from a config. The engine's `Settings` and the plan's `Setup` both extend it, so what they share
is mapped from the config once and has one default.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.placement import ACTIVATIONS, Placement
from zerocli.config.placement import read_placement
from zerocli.config.schema import (
    FIELDS,
    MASTERS,
    SHARD_STATES,
    Config,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    get,
)
from zerocli.errors import UserError, user_error
from zerocli.layout.codecs import BASES, CODECS
from zerocli.layout.flats import Sizing
from zerocli.layout.recompute import NOTHING, WHOLE, Recompute, read_recompute
from zerocli.layout.shards import check_shard_ranks
from zerocli.layout.sizes import count_of
from zerocli.layout.stage import stage as stage_of


def _of(key: str) -> Any:
    """Return a field that is a key of the config, with its default."""
    return field(default=FIELDS[key].default, metadata={"key": key})


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded, placed and stepped; the defaults are the config's.

    Only `options` differ: they default to none, while a config takes them from its `optimizer` section.
    """

    stage: int = _of("zero.stage")
    offload: Placement = _of("offload.placement")
    """Placement of what the stage partitions; a str is parsed: `cpu`, `nvme`, `params=cpu,optimizer=hbm:20GiB+nvme`."""
    precision: str = _of("train.precision")
    """`fp32`, `bf16`, `fp16`, or `auto`: bf16 where the device supports it."""
    optimizer: str = _of("optimizer.name")
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of the optimizer: betas, eps, momentum, ..."""
    master: str = _of("optimizer.master")
    """How the fp32 master of bf16 parameters is kept: `split`, as a 16-bit remainder beside them, or `fp32`."""
    accumulate: int = _of("train.accumulate")
    """Backward passes per step; their gradients are averaged, in fp32 if there is more than one."""
    clip: float | None = _of("train.clip")
    """Largest global gradient norm; None: gradients are not clipped."""
    recompute: bool | int | str | Recompute = _of("activations.policy")
    """Keep only the input of each repeated block and rerun its forward in backward; a number: of that many blocks, the
    first ones; `selective`: but keep the outputs of matrix products and attention; a `Recompute` says how many blocks
    of each. A placement of `activations`, which says where the inputs are kept, implies True. `auto`: not decided yet;
    a plan decides by the device's memory (zerocli/plan/search/recompute.py), and no engine takes it."""
    partition_activations: bool = _of("activations.partition")
    """Whether tensor-parallel ranks, whose inputs are equal, each keep only a part of them."""
    bucket_nbytes: int = _of("zero.bucket")
    """Size of one reduction bucket; there are two."""
    gather_buffers: int = _of("zero.buffers")
    """Gather buffers for each size of unit."""
    reduce: str = _of("zero.reduce")
    """dtype of gradients on the wire: `compute` or `fp32`."""
    update: str = _of("offload.update")
    """Where offloaded states are updated: `cpu`, `stream` (through the device), or by measurement."""
    nvme_path: tuple[str, ...] = _of("offload.nvme_path")
    """Folders of the nvme tier; one may be given as it is."""
    staging_nbytes: int = _of("offload.staging")
    """Device (or host) memory through which offloaded states are streamed for their update."""
    read_ahead_nbytes: int = _of("offload.read_ahead")
    """Host memory for prefetched copies of parameters on disk; 0: none."""
    verify: bool = _of("offload.verify")
    """Whether reads from other tiers are compared with checksums of what was written; a mismatch raises
    `zerocli.Corrupted`."""
    base: str = _of("lora.base")
    """What frozen matrices of repeated blocks are stored in: `nf4`, `int8`, or empty: as they compute."""
    tp: int = _of("parallel.tp")
    """Number of neighbouring ranks that split each layer between them."""
    shard_ranks: int = _of("parallel.shard_ranks")
    """Number of neighbouring data-parallel ranks over which states are partitioned; other groups of as many hold
    copies. 0: all of them."""
    shard_states: str = _of("parallel.shard_states")
    """With `shard_ranks`: `group`, or `all`: gradients and optimizer states are partitioned over all ranks, and each
    group keeps a copy of the parameters, from which its ranks gather."""

    def __post_init__(self) -> None:
        if self.base not in BASES:
            raise ValueError(f"base {self.base!r} is not one of {', '.join(filter(None, BASES))}")
        if self.shard_states not in SHARD_STATES:
            raise ValueError(f"shard_states {self.shard_states!r} is not one of {', '.join(SHARD_STATES)}")
        object.__setattr__(self, "offload", read_placement(self.offload))
        object.__setattr__(self, "recompute", read_recompute(self.recompute))
        folders: Any = self.nvme_path
        folders = (folders,) if isinstance(folders, str | os.PathLike) else folders
        object.__setattr__(self, "nvme_path", tuple(map(os.fspath, folders)))

    @property
    def recomputed(self) -> Recompute:
        """Which blocks are recomputed: those asked for, or all if only a place for their inputs is given.

        Raises ValueError while that is not decided, or where it is a choice of modules.
        """
        if not isinstance(self.recompute, Recompute):
            raise ValueError(f"recompute={self.recompute!r} is decided by a device's memory, and none is given")
        return self.recompute or (WHOLE if ACTIVATIONS in self.offload.shares else NOTHING)

    @property
    def codec(self) -> str:
        """The codec of frozen matrices; empty if they are stored as they compute."""
        return self.base if self.base in CODECS else ""

    def num_copies(self, ranks: int) -> int:
        """Return the number of groups of these data-parallel ranks that each keep a copy of the parameters."""
        spread = self.shard_states == "all" and 0 < self.shard_ranks < ranks
        return ranks // self.shard_ranks if spread else 1

    def sizing_at(
        self, world: int, num_states: int, device: str, precision: str, fused_update: bool, update_on_cpu: bool = False
    ) -> Sizing:
        """Return what determines the buffer sizes of an engine on `world` data-parallel ranks of this device type.

        `precision` is the one that `auto` stands for; only bf16 is the upper half of fp32.
        """
        if self.master not in MASTERS:
            raise ValueError(f"master {self.master!r} is not one of {', '.join(MASTERS)}")
        return Sizing(
            stage_of(self.stage),
            world,
            num_states,
            self.accumulate,
            self.reduce,
            self.bucket_nbytes,
            self.gather_buffers,
            self.staging_nbytes,
            device,
            update_on_cpu,
            split_master=self.master == "split" and precision == "bf16",
            fused_update=fused_update,
            keep_gradients=device == "cpu",
            copies=self.num_copies(world),
        )

    def shared(self) -> dict[str, Any]:
        """Return the fields of `Sharding` itself, as arguments for an engine's settings or a plan's setup."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(Sharding)}


def sharding_of(config: Config) -> Sharding:
    """Return how a config's model is sharded, placed and stepped."""
    keys = {each.name: each.metadata["key"] for each in dataclasses.fields(Sharding) if each.metadata}
    given = {name: get(config, key) for name, key in keys.items()}
    return Sharding(**given | {"options": arguments_of(config.optimizer), "clip": config.train.clip or None})


def arguments_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return the optimizer's arguments from a config, other than learning rate and weight decay."""
    own: dict[str, dict[str, Any]] = {
        "adamw": {"betas": config.betas, "eps": config.eps},
        "adam": {"betas": config.betas, "eps": config.eps},
        "sgd": {"momentum": config.momentum},
    }
    return {**own.get(config.name.lower(), {}), **config.options}


def refuse_shard_ranks(parallel: ParallelConfig, ranks: int, local: int = 0) -> None:
    """Raise UserError if the data-parallel ones of `ranks` ranks cannot be divided into groups as the config asks.

    `local` are the ranks of a node, if that is known.
    """
    try:
        check_shard_ranks(parallel.shard_ranks, ranks // parallel.tp, local // parallel.tp)
    except ValueError as error:
        raise user_error(error) from error


def with_dividing_batch(config: Config, ranks: int, tp: int) -> Config:
    """Return the config with a micro-batch that divides its global batch, for a choice that starts from it.

    That is the largest which also divides its own, so its own if that does. It is 1 where the ranks alone do not divide
    the global batch, which `num_micro_steps` then refuses.
    """
    train = config.train
    if not train.global_batch:
        return config
    each, left = divmod(train.global_batch, max(1, ranks // max(1, tp)))
    batch = 1 if left else math.gcd(train.batch, each)
    return config.with_values({"train.batch": batch})


def num_micro_steps(train: TrainConfig, ranks: int, tp: int) -> int:
    """Return the micro-steps of a step on `ranks` ranks; UserError if a global batch is not divisible into them."""
    if not train.global_batch:
        return train.accumulate
    replicas = max(1, ranks // max(1, tp))
    each = train.batch * replicas
    if train.global_batch % each:
        what = count_of(replicas, "rank" if tp == 1 else "data-parallel rank")
        raise UserError(
            f"global batch {train.global_batch} is not a multiple of batch {train.batch} x {what} = {each}",
            hint=f"--set train.global_batch={max(1, round(train.global_batch / each)) * each}",
        )
    return train.global_batch // each
