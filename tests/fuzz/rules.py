"""The optimizers of programs: torch's own, and small rules made of terms, elementwise and not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fuzz.program import Program, Rule

NAMED: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "adamw": {"lr": 0.05, "betas": (0.9, 0.99), "eps": 1e-2},
}
"""A large eps: a gradient that is zero but for rounding must not become a step of full size."""

TORCH: dict[str, tuple[tuple[tuple[str, Any], ...], ...]] = {
    "SGD": (
        (("lr", 0.1), ("momentum", 0.8), ("nesterov", True)),
        (("lr", 0.1), ("momentum", 0.8), ("dampening", 0.3)),
        (("lr", 0.1), ("maximize", True)),
    ),
    "Adam": ((("lr", 0.05), ("eps", 1e-2)), (("lr", 0.05), ("eps", 1e-2), ("amsgrad", True))),
    "AdamW": ((("lr", 0.05), ("eps", 1e-2), ("amsgrad", True)), (("lr", 0.05), ("eps", 1e-2), ("betas", (0.5, 0.9)))),
    "RMSprop": ((("lr", 0.02), ("eps", 0.1), ("momentum", 0.5)), (("lr", 0.02), ("eps", 0.3), ("centered", True))),
    "Adagrad": ((("lr", 0.05), ("eps", 1e-1), ("lr_decay", 0.1), ("initial_accumulator_value", 0.1)),),
    "Adadelta": ((("lr", 0.5), ("eps", 1e-2)),),
    "NAdam": ((("lr", 0.05), ("eps", 1e-2)),),
    "RAdam": ((("lr", 0.05), ("eps", 1e-2)),),
    "Adamax": ((("lr", 0.05), ("eps", 1e-2)),),
    "ASGD": ((("lr", 0.05), ("t0", 1.0), ("lambd", 0.1)),),
    "Rprop": ((("lr", 0.01),),),
    "Adafactor": ((("lr", 0.05), ("eps", (1e-2, 1e-3))),),
}
"""Classes of torch.optim, each with some of its options."""
SECOND: dict[str, tuple[tuple[tuple[str, Any], ...], ...]] = {
    "SGD": ((("lr", 0.03),), (("weight_decay", 0.3),), (("momentum", 0.2),), (("momentum", 0.0), ("nesterov", False))),
    "Adam": ((("betas", (0.3, 0.5)),), (("eps", 0.3),), (("lr", 0.01), ("weight_decay", 0.2))),
    "AdamW": ((("betas", (0.3, 0.5)),), (("eps", 0.3),), (("lr", 0.01), ("weight_decay", 0.2))),
    "RMSprop": ((("alpha", 0.5),), (("momentum", 0.9),)),
    "Own": ((("lr", 0.02),), (("weight_decay", 0.3),)),
}
"""What the second group of an instance may change; other classes: the learning rate."""
ELEMENTWISE = ("sign", "soft", "ema", "momentum", "decay", "count_state")
"""Terms that treat each element of a parameter alike, whatever it is in."""
OTHERS = ("global_norm", "tensor_mean", "tensor_norm", "count_self", "count_group", "by_dim", "by_numel", "by_mark")
OTHERS += ("late", "late_norm", "decay_all")
LATE = 2
"""Steps after which a late term begins."""


class Own(torch.optim.Optimizer):
    """An optimizer as users write them; a subclass has its terms."""

    terms: tuple[str, ...] = ()

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.count += 1
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else torch.zeros(())
        for group in self.param_groups:
            if "count_group" in self.terms:
                group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if "decay_all" in self.terms:
                    p.mul_(0.98)
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    self._update(p, p.grad.clone(), state, group, norm)

    def _update(
        self, p: torch.Tensor, d: torch.Tensor, state: dict[str, Any], group: dict[str, Any], norm: torch.Tensor
    ) -> None:
        for term in self.terms:
            match term:
                case "sign":
                    d = d.sign() * 0.1
                case "soft":
                    d = d / (d.abs() + 0.1)
                case "ema" | "momentum":
                    kept = state.setdefault(term, torch.zeros_like(p))
                    d = kept.mul_(0.8).add_(d, alpha=0.2 if term == "ema" else 1.0).clone()
                case "decay":
                    p.mul_(1 - group["lr"] * 0.5)
                case "count_state":
                    d = d / (1 + 0.2 * state["step"])
                case "global_norm":
                    d = d / (1 + norm)
                case "tensor_mean":
                    d = d - d.mean()
                case "tensor_norm":
                    d = d / (1 + d.norm())
                case "count_self":
                    d = d / (1 + 0.2 * self.count)
                case "count_group":
                    d = d / (1 + 0.2 * group["count"])
                case "by_dim":
                    d = d * (0.5 if p.dim() >= 2 else 1.0)
                case "by_numel":
                    d = d * (0.5 if p.numel() > 40 else 1.0)
                case "by_mark":
                    d = d * (3.0 if getattr(p, "quick", False) else 1.0)
                case "late":
                    d = d * (0.1 if state["step"] > LATE else 1.0)
                case "late_norm":
                    d = d / (1 + d.norm()) if state["step"] > LATE else d
        p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(d, alpha=group["lr"])


def class_of(rule: Rule) -> Any:
    if rule.kind == "Own":
        return type("Rule", (Own,), {"terms": rule.terms})
    return getattr(torch.optim, rule.kind)


def may_be_refused(rule: Rule) -> bool:
    """Whether `shard` may refuse this rule: it needs more than the elements of one parameter."""
    return rule.hook or any(term in OTHERS for term in rule.terms)


def decays(rule: Rule) -> bool:
    return rule.kind != "Rprop"


def make_optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    """Return the program's optimizer as plain torch has it.

    One that `shard` makes, of a name or a class, spares parameters of fewer than two dimensions from weight decay.
    """
    setting, rule = program.setting, program.rule
    if rule.kind and rule.instance:
        return make_instance(rule, list(model.parameters()))
    if rule.kind:
        kind, options = class_of(rule), dict(rule.options)
    else:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[setting.optimizer]
        options = dict(NAMED[setting.optimizer])
    if rule.kind and not decays(rule):
        return kind(model.parameters(), **options)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    spared = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": setting.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return kind(groups, **options)


def make_instance(rule: Rule, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that a user makes before `shard`."""
    half = len(parameters) // 2
    if rule.split == "dim":
        parts = [[p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]]
    else:
        parts = [parameters[:half], parameters[half:]] if rule.split == "half" else [parameters]
    groups: Iterable[dict[str, Any]] = [{"params": part} for part in parts]
    optimizer = class_of(rule)(
        [group | (dict(rule.second) if i else {}) for i, group in enumerate(groups)], **dict(rule.options)
    )
    if rule.hook:
        optimizer.register_step_pre_hook(_halve)
    return optimizer


def _halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def asked_of_shard(program: Program, model: nn.Module) -> dict[str, Any]:
    """Return the keywords that give `zerocli.shard` the program's optimizer."""
    setting, rule = program.setting, program.rule
    if rule.kind and rule.instance:
        return {"optimizer": make_instance(rule, list(model.parameters()))}
    options = dict(rule.options) if rule.kind else dict(NAMED[setting.optimizer])
    asked: dict[str, Any] = {"lr": options.pop("lr", 0.1), "options": options}
    if not rule.kind or decays(rule):
        asked["weight_decay"] = setting.weight_decay
    return asked | {"optimizer": class_of(rule) if rule.kind else setting.optimizer}
