"""Plain data-parallel training behind the engine's names: a whole replica on each rank, and gradients averaged by hand.

It uses nothing of the engine. A loop that is written for an engine runs on it unchanged, in fp32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerocli.check.plain import decayed, optimizer_class
from zerocli.engine.optimizer.step import StepResult

Learning = float | Callable[[int], float] | None


class Replica:
    """A model that trains on every rank; the ranks' gradients are averaged in `step`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None = None, lr: Learning = None
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.schedule = lr if callable(lr) else None
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.steps = self.passes = 0
        for tensor in (*model.parameters(), *model.buffers()):
            self._from_rank_0(tensor)

    @torch.no_grad()
    def _from_rank_0(self, tensor: torch.Tensor) -> None:
        if self.world > 1:
            value = tensor.detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(value, 0)
            if not torch.equal(value, tensor):
                tensor.copy_(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)
        self.passes += 1

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.passes = 0

    @torch.no_grad()
    def means(self) -> dict[str, torch.Tensor | None]:
        """Return each gradient, averaged over all ranks' passes; None if no rank has one. Collective."""
        named = dict(self.model.named_parameters())
        there = torch.tensor([float(p.grad is not None) for p in named.values()] + [float(self.passes)])
        if self.world > 1:
            dist.all_reduce(there)
        found: dict[str, torch.Tensor | None] = {}
        for has, (name, p) in zip(there.tolist(), named.items(), strict=False):
            total = torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
            if has and self.world > 1:
                dist.all_reduce(total)
            found[name] = total.div_(max(1.0, there[-1].item())) if has else None
        return found

    def grad(self, name: str) -> torch.Tensor | None:
        value = self.means()[name]
        return None if value is None else value.float().cpu()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Average, clip and update, as a loop in plain torch would. Collective."""
        self.steps += 1
        means = self.means()
        for name, p in self.model.named_parameters():
            p.grad = means[name]
        given = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(given, self.clip, norm)
        if self.schedule is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self.schedule(self.steps)
        with torch.enable_grad():
            self.optimizer.step()
        self.zero_grad()
        return StepResult(self.steps, float(self.optimizer.param_groups[0]["lr"]), norm, torch.zeros(()))

    @contextlib.contextmanager
    def gathered(self, *what: Any, write: bool = False) -> Iterator[None]:
        """Yield: everything is whole; with `write` rank 0's changes are kept, on every rank."""
        yield
        if write:
            for p in self.model.parameters():
                self._from_rank_0(p)

    def register_forward_method(self, module: nn.Module, name: str) -> None:
        """Plain torch needs none."""

    def unsharded_model(self, device: Any = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
        return copy.deepcopy(self.model).to(device, dtype)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> Any:
        return self.model.load_state_dict(state, strict)

    def optimizer_state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.optimizer.state_dict())

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def close(self) -> None:
        """Nothing is held."""


def plain_optimizer(
    model: nn.Module, choice: Any, lr: Learning, weight_decay: float | None, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return torch's own optimizer for what `shard` is given: a name, a class, or a function of the parameters."""
    kind: Any = optimizer_class(choice) if isinstance(choice, str) else choice
    if not isinstance(kind, type):
        made: torch.optim.Optimizer = kind(list(model.parameters()))
        return made
    asked = dict(options) if lr is None else {"lr": lr(1) if callable(lr) else lr, **options}
    parameters = list(model.parameters())
    return kind(parameters if weight_decay is None else decayed(parameters, weight_decay), **asked)  # type: ignore[no-any-return]
