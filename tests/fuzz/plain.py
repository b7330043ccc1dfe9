"""Plain data-parallel training behind the engine's names: the fuzzer must find nothing wrong with it.

A difference found here is the fuzzer's own mistake. It shards nothing and needs no more than torch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerocli
from fuzz.program import WORLD, Program
from fuzz.rules import make_optimizer

PLAIN = "plain"
"""Asks for this engine where a defect's name is expected."""
NOT_OFFERED = frozenset(("bf16", "mixed", "keep_fp32", "stale", "hand_grad", "average"))
"""Features of the engine that this one lacks."""


CALLS = ("step", "state_dict")


@dataclass
class StepResult:
    grad_norm: torch.Tensor


class PlainEngine:
    """DistributedDataParallel by hand: local gradients are summed, and averaged in `step`."""

    active = False
    """Whether a backward of some engine runs: its loss may lead to the models of several."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.partners = [self]
        """The engines whose models every loss leads to, this one among them."""
        self.model, self.clip = model, program.setting.clip
        self.optimizer = make_optimizer(program, model)
        self.passes = 0
        for p in model.parameters():
            p.requires_grad_(True).register_post_accumulate_grad_hook(self._arrived)
        for p, source in zip(model.parameters(), type(model)(program).parameters(), strict=True):
            p.requires_grad_(source.requires_grad)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not PlainEngine.active:
            parameter.grad = None
            raise zerocli.Refused("call engine.backward(loss) instead of loss.backward()")

    def __call__(self, *args: Any) -> Any:
        return self.model(*args)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        PlainEngine.active = True
        try:
            loss.backward(retain_graph=retain_graph)
        except BaseException:
            self.zero_grad()
            raise
        finally:
            PlainEngine.active = False
        for engine in self.partners:
            engine.passes += 1

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.passes = 0

    def _agree(self, call: int) -> int:
        """Return the mean of the ranks' passes, or refuse if they are in different calls."""
        mine = torch.tensor([call, self.passes])
        all_of_them = [torch.zeros_like(mine) for _ in range(WORLD)]
        dist.all_gather(all_of_them, mine)
        calls = [each.tolist() for each in all_of_them]
        if any(each != calls[0] for each in calls):
            said = ", ".join(f"rank {rank} calls {CALLS[c]} after {n} passes" for rank, (c, n) in enumerate(calls))
            raise zerocli.Refused(f"the ranks do different work: {said}")
        return self.passes

    def _mean(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the mean gradient over ranks and passes; None if no rank has one."""
        has = torch.tensor(float(parameter.grad is not None))
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(has)
        dist.all_reduce(total.requires_grad_(False))
        return total / (WORLD * self.passes) if has else None

    @torch.no_grad()
    def grad(self, name: str) -> torch.Tensor | None:
        return self._mean(self.model.get_parameter(name))

    @torch.no_grad()
    def step(self) -> StepResult:
        self._agree(0)
        for p in self.model.parameters():
            p.grad = self._mean(p)
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip, norm)
        self.optimizer.step()
        self.zero_grad()
        return StepResult(norm)

    @contextlib.contextmanager
    def gathered(self, *what: Any, write: bool = False) -> Iterator[None]:
        yield

    def register_forward_method(self, module: nn.Module, name: str) -> None: ...

    def close(self) -> None: ...

    def unsharded_model(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        self._agree(1)
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(state)

    def optimizer_state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.optimizer.state_dict())

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
