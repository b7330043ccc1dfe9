"""Optimizers on flat shards: torch's fused kernels, chunk by chunk, with clipping and loss scaling in the kernel.

An elementwise optimizer does not care where one parameter ends and the next begins, so a rank updates its slice of a
unit as plain one-dimensional memory. It works in chunks of a constant size: the fp32 copy of a bf16 gradient exists
for one chunk only, and stays in cache.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zerocli.config import OptimizerConfig


@dataclass(frozen=True)
class Group:
    """Hyperparameters of one group of parameters."""

    lr_factor: float = 1.0
    """Times the schedule's learning rate."""
    weight_decay: float = 0.0


@dataclass
class StepValues:
    """What every chunk of one step shares; the tensors lie on the device so that the host never waits for them."""

    lr: float
    count: torch.Tensor
    """Updates made, this one included (fp32 scalar, as the fused kernels want it)."""
    grad_scale: torch.Tensor
    """Gradients are divided by this: loss scale times the clipping factor's inverse."""
    skip: torch.Tensor
    """1.0 where the gradients are not finite and nothing may be updated, else 0.0."""

    def to(self, device: torch.device) -> StepValues:
        """Return the values where the update runs; on another device than theirs, the host waits for them."""
        if self.count.device.type == device.type:
            return self
        moved = [tensor.to(device) for tensor in (self.count, self.grad_scale, self.skip)]
        return StepValues(self.lr, *moved)


class FlatOptimizer(ABC):
    """An elementwise update rule on one-dimensional fp32 memory."""

    state_names: tuple[str, ...]
    """The fp32 arrays it keeps beside the master, each as long as it."""

    @abstractmethod
    def update(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        scale: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        group: Group,
        at: StepValues,
    ) -> None:
        """Update `master` and `states` in place; `grad` (fp32, to be divided by `scale`) may be overwritten."""

    def scalars(self) -> dict[str, float]:
        """Return what it keeps beside its arrays and the count of updates, for a checkpoint."""
        return {}

    def load_scalars(self, count: int, scalars: Mapping[str, float]) -> None:  # noqa: B027 (optional)
        """Take up what `scalars` gave after `count` updates."""


class FusedAdam(FlatOptimizer):
    """Adam and AdamW in torch's fused kernel."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, decoupled: bool, betas: tuple[float, float], eps: float) -> None:
        self._kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        self._betas, self._eps = betas, eps

    def update(self, master, grad, scale, states, group, at):  # type: ignore[no-untyped-def]
        self._kernel(
            [master],
            [grad],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [],
            [at.count],
            lr=at.lr * group.lr_factor,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=group.weight_decay,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=at.skip,
        )


class FusedSGD(FlatOptimizer):
    """SGD with momentum in torch's fused kernel; the momentum buffer starts at zero, which is the same rule."""

    def __init__(self, momentum: float, nesterov: bool) -> None:
        self.state_names = ("momentum_buffer",) if momentum else ()
        self._momentum, self._nesterov = momentum, nesterov

    def update(self, master, grad, scale, states, group, at):  # type: ignore[no-untyped-def]
        torch._fused_sgd_(
            [master],
            [grad],
            [states["momentum_buffer"]] if self._momentum else [],
            weight_decay=group.weight_decay,
            momentum=self._momentum,
            lr=at.lr * group.lr_factor,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
            is_first_step=False,
            grad_scale=scale,
            found_inf=at.skip,
        )


class TorchOptimizer(FlatOptimizer):
    """Any elementwise class of torch.optim; its states live in our flat arrays, one step at a time."""

    def __init__(self, kind: Callable[..., torch.optim.Optimizer], options: Mapping[str, Any]) -> None:
        self._kind = kind
        self._name = kind.__name__
        accepted = inspect.signature(kind).parameters
        self._options = dict(options)
        self._decays = "weight_decay" in accepted
        if "foreach" in accepted:
            self._options.setdefault("foreach", False)
        self._scalars: dict[int, dict[str, torch.Tensor]] = {}
        self.state_names = self._learn_states()

    def _instance(self, parameter: torch.Tensor, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        decay = {"weight_decay": weight_decay} if self._decays else {}
        return self._kind([parameter], lr=lr, **decay, **self._options)

    def _learn_states(self) -> tuple[str, ...]:
        """Return the optimizer's arrays, found by stepping it once; refuse it if splitting memory changes a number."""
        name = self._name
        generator = torch.Generator().manual_seed(0)
        start, grads = torch.randn(6, generator=generator), torch.randn(2, 6, generator=generator)
        try:
            whole, state = self._try(start, grads)
            halves = torch.cat([self._try(start[:2], grads[:, :2])[0], self._try(start[2:], grads[:, 2:])[0]])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"optimizer {name} cannot run on flat memory: {error}") from error
        if not torch.equal(whole, halves):
            raise ValueError(f"optimizer {name} is not elementwise: sharding would change its numbers")
        arrays = tuple(k for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == whole.shape)
        unknown = [
            k for k, v in state.items() if k not in arrays and (not isinstance(v, torch.Tensor) or v.numel() != 1)
        ]
        if unknown:
            raise ValueError(f"optimizer {name} keeps states that cannot be sharded: {', '.join(unknown)}")
        return arrays

    def _try(self, start: torch.Tensor, grads: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        parameter = start.clone().requires_grad_()
        instance = self._instance(parameter, 0.1, 0.1)
        for grad in grads:
            parameter.grad = grad.clone()
            instance.step()
        return parameter.detach(), instance.state[parameter]

    def update(self, master, grad, scale, states, group, at):  # type: ignore[no-untyped-def]
        if at.skip.item():  # the one optimizer path that asks the device: torch's own rules cannot skip by themselves
            return
        if scale is not None:
            grad.div_(scale)
        parameter = master.detach().requires_grad_()
        parameter.grad = grad
        instance = self._instance(parameter, at.lr * group.lr_factor, group.weight_decay)
        count = int(at.count.item())
        if count > 1:
            scalars = {name: value.clone() for name, value in self._scalars[count - 1].items()}
            instance.state[parameter] = dict(states) | scalars
        instance.step()
        state = instance.state[parameter]
        if count == 1:  # torch has initialised the states its own way: keep them in ours
            for name, array in states.items():
                array.copy_(state[name])
        # Scalars (such as `step`) are the same for every chunk of a step: keep those of this step and the last.
        self._scalars = {k: v for k, v in self._scalars.items() if k == count - 1}
        self._scalars[count] = {k: v for k, v in state.items() if k not in states}

    def scalars(self) -> dict[str, float]:
        newest = self._scalars[max(self._scalars)] if self._scalars else {}
        return {name: value.item() for name, value in newest.items()}

    def load_scalars(self, count: int, scalars: Mapping[str, float]) -> None:
        self._scalars = {count: {name: torch.tensor(float(value)) for name, value in scalars.items()}} if count else {}


def arguments_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return the arguments that a config gives its optimizer beside learning rate and weight decay."""
    own: dict[str, dict[str, Any]] = {
        "adamw": {"betas": config.betas, "eps": config.eps},
        "adam": {"betas": config.betas, "eps": config.eps},
        "sgd": {"momentum": config.momentum},
    }
    return {**own.get(config.name.lower(), {}), **config.options}


def make_optimizer(name: str, options: Mapping[str, Any]) -> FlatOptimizer:
    """Return the optimizer called `name` (adamw, adam, sgd, or a class of torch.optim), or raise ValueError."""
    key = name.lower()
    taken = {"adamw": ("betas", "eps"), "adam": ("betas", "eps"), "sgd": ("momentum", "nesterov")}
    for option in options:
        if option not in taken.get(key, options):
            raise ValueError(f"optimizer {name} takes no {option!r}; it takes {', '.join(taken[key])}")
    if key in ("adamw", "adam"):
        return FusedAdam(key == "adamw", tuple(options.get("betas", (0.9, 0.999))), options.get("eps", 1e-8))
    if key == "sgd":
        return FusedSGD(options.get("momentum", 0.0), options.get("nesterov", False))
    kinds = {
        kind.lower(): value
        for kind, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if key not in kinds:
        raise ValueError(f"optimizer {name!r} is not one of {', '.join(sorted(kinds))}")
    return TorchOptimizer(kinds[key], options)
