"""What plain torch makes of a program: each rank's local gradients, their mean, and torch's own optimizer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fuzz.loop import Invalid, Side, edit, evaluate, note_copy, run
from fuzz.model import forward, make_model
from fuzz.program import WORLD, Event, Program

LEARNING_RATE = {"sgd": 0.1, "adamw": 0.05}
OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.9}, "adamw": {"betas": (0.9, 0.99), "eps": 1e-2}}
"""A large eps: a gradient that is zero but for rounding must not become a step of full size."""


def make_optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's own optimizer; weight decay spares parameters of fewer than two dimensions, as zerocli's does."""
    setting = program.setting
    kind: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[setting.optimizer]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    spared = [p for p in model.parameters() if p.dim() < 2]
    return kind(
        [{"params": decayed, "weight_decay": setting.weight_decay}, {"params": spared, "weight_decay": 0.0}],
        lr=LEARNING_RATE[setting.optimizer],
        **OPTIONS[setting.optimizer],
    )


class Reference(Side):
    """One unsharded model that plays all ranks in turn."""

    def __init__(self, program: Program, stop_at: str = "") -> None:
        super().__init__(program, tuple(range(WORLD)))
        self.stop_at = stop_at
        self.model = make_model(program)
        self.note_all("dtypes", _dtypes(program, self.model))
        self.model.float()
        self.optimizer = make_optimizer(program, self.model)
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        """Of the gradients of all ranks and passes."""
        self.passes = 0
        """Backward passes of all ranks."""

    def forward(self, rank: int, batch: dict[str, Any]) -> Any:
        return forward(self.model, self.program, batch)

    def backward(self, rank: int, loss: torch.Tensor, retain: bool = False) -> None:
        if not loss.requires_grad:
            raise Invalid("a loss that no parameter leads to")
        self.passes += 1
        if self.passes > WORLD * self.program.setting.accumulate:
            raise Invalid("more backward passes than accumulate allows")
        loss.backward(retain_graph=retain)
        for p in self.model.parameters():
            if p.grad is not None:
                self.sums[p] = self.sums[p] + p.grad if p in self.sums else p.grad.clone()
                p.grad = None

    def zero_grad(self, after_error: bool = False) -> None:
        self.sums, self.passes = {}, 0
        self.model.zero_grad()

    def means(self) -> dict[nn.Parameter, torch.Tensor]:
        return {p: total / self.passes for p, total in self.sums.items()}

    def step(self) -> float:
        for p, mean in self.means().items():
            p.grad = mean
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item() if grads else 0.0
        if self.program.setting.clip is not None:
            for grad in grads:
                grad.mul_(min(1.0, self.program.setting.clip / (norm + 1e-6)))
        self.optimizer.step()
        self.zero_grad()
        return norm

    def state(self) -> dict[str, Any]:
        return {name: value.float().numpy().copy() for name, value in self.model.state_dict().items()}

    def must_refuse(self, what: str, operation: Callable[[], Any]) -> None:
        for rank in self.ranks:
            self.note(rank, what, "refused")

    def note_all(self, what: str, value: Any) -> None:
        for rank in self.ranks:
            self.note(rank, what, value)

    @torch.no_grad()
    def event(self, event: Event, step: int, number: int) -> None:
        part = self.model.blocks[event.block % len(self.model.blocks)]
        match event.kind:
            case "freeze" | "unfreeze":
                part.requires_grad_(event.kind == "unfreeze")
            case "deepcopy" | "unsharded":
                for rank in self.ranks:
                    note_copy(self, copy.deepcopy(self.model), rank, step, number)
            case "no_grad" | "inference":
                for rank in self.ranks:
                    self.note(rank, "loss", evaluate(self, self.model, rank, step, number))
            case "state":
                self.note_all("state", self.state())
            case "gathered":
                self.note_all("parameters", {n: p.float().numpy().copy() for n, p in self.model.named_parameters()})
            case "edit" | "plain_edit":
                edit(part.parameters())
            case "load" | "plain_load":
                edit(self.model.parameters())
            case "grad":
                means = self.means()
                for name, p in part.named_parameters():
                    self.note_all(f"gradient of {name}", means.get(p))
            case "hand_grad":
                self.must_refuse("a gradient changed by hand", lambda: None)
            case "optimizer_state":
                pass
            case _:
                raise AssertionError(event)


def _dtypes(program: Program, model: nn.Module) -> dict[str, str]:
    """Return the dtype that each parameter must have: a mixed model keeps its own, a uniform one is cast."""
    named = dict(model.named_parameters())
    mixed = len({p.dtype for p in named.values()}) > 1
    cast = program.setting.precision == "bf16" and not mixed
    kept = program.setting.keep_fp32
    return {
        name: str(torch.bfloat16 if cast and not (kept and re.search(kept, name)) else p.dtype)
        for name, p in named.items()
    }


def expected(program: Program, stop_at: str = "") -> dict[int, list[tuple[str, Any]]]:
    """Return each rank's records by plain torch, up to the operation `stop_at`; Invalid if torch cannot run it."""
    side = Reference(program, stop_at)
    run(side)
    return side.records
