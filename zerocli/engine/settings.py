"""What decides how a model is sharded and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offload.placement import Placement
from zerocli.config.placement import read_placement
from zerocli.engine.groups import ParamGroup
from zerocli.engine.rules import OptimizerChoice
from zerocli.engine.unit import UnitChoice


@dataclass(frozen=True)
class Settings:
    """Everything that decides how a model is sharded and trained; see `zerocli.shard`."""

    stage: int = 2
    optimizer: OptimizerChoice = "adamw"
    """A name (adamw, adam, sgd, muon, or any class of torch.optim), a class, an instance built on the model's
    parameters, whose groups are taken over, or a `FlatOptimizer`."""
    lr: float | Callable[[int], float] | None = None
    """A number, or a function of the step (from 1); None: 3e-4, or what the optimizer's class or instance says."""
    weight_decay: float | None = None
    """Spares norms and biases: parameters of fewer than two dimensions. None: 0, or what the optimizer's class or
    instance says, of all parameters."""
    groups: Sequence[ParamGroup] = ()
    """Parameters with a learning rate or a weight decay of their own, or frozen; the first that matches counts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the optimizer: betas, eps, momentum, ..."""
    precision: str = "fp32"
    keep_fp32: str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None = None
    """Parameters that stay in fp32 under bf16 and fp16: regular expressions found in their names, or a function of name
    and parameter. In a model that has parameters of the compute dtype already, those in fp32 stay so anyway."""
    accumulate: int = 1
    """Backward passes a step; their gradients are averaged, in fp32 when there is more than one."""
    clip: float | None = None
    """Largest global gradient norm."""
    units: UnitChoice = None
    recompute: bool | UnitChoice = False
    """Keep only the input of each repeated block for backward, and run its forward again there; or of the units that
    a class, a predicate or a list chooses. So does a placement of `activations`, which says where inputs rest."""
    partition_activations: bool = True
    """Whether tensor-parallel ranks, which have equal inputs, each keep a part of them."""
    compile: bool = False
    """torch.compile each unit but the rest."""
    seed: int = 0
    """Of the initial values of a model built on the meta device."""
    state: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor] | None = None
    """Whole weights to start from, by name, or a function that returns one; they are read unit by unit."""
    bucket_nbytes: int = 32 << 20
    """Size of one reduction bucket; there are two."""
    gather_buffers: int = 2
    """Gather buffers for each size of unit."""
    reduce: str = "compute"
    """dtype of gradients on the wire: `compute` or `fp32`."""
    offload: Placement = Placement()
    """Placement of what the stage partitions; a text is read: `cpu`, `nvme`, `params=cpu,optimizer=hbm:20GiB+nvme`."""
    update: str = "auto"
    """Where states that are off the device are updated: `cpu`, `stream` (through the device), or by measurement."""
    nvme_path: tuple[str, ...] = ()
    """Folders of the nvme tier."""
    staging_nbytes: int = 512 << 20
    """Device (or host) memory through which states are streamed for their update."""
    verify: bool = False
    """Whether what comes back from other tiers is compared with checksums of what went there; a difference raises
    `zerocli.Corrupted`."""
    tier_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further arguments for tiers, by name."""
    device: torch.device | str | None = None
    group: dist.ProcessGroup | None = None
    """The data-parallel ranks, over which states are partitioned; by default all ranks, or those that `tp` leaves."""
    tp: int | DeviceMesh = 1
    """Neighbouring ranks that split each layer between them; or that axis of a mesh, whose other axis is `group`."""
    uneven: bool | None = None
    """Whether ranks may run different units in a step where parameters are partitioned: before each gather they then
    tell each other what they need. By default over gloo, where that costs little; elsewhere different units are
    refused."""
    watch: Callable[[Any], None] = lambda engine: None
    """Called with the engine once its axes of ranks are open, before anything is built: a watchdog looks at them."""
    probe: Callable[[str], None] = lambda name: None
    """Called before each gather, reduce and optimizer and after each unit's forward; tests inject delays here."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offload", read_placement(self.offload))
