"""`Setup`: everything except the model that determines what a step needs."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from offload.placement import HBM, Placement, per_rank
from zerocli.config import (
    CheckpointConfig,
    Config,
    Sharding,
    TrainConfig,
    num_micro_steps,
    placement_at,
    sharding_of,
)
from zerocli.errors import UserError, user_error
from zerocli.layout.constants import MIN_COMPILED_STEPS
from zerocli.layout.flats import FP32, Sizing
from zerocli.layout.recompute import AUTO, Recompute
from zerocli.layout.stage import Stage
from zerocli.layout.stage import stage as stage_of

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
DOCUMENTS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
"""Suffixes of files whose rows are documents (`zerocli.data.files`)."""


@dataclass(frozen=True)
class Setup(Sharding):
    """How a model is sharded and trained on `ranks` processes; each replica is split over `tp` of them."""

    ranks: int = 1
    ranks_per_node: int = 8
    batch: int = TrainConfig.batch
    seq: int = TrainConfig.seq
    checkpoints: int = 0
    """Maximum number of checkpoints in the run folder, including the one being written; 0: nothing is saved."""
    saves_elsewhere: bool = False
    """Whether the run folder cannot be on the node's disks, as it has none: then no tier counts the checkpoints."""
    base_elsewhere: bool = False
    """Whether frozen parameters are the base of adapters, which checkpoints name and do not hold."""
    checkpoint_buffer: int = CheckpointConfig.buffer
    """Bytes of host memory per rank for writing checkpoints."""
    compiled: bool = False
    """Whether blocks are compiled, which changes seconds only: bytes are those of eager blocks."""
    packed: bool = False
    """Whether rows hold several documents: a batch then has positions, and attention a mask."""
    loads: bool = False
    """Whether weights are read from files, so that a base has no initial values."""
    device: str = "cuda"
    """`cuda`, or `cpu`: no GPU, and host memory is reported as hbm."""
    arrays: tuple[int, tuple[int, int]] | None = None
    """Of an optimizer without a name: `num_states` and `num_temporaries`."""
    runtime: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Overrides of `zerocli.plan.memory.runtime.RUNTIME`, by name."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except ValueError as error:
            raise user_error(error) from error
        if self.precision == "auto":
            object.__setattr__(self, "precision", "bf16" if self.device == "cuda" else "fp32")

    @property
    def dp(self) -> int:
        return self.ranks // self.tp

    @property
    def group(self) -> int:
        """Number of ranks among which gathers and sums begin: all, or a group of neighbours."""
        return self.shard_ranks or self.dp

    @property
    def copies(self) -> int:
        """Number of groups that keep a copy of the parameters, while states are partitioned over all ranks."""
        return self.num_copies(self.dp)

    @property
    def shards(self) -> int:
        """Number of ranks over which states are partitioned."""
        return self.group * self.copies

    @property
    def width(self) -> int:
        """Bytes of an element in the compute dtype."""
        return WIDTHS[self.precision]

    @functools.cached_property
    def sizing(self) -> Sizing:
        """What decides the sizes of the engine's buffers."""
        about = (self.shards, self.num_states, self.device, self.precision, self.fuses_update, self.updates_on_cpu)
        # The share is measured when a run starts; sizes are nearly the same for all shares below 1.
        return replace(self.sizing_at(*about), cpu_share=0.5 * self.updates_on_both)

    @property
    def fuses_update(self) -> bool:
        """Whether one kernel makes the update; a GPU is taken to have triton, which torch brings."""
        adam = self.optimizer.lower() in ("adam", "adamw") and not self.options.get("amsgrad")
        return self.device == "cuda" and adam

    @property
    def updates_on_cpu(self) -> bool:
        """Whether the CPU updates all offloaded states: as asked, or because there is no other device."""
        return self.update == "cpu" or (self.update in ("auto", "both") and self.device == "cpu")

    @property
    def updates_on_both(self) -> bool:
        """Whether the CPU takes a part in the update beside a GPU, as far as a plan can know."""
        near = {share.tier for share in self.placement().of("optimizer")} - {HBM} == {"dram"}
        asked = self.update in ("auto", "both") and not self.verify
        return asked and near and self.fuses_update and self.width < FP32

    @property
    def grad_width(self) -> int:
        return self.sizing.grad_width(self.width)

    @property
    def zero(self) -> Stage:
        return stage_of(self.stage)

    @property
    def recomputes(self) -> bool:
        """Whether any block is recomputed, whole or selectively, or may be."""
        return self.recompute == AUTO or bool(self.recomputed)

    @property
    def lighter(self) -> tuple[str, ...]:
        """The policies that recompute more than this one, the cheapest first; `auto` recomputes what it must."""
        if self.recompute == AUTO or self.recomputed.whole:
            return ()
        return ("recompute",) if self.recomputed.selective else ("selective", "recompute")

    def blocks(self, layers: int) -> Recompute:
        """Return how many of a model's blocks are recomputed, and how; UserError while `auto` is not decided."""
        try:
            return self.recomputed.of(layers)
        except ValueError as error:
            hint = "True, False, selective or a number of blocks; or zerocli fit --set activations.policy=auto"
            raise UserError(str(error), hint=hint) from error

    @property
    def parts(self) -> int:
        """Number of ranks over which an activation checkpoint is divided."""
        return self.tp if self.partition_activations else 1

    @property
    def local_ranks(self) -> int:
        """Ranks on one node."""
        return min(self.ranks, self.ranks_per_node)

    @functools.cached_property
    def _arrays(self) -> Arrays:
        """What the optimizer keeps and allocates; AdamW and SGD are answered without torch."""
        name, options = self.optimizer.lower(), self.options
        if self.arrays is not None:
            return Arrays(*self.arrays)
        if name == "adamw" and options.keys() <= {"betas", "eps"}:
            return Arrays(2)
        if name == "sgd" and options.keys() <= {"momentum"}:
            return Arrays(int(options.get("momentum", 0) != 0))
        found = _constructed(self.optimizer, options)
        return Arrays(found.states) if name in ("adamw", "adam", "sgd") else found  # torch's are fused

    @property
    def num_states(self) -> int:
        return self._arrays.states

    @property
    def num_temporaries(self) -> tuple[int, int]:
        return self._arrays.temporaries

    @property
    def updates_whole(self) -> bool:
        """Whether the optimizer updates whole matrices, in their own shapes, not pieces of flats."""
        return self._arrays.whole

    def update_operations(self, shape: Sequence[int]) -> float:
        """Return the operations of matrix products in an update of a parameter of this shape."""
        return self._arrays.operations(shape)

    @property
    def state_width(self) -> int:
        """Bytes per parameter of the optimizer's arrays and the master."""
        return self.sizing.state_width(self.width)

    def placement(self) -> Placement:
        """Return the tiers of each kind, with one rank's budgets; UserError if the stage does not allow them."""
        try:
            return per_rank(placement_at(self.offload, self.stage), self.local_ranks)
        except ValueError as error:
            raise user_error(error) from error


class Arrays(NamedTuple):
    """What an optimizer says of itself: numbers of fp32 arrays as long as the parameters, without the master."""

    states: int
    temporaries: tuple[int, int] = (0, 0)
    """Arrays that it allocates while it updates a piece, each as long as the piece: for the first time, and later."""
    whole: bool = False
    """Whether it updates whole matrices, not pieces."""
    operations: Callable[[Sequence[int]], float] = lambda shape: 0.0
    """Returns the operations of matrix products in an update of a parameter of this shape."""


def _constructed(name: str, options: Mapping[str, Any]) -> Arrays:
    """Construct an optimizer once and return what it keeps and allocates; UserError for one that is not known."""
    key = (name.lower(), repr(sorted(options.items())))
    if key not in _known:
        from zerocli.engine.optimizer.rules import make_optimizer
        from zerocli.plan.measure import update_arrays

        try:
            rule = make_optimizer(name, options)
        except (ValueError, TypeError) as error:
            raise UserError(str(error), hint="--set optimizer.name=adamw") from error
        _known[key] = Arrays(len(rule.state_names), update_arrays(rule), rule.whole, rule.operations)
    return _known[key]


_known: dict[tuple[str, str], Arrays] = {}


def num_checkpoints(config: Config) -> int:
    """Return the maximum number of checkpoints in a run folder: those kept, and the one being written."""
    saves = config.checkpoint
    if not saves.every and not saves.time_limit and not saves.best:
        return 0
    marked = config.train.steps // math.lcm(saves.every, saves.keep_every) if saves.every and saves.keep_every else 0
    return saves.keep + marked + saves.best + 1


def _has_documents(path: str) -> bool:
    """Return whether data is documents, by the suffixes of its files."""
    names = [path] if not os.path.isdir(path) else [name for _, _, files in os.walk(path) for name in files]
    return any(name.endswith(DOCUMENTS) for name in names)


def setup_of(config: Config, **changes: object) -> Setup:
    """Return the setup of a training config; `changes` override its fields."""
    train = config.train
    given: dict[str, Any] = {
        **sharding_of(config).shared(),
        "ranks": max(1, config.parallel.ranks),
        "batch": train.batch,
        "seq": train.seq,
        "packed": config.data.pack and _has_documents(config.data.path),
        "loads": bool(train.init_from),
        "checkpoints": num_checkpoints(config),
        "base_elsewhere": bool(config.lora.rank),
        "checkpoint_buffer": config.checkpoint.buffer,
        "compiled": config.model.compile is True
        or (config.model.compile == AUTO and train.steps >= MIN_COMPILED_STEPS),
    }
    if "optimizer" in changes:
        given["options"] = {}  # those of the config's optimizer do not apply
    setup = Setup(**(given | changes))
    assert setup.num_states >= 0  # which refuses an unknown optimizer
    if "accumulate" in changes:
        return setup
    return replace(setup, accumulate=num_micro_steps(replace(train, batch=setup.batch), setup.ranks, setup.tp))
