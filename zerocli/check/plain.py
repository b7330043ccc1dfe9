"""The unsharded run: the model in one process, with torch's own autograd and optimizer, without the engine.

The micro-batches of all ranks run in sequence, with the random states they have on the ranks, and their gradients are
averaged: the same mean as over ranks. Under bf16 and fp16 parameters compute in that dtype and are updated in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zerocli.check.compare import Outcome, rounding
from zerocli.config import OptimizerConfig, arguments_of
from zerocli.engine.precision import LossScale, Precision
from zerocli.run.schedule import make_schedule


class NotPlain(Exception):
    """torch.optim has no optimizer for this update."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of torch.optim that a config names, in any case; NotPlain if there is none."""
    kinds = {key.lower(): value for key, value in vars(torch.optim).items() if isinstance(value, type)}
    found = kinds.get(name.lower())
    if found is None or not issubclass(found, torch.optim.Optimizer):
        raise NotPlain(f"torch.optim has no {name}")
    return found


class Plain:
    """A model that trains in one process, with the engine's interface."""

    def __init__(
        self,
        model: nn.Module,
        start: Mapping[str, torch.Tensor],
        optimizer: OptimizerConfig,
        steps: int,
        precision: Precision,
        clip: float,
        passes: int,
        device: torch.device,
        off_by_one_rounding: bool = False,
    ) -> None:
        self.model, self.passes, self.clip = model.to(device), passes, clip
        self.model.load_state_dict(start)
        self.scale = LossScale(precision.scales, device)
        self.names = {name: p for name, p in model.named_parameters() if p.dtype.is_floating_point}
        if off_by_one_rounding:
            move_by_one_rounding(self.names, rounding(precision.compute))
        self.masters = _masters(self.names, precision.compute)
        self.schedule = make_schedule(optimizer, steps)
        self.optimizer = _make_optimizer(optimizer, list(self.masters.values()))
        self.steps = self.skipped = 0

    def __call__(self, *batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.model(*batch)
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of the loss, divided by the number of passes; half-precision ones are summed in fp32."""
        (loss * (self.scale.value / self.passes)).backward()
        for name, master in self.masters.items():
            p = self.names[name]
            if p is not master and p.grad is not None:
                grad = p.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                p.grad = None

    @torch.no_grad()
    def step(self) -> float:
        """Clip, update, and return the norm of the whole averaged gradient; a step that overflowed is skipped."""
        self.steps += 1
        masters = self.masters.values()
        grads = [p.grad for p in masters if p.grad is not None]
        scale = self.scale.value.item()
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads)) / scale
        finite = math.isfinite(norm)
        if finite:
            factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
            for grad in grads:
                grad.mul_(factor / scale)
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(self.steps)
            self.optimizer.step()
            for name, p in self.names.items():
                if name in self.masters and self.masters[name] is not p:
                    p.copy_(self.masters[name])
        self.skipped += not finite
        self.scale.update(torch.tensor(float(not finite), device=self.scale.value.device))
        self.optimizer.zero_grad()
        return norm

    def outcome(self, losses: list[float], norms: list[float]) -> Outcome:
        """Return the run's numbers."""
        values = {name: self.masters.get(name, p).detach().float().cpu() for name, p in self.names.items()}
        states = {
            name: {
                key: array.float().cpu()
                for key, array in self.optimizer.state.get(master, {}).items()
                if isinstance(array, torch.Tensor) and array.shape == master.shape and array.dim()
            }
            for name, master in self.masters.items()
        }
        return Outcome(losses, norms, values, states, self.skipped)


def train(
    run: Any, steps: int, micro_steps: Callable[[int], Iterable[torch.Tensor]], count: Callable[[int], None]
) -> tuple[list[float], list[float]]:
    """Return the losses and norms of `steps` steps; `micro_steps` makes a step's passes, each of which is counted."""
    losses, norms = [], []
    for step in range(1, steps + 1):
        found = []
        for loss in micro_steps(step):
            found.append(loss.double())
            count(1)
        norms.append(run.step())

        losses.append(torch.stack(found).mean().item())
    return losses, norms


def _masters(names: Mapping[str, nn.Parameter], compute: torch.dtype) -> dict[str, nn.Parameter]:
    """Return what the optimizer updates: trainable parameters, or fp32 copies of those that compute in another dtype.

    A model all of fp32 is cast to the compute dtype; one that mixes dtypes keeps them.
    """
    uniform = all(p.dtype == torch.float32 for p in names.values())
    masters = {}
    for name, p in names.items():
        dtype = compute if uniform else p.dtype
        if p.requires_grad:
            masters[name] = p if dtype == torch.float32 else nn.Parameter(p.detach().float().clone())
        p.data = p.data.to(dtype)
    return masters


@torch.no_grad()
def move_by_one_rounding(names: Mapping[str, nn.Parameter], size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in names.values():
        up = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
        p.mul_(1 + up * size)


def decayed(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of torch's own optimizer: without weight decay for norms and biases, as in the engine."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _make_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's own optimizer."""
    kind = optimizer_class(config.name)
    try:
        return kind(decayed(parameters, config.weight_decay), lr=config.lr, **arguments_of(config))  # type: ignore[call-arg]

    except (TypeError, ValueError) as error:
        raise NotPlain(f"torch.optim.{kind.__name__} does not take the whole model: {error}") from error
