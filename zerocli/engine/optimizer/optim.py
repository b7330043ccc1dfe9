"""Optimizers on flat shards: torch's fused kernels, chunk by chunk, with clipping and loss scaling in the kernel.

An elementwise optimizer does not depend on parameter boundaries, so a rank updates its slice of a unit as plain
one-dimensional memory. It works in chunks of constant size: the fp32 copy of a bf16 gradient exists for one chunk only,
and stays in cache.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zerocli.errors import RefusedValue

Arrays = Mapping[str, Tensor]
"""The states of a piece or of a parameter, by name."""


@dataclass(frozen=True)
class Group:
    """Hyperparameters of one parameter group in one step."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """The rule's other hyperparameters: betas, eps, momentum, ..."""
    index: int = 0
    """Its index in `engine.optimizer.param_groups`."""

    def plain(self) -> list[Any]:
        """Return its hyperparameters that are numbers or words, to be compared between ranks."""
        options = [(k, v) for k, v in sorted(self.options.items()) if isinstance(v, int | float | str)]
        return [self.lr, self.weight_decay, options]


@dataclass(frozen=True)
class At:
    """The step count and skip flag of an update; the tensors are on its device, so that the host never waits."""

    count: torch.Tensor
    """Number of updates of these parameters, this one included (fp32 scalar, as the fused kernels need it)."""
    skip: torch.Tensor
    """1.0 where the gradients are not finite and nothing may be updated, else 0.0."""
    history: int = 0
    """Class of parameters that have had the same count in all updates so far."""
    step: StepValues | None = None
    """The step that both are of."""

    def read(self) -> tuple[int, bool]:
        """Return the count and the flag on the host, which waits for the device once per step."""
        if self.step is None:
            return int(self.count.item()), bool(self.skip.item())
        counts, skip = self.step.on_host
        return counts[self.history], skip


@dataclass(frozen=True)
class StepValues:
    """What all updates of one step share."""

    groups: tuple[Group, ...]
    counts: torch.Tensor
    """Number of updates, this one included, by class of parameters: see counts.py."""
    grad_scale: torch.Tensor
    """Gradients are divided by this: the divisor of the average over the clipping factor."""
    skip: torch.Tensor
    """1.0 where the gradients are not finite and nothing may be updated, else 0.0."""

    def to(self, device: torch.device) -> StepValues:
        """Return the values on the update's device; a copy from another device makes the host wait."""
        if self.counts.device.type == device.type:
            return self
        moved = [tensor.to(device) for tensor in (self.counts, self.grad_scale, self.skip)]
        return StepValues(self.groups, *moved)

    def at(self, history: int) -> At:
        """Return the count and skip flag for parameters of one class of counts."""
        return At(self.counts[history], self.skip, history, self)

    @functools.cached_property
    def on_host(self) -> tuple[list[int], bool]:
        """The counts and the skip flag, for rules that decide by them on the host."""
        *counts, skip = torch.cat([self.counts, self.skip.view(1)]).tolist()
        return [int(count) for count in counts], bool(skip)


@dataclass(frozen=True)
class Row:
    """A parameter in a step: its whole values, its gradient if it has one, and the memory of its states."""

    name: str
    master: Tensor
    grad: Tensor | None
    states: Arrays
    group: Group
    at: At


@dataclass(frozen=True)
class History:
    """Optimizer state of one parameter other than arrays of its shape."""

    count: int
    """Number of updates of the parameter."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    tensors: Arrays = field(default_factory=dict)


@dataclass
class Piece:
    """What an update reads and writes, all on one device."""

    parameters: Tensor | None
    """None: the master is the parameters."""
    master: Tensor
    """As int16, the remainder of a split one."""
    grad: Tensor
    states: Arrays
    group: Group
    at: At

    def after(self, done: int) -> Piece:
        """Return what is left after the first `done` elements."""
        states = {name: state[done:] for name, state in self.states.items()}
        parameters = None if self.parameters is None else self.parameters[done:]
        return Piece(parameters, self.master[done:], self.grad[done:], states, self.group, self.at)


class FlatOptimizer(ABC):
    """An elementwise update rule on one-dimensional fp32 memory; subclass it for a rule of your own.

    `shard(model, optimizer=MyRule(), ...)` calls `update` on the parameters piece by piece. A piece may begin and end
    anywhere within a parameter, so an element's new value may depend only on the same element of each array.
    """

    state_names: tuple[str, ...]
    """The fp32 arrays it keeps in addition to the master, of the same length and initially zero."""

    defaults: Mapping[str, Any] = {}
    """Hyperparameters other than lr and weight decay; parameter groups may override them: see `Group.options`."""

    whole = False
    """Whether it needs whole parameters, in their own shapes."""
    together = False
    """Whether it is given all parameters at once."""
    has_scalars = False
    """Whether `advance` must be called."""

    @abstractmethod
    def update(self, master: Tensor, grad: Tensor, scale: Tensor | None, states: Arrays, group: Group, at: At) -> None:
        """Update `master` and `states` in place.

        `grad` (fp32) may be overwritten; it must still be divided by `scale` unless that is None. `group` has the
        step's lr, weight decay and options. If `at.skip` is 1 nothing may change.
        """

    def operations(self, shape: Sequence[int]) -> float:
        """Return the operations of matrix products in the update of a parameter of this shape, for plans."""
        return 0.0

    def options_in(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rule's own hyperparameters from one of `param_groups`."""
        return {name: group[name] for name in self.defaults if name in group}

    def check(self, group: Group) -> None:  # noqa: B027 (optional)
        """Raise ValueError if the group's hyperparameters are not supported."""

    def look(self, groups: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027 (optional)
        """Notice what the user has changed since the last step; called before each one with `param_groups`."""

    def advance(self, group: Group, at: At) -> None:  # noqa: B027 (optional)
        """Prepare a step's updates; called for every (group, history) pair that is updated on any rank."""

    def split(self, old: int, new: int) -> None:  # noqa: B027 (optional)
        """Copy what is kept for the history `old` to `new`, which some of its parameters move to."""

    def numbers(self, name: str, history: int, group: int) -> dict[str, float]:
        """Return the scalars that it keeps for a parameter other than the update count."""
        return {}

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Return the tensors that it keeps for a parameter other than `state_names`; every rank has them whole."""
        return {}

    def own_tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that it keeps for no single parameter; they are saved with one, and `load` gets them."""
        return {}

    def load(self, name: str, history: int, group: int, saved: History) -> None:  # noqa: B027 (optional)
        """Load a parameter's `numbers` and `tensors`, saved after `saved.count` updates."""

    def forget(self) -> None:  # noqa: B027 (optional)
        """Drop everything that it keeps other than `state_names`."""

    def is_whole(self, group: Group) -> bool:
        """Whether it needs the group's parameters whole: see `WholeRule`."""
        return self.whole


class WholeRule(FlatOptimizer):
    """A rule on whole parameters in their own shapes."""

    whole = True

    def update(self, master: Tensor, grad: Tensor, scale: Tensor | None, states: Arrays, group: Group, at: At) -> None:
        raise AssertionError("this rule needs whole parameters")

    @abstractmethod
    def update_whole(self, row: Row) -> None:
        """Update the row's `master` and `states` in place; it has a gradient."""

    def update_rows(self, rows: Sequence[Row]) -> None:
        """Update all parameters that have a gradient, one by one."""
        for row in rows:
            if row.grad is not None and row.master.numel():
                self.update_whole(row)


class FusedAdam(FlatOptimizer):
    """Adam and AdamW in torch's fused kernel."""

    def __init__(
        self,
        decoupled: bool,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        self.defaults = {"betas": tuple(betas), "eps": eps, "amsgrad": amsgrad, "maximize": maximize}
        self.state_names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()))
        self.decoupled = decoupled
        """Whether weight decay is applied to the parameters (AdamW) and not added to the gradient."""
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_

    def check(self, group: Group) -> None:
        if group.options["amsgrad"] and "max_exp_avg_sq" not in self.state_names:
            raise RefusedValue("amsgrad was not asked for when the model was sharded, so there is no memory for it")

    def update(self, master: Tensor, grad: Tensor, scale: Tensor | None, states: Arrays, group: Group, at: At) -> None:
        options = group.options
        self._kernel(
            [master],
            [grad],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [states["max_exp_avg_sq"]] if options["amsgrad"] else [],
            [at.count],
            lr=group.lr,
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            weight_decay=group.weight_decay,
            eps=options["eps"],
            amsgrad=options["amsgrad"],
            maximize=options["maximize"],
            grad_scale=scale,
            found_inf=at.skip,
        )


class FusedSGD(FlatOptimizer):
    """SGD with momentum in torch's fused kernel; its momentum buffer starts at zero, which gives the same result."""

    def __init__(self, momentum: float = 0.0, nesterov: bool = False, maximize: bool = False) -> None:
        if nesterov and not momentum:
            raise ValueError("nesterov needs a momentum above 0")
        self.defaults = {"momentum": momentum, "nesterov": nesterov, "maximize": maximize, "dampening": 0.0}
        self.state_names = ("momentum_buffer",) if momentum else ()

    def check(self, group: Group) -> None:
        if group.options["momentum"] and not self.state_names:
            raise RefusedValue("momentum was 0 when the model was sharded, so there is no memory for it")
        if group.options["dampening"]:
            raise RefusedValue("dampening was 0 when the model was sharded: give it to shard, or to the instance")

    def update(self, master: Tensor, grad: Tensor, scale: Tensor | None, states: Arrays, group: Group, at: At) -> None:
        options = group.options
        torch._fused_sgd_(
            [master],
            [grad],
            [states["momentum_buffer"]] if options["momentum"] else [],
            weight_decay=group.weight_decay,
            momentum=options["momentum"],
            lr=group.lr,
            dampening=0.0,
            nesterov=options["nesterov"],
            maximize=options["maximize"],
            is_first_step=False,
            grad_scale=scale,
            found_inf=at.skip,
        )
