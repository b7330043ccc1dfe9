"""`Setup`: everything beside the model that decides what a step needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offload.placement import ACTIVATIONS, Placement, Share, per_rank
from zerocli.config import Config, placement_at, read_placement
from zerocli.errors import UserError
from zerocli.layout.memory import grad_width
from zerocli.layout.stage import Stage
from zerocli.layout.stage import stage as stage_of

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Setup:
    """How a model is sharded and trained, on `ranks` processes of which each `tp` share a replica."""

    stage: int = 2
    offload: Placement = Placement()
    """As `--offload` has it, a text is read; `activations=...` places the blocks' checkpoints."""
    ranks: int = 1
    tp: int = 1
    ranks_per_node: int = 8
    batch: int = 1
    seq: int = 1024
    precision: str = "bf16"
    policy: str = "keep"
    """`keep` or `recompute`; a placement of activations means recompute."""
    partition: bool = True
    """Whether tensor-parallel ranks, whose checkpoints are equal, each keep a part of them."""
    accumulate: int = 1
    num_states: int = 2
    """fp32 arrays of the optimizer, the master not among them."""
    bucket_nbytes: int = 32 << 20
    gather_buffers: int = 2
    reduce: str = "compute"
    update: str = "auto"
    staging_nbytes: int = 512 << 20
    checkpoints: int = 0
    """Saved checkpoints that the run folder holds at most, the one being written among them; 0: nothing is saved."""
    checkpoint_buffer: int = 1 << 30
    """Bytes of host memory, a rank, that a saved checkpoint may pass through."""
    device: str = "cuda"
    """`cuda`, or `cpu`, whose memory then plays hbm."""
    runtime: Mapping[str, int] = field(default_factory=dict)
    """Overrides of `zerocli.plan.runtime.RUNTIME`, by name."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "offload", read_placement(self.offload))
        except ValueError as error:
            raise UserError(str(error)) from error

    @property
    def dp(self) -> int:
        return self.ranks // self.tp

    @property
    def width(self) -> int:
        """Bytes of an element in the compute dtype."""
        return WIDTHS[self.precision]

    @property
    def grad_width(self) -> int:
        return grad_width(self.width, self.accumulate, self.reduce)

    @property
    def wire_width(self) -> int:
        return 4 if self.reduce == "fp32" else self.width

    @property
    def zero(self) -> Stage:
        return stage_of(self.stage)

    @property
    def recomputes(self) -> bool:
        """Whether blocks keep their input alone."""
        return self.policy == "recompute" or ACTIVATIONS in self.offload.shares

    @property
    def parts(self) -> int:
        """Ranks over which a checkpoint is divided."""
        return self.tp if self.partition else 1

    @property
    def local_ranks(self) -> int:
        """Ranks on one node."""
        return min(self.ranks, self.ranks_per_node)

    @property
    def num_record_arrays(self) -> int:
        """fp32 arrays beside the parameters, the master among them where parameters are narrower."""
        return self.num_states + (self.width < 4)

    def placement(self) -> Placement:
        """Return the tiers of each kind, with one rank's budgets; UserError where the stage does not allow them."""
        try:
            return per_rank(placement_at(self.offload, self.stage), self.local_ranks)
        except ValueError as error:
            raise UserError(str(error)) from error

    def checkpoint_shares(self) -> tuple[Share, ...]:
        """Return the tiers of the blocks' checkpoints, in order, with one rank's budgets."""
        return self.placement().of(ACTIVATIONS)


def num_states(config: Config) -> int:
    """Return the fp32 arrays that the config's optimizer keeps, as long as the parameters.

    All but the two that every plan should answer for without torch are asked themselves.
    """
    optimizer = config.optimizer
    name = optimizer.name.lower()
    if not optimizer.options and name in ("adamw", "sgd"):
        return 2 if name == "adamw" else int(optimizer.momentum != 0)
    from zerocli.engine.optim import arguments_of
    from zerocli.engine.rules import make_optimizer

    try:
        return len(make_optimizer(optimizer.name, arguments_of(optimizer)).state_names)
    except (ValueError, TypeError) as error:
        raise UserError(str(error), hint="--set optimizer.name=adamw") from error


def num_checkpoints(config: Config) -> int:
    """Return how many checkpoints a run's folder holds at most: those kept, and the one that is being written."""
    saves = config.checkpoint
    if not saves.every and not saves.time_limit:
        return 0
    marked = config.train.steps // math.lcm(saves.every, saves.keep_every) if saves.every and saves.keep_every else 0
    return saves.keep + marked + 1


def setup_of(config: Config, **changes: object) -> Setup:
    """Return the setup that a training config asks for; `changes` are fields laid over it."""
    train, zero, offload = config.train, config.zero, config.offload
    given: dict[str, object] = {
        "stage": zero.stage,
        "offload": offload.placement,
        "ranks": max(1, config.parallel.ranks),
        "tp": config.parallel.tp,
        "batch": train.batch,
        "seq": train.seq,
        "precision": train.precision,
        "policy": config.activations.policy,
        "partition": config.activations.partition,
        "accumulate": train.accumulate,
        "num_states": num_states(config),
        "bucket_nbytes": zero.bucket,
        "gather_buffers": zero.buffers,
        "reduce": zero.reduce,
        "update": offload.update,
        "staging_nbytes": offload.staging,
        "checkpoints": num_checkpoints(config),
        "checkpoint_buffer": config.checkpoint.buffer,
    }
    setup = Setup(**(given | changes))  # type: ignore[arg-type]
    if setup.precision == "auto":
        setup = replace(setup, precision="bf16" if setup.device == "cuda" else "fp32")
    if train.global_batch and "accumulate" not in changes:
        each = max(1, setup.batch * setup.ranks // max(1, setup.tp))
        setup = replace(setup, accumulate=max(1, train.global_batch // each))
    return setup
