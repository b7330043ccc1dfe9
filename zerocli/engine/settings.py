"""What decides how a model is sharded and trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from offload.placement import Placement
from zerocli.config.sharding import Sharding
from zerocli.engine.events import Events
from zerocli.engine.optimizer.groups import ParamGroup
from zerocli.engine.optimizer.rules import OptimizerChoice
from zerocli.engine.units.divide import UnitChoice
from zerocli.layout.recompute import Recompute


@dataclass(frozen=True)
class Base:
    """Frozen parameters that are loaded from elsewhere: checkpoints name them by a fingerprint and do not hold them."""

    fingerprint: str
    holds: Callable[[str], bool] = field(compare=False, repr=False)
    """Whether a parameter, by its name, is one of them."""


@dataclass(frozen=True)
class Settings(Sharding):
    """Everything that decides how a model is sharded and trained: the description, and torch objects; see `shard`.

    A user's own loop differs from a config in these defaults: fp32, no clipping, the optimizer's own arguments; and
    `zerocli.shard` takes stage 3.
    """

    optimizer: OptimizerChoice = Sharding.optimizer  # type: ignore[assignment]
    """A name (adamw, adam, sgd, muon, or any class of torch.optim), a class, an instance built on the model's
    parameters, whose groups are taken over, or a `FlatOptimizer`."""
    lr: float | Callable[[int], float] | None = None
    """A number, or a function of the step (from 1); None: 3e-4, or what the optimizer's class or instance says."""
    weight_decay: float | None = None
    """Not applied to parameters of fewer than two dimensions (norms and biases). None: 0, or the default of the
    optimizer's class or instance, for all parameters."""
    groups: Sequence[ParamGroup] = ()
    """Parameters with a learning rate or a weight decay of their own, or frozen; the first that matches counts."""
    precision: str = "fp32"
    keep_fp32: str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None = None
    """Parameters that stay in fp32 under bf16 and fp16: regular expressions found in their names, or a function of name
    and parameter. In a model that has parameters of the compute dtype already, those in fp32 stay so anyway."""
    cast_inputs: bool = False
    """Whether all floating-point inputs of the model are cast under bf16 and fp16. By default they are cast where they
    reach a layer that needs it, so that timesteps, positions and labels keep their precision."""
    clip: float | None = None
    units: UnitChoice = None
    recompute: bool | int | str | Recompute | UnitChoice = Sharding.recompute  # type: ignore[assignment]
    """True, False, `selective`, a number of blocks or a `Recompute`, as in `Sharding.recompute`; or the units selected
    by a class, a predicate or a list of modules, which are recomputed whole."""
    compile: bool | str = False
    """Whether repeated blocks go through torch.compile; `auto`: on a GPU, if `steps` are enough to pay for it."""
    compile_update: bool | str = "auto"
    """Whether updates on the CPU are one operation, compiled by the machine's C compiler; `auto`: if there is one, many
    parameters are updated, and it is faster, measured. Results are the same bits."""
    compile_backend: str = "inductor"
    """The compiler behind torch.compile; another than inductor is for tests and debugging."""
    steps: int = 0
    """Number of steps of the run; 0: not known. Only `compile="auto"` depends on it."""
    seed: int = 0
    """Seed of the initial values of a model built on the meta device."""
    state: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor] | None = None
    """Whole weights to start from, by name, or a function that returns one; they are read unit by unit."""
    empty: bool = False
    """Whether the parameters of a model on the meta device start as zeros instead of initial values, because weights
    are loaded next, slice by slice: then no unit is ever whole in memory."""
    loaded_base: Base | None = None
    """Frozen parameters that checkpoints leave out; with it, `empty` is of these alone."""
    tier_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Additional arguments for tiers, by tier name."""
    device: torch.device | str | None = None
    group: dist.ProcessGroup | None = None
    """The data-parallel ranks, over which states are partitioned; by default all ranks, or those that `tp` leaves."""
    tp: int | DeviceMesh = Sharding.tp  # type: ignore[assignment]
    """As `Sharding.tp`; or that axis of a mesh, whose other axis is `group`."""
    uneven: bool | None = None
    """Whether ranks may run different units in a step if parameters are partitioned: before each gather they then
    exchange what they need. Default: True over gloo, where that costs little; otherwise such a step is refused."""
    watch: Callable[[Any], None] = lambda engine: None
    """Called with the engine once its axes of ranks are open, before anything is built: a watchdog observes them."""
    events: Events | Sequence[Events] = ()
    """Subscribers to the engine's events, such as `zerocli.ProfilerRanges()`; see engine/events.py."""
    keep_gradients: bool | None = None
    """Whether gradients on the device stay allocated between steps. Default: on a CPU, where new memory costs page
    faults; on a GPU they exist from backward to the update."""
    defer_update: bool = False
    """Whether the next forward starts before parameters that stay on the device are updated, and waits for each unit's
    when it reaches the unit: that hides the transfers of offloaded optimizer states. Between a step and the next
    forward such parameters, and tensors that were taken of them, may then be read only through the engine
    (`state_dict`, `gathered`, `synchronize`)."""


class Keywords(TypedDict, total=False):
    """The keywords of `zerocli.shard` after the first ones: the fields of `Settings`, which describes them.

    Then the optimizer's most common arguments; any other that it takes may be given as well, or in `options`.
    """

    weight_decay: float | None
    groups: Sequence[ParamGroup]
    precision: str
    keep_fp32: str | Sequence[str] | Callable[[str, nn.Parameter], bool] | None
    cast_inputs: bool
    master: str
    accumulate: int
    clip: float | None
    reduce: str
    offload: Placement | str
    update: str
    defer_update: bool
    nvme_path: str | PathLike[str] | Sequence[str | PathLike[str]]
    staging_nbytes: int
    read_ahead_nbytes: int
    verify: bool
    tier_options: Mapping[str, Mapping[str, Any]]
    units: UnitChoice
    recompute: bool | int | str | Recompute | UnitChoice
    partition_activations: bool
    compile: bool | str
    compile_backend: str
    compile_update: bool | str
    steps: int
    bucket_nbytes: int
    gather_buffers: int
    keep_gradients: bool | None
    seed: int
    state: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor] | None
    empty: bool
    base: str
    loaded_base: Base | None
    device: torch.device | str | None
    group: dist.ProcessGroup | None
    tp: int | DeviceMesh
    shard_ranks: int
    shard_states: str
    uneven: bool | None
    watch: Callable[[Any], None]
    events: Events | Sequence[Events]
    options: Mapping[str, Any]
    betas: tuple[float, float]
    eps: float
    amsgrad: bool
    maximize: bool
    momentum: float
    nesterov: bool
