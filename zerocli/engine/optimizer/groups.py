"""Parameter groups: which parameters share a learning rate, a weight decay and the rule's other hyperparameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocli.engine.optimizer.optim import FlatOptimizer
from zerocli.engine.optimizer.rules import MuonWithAdamW
from zerocli.engine.optimizer.torchrule import TorchOptimizer, WholeOptimizer
from zerocli.engine.optimizer.whole_rule import PersistentOptimizer
from zerocli.errors import Refused, RefusedValue

if TYPE_CHECKING:
    from zerocli.engine.settings import Settings

DEFAULT_LR = 3e-4


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with their own hyperparameters; a parameter belongs to the first group that matches it."""

    match: str | Callable[[str, nn.Parameter], bool]
    """A regular expression to search in the parameter's name, or a function of name and parameter."""
    lr_factor: float = 1.0
    """Factor on the learning rate."""
    weight_decay: float | None = None
    """For all its parameters; None: that of `shard`, which skips parameters of fewer than two dimensions."""
    frozen: bool = False
    """Whether its parameters are frozen."""

    def matches(self, name: str, parameter: nn.Parameter) -> bool:
        if isinstance(self.match, str):
            return re.search(self.match, name) is not None
        return bool(self.match(name, parameter))

    @property
    def title(self) -> str:
        return self.match if isinstance(self.match, str) else getattr(self.match, "__name__", "function")


@dataclass(frozen=True)
class Arranged:
    """The optimizer's groups: hyperparameters of each, and the group of each parameter by name."""

    groups: list[dict[str, Any]]
    """As torch's `param_groups`, without the parameters."""
    factors: list[float]
    """Each group's factor on the base learning rate."""
    group_of: Mapping[str, int]


def arrange(model: nn.Module, rule: FlatOptimizer, settings: Settings) -> Arranged:
    """Assign each parameter to a group; freezes parameters of frozen groups. Raises ValueError."""
    optimizer, groups = settings.optimizer, settings.groups
    lr, weight_decay = settings.lr, settings.weight_decay
    if isinstance(optimizer, torch.optim.Optimizer):
        given = {"groups": groups or None, "lr": lr, "weight_decay": weight_decay}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise ValueError(f"the optimizer instance has its own {', '.join(named)}: do not give any to shard")
        return _taken_over(model, optimizer)
    lr, decays = _hyperparameters(optimizer, rule, lr, weight_decay)
    base = lr(1) if callable(lr) else float(lr)
    kind_of = rule.kinds(model) if isinstance(rule, MuonWithAdamW) else (lambda name, parameter: "")
    keys: dict[str, tuple[int, bool, str]] = {}
    # Without decay a user's own rule gets one group, as in torch: it may look at its groups.
    alike = getattr(rule, "verdict", None) is not None and not decays
    for name, parameter in model.named_parameters():
        index = next((i for i, group in enumerate(groups) if group.matches(name, parameter)), -1)
        if index >= 0 and groups[index].frozen:
            parameter.requires_grad_(False)
        own = groups[index].weight_decay if index >= 0 else None
        spared = own is None and parameter.dim() < 2 and not isinstance(decays, tuple) and not alike
        keys[name] = (index, spared, kind_of(name, parameter))
    unmatched = [group.title for i, group in enumerate(groups) if all(key[0] != i for key in keys.values())]
    if unmatched:
        raise ValueError(f"no parameter is in the group {unmatched[0]!r}: nothing matches, or an earlier group has all")
    number = decays[0] if isinstance(decays, tuple) else decays
    if isinstance(rule, TorchOptimizer | WholeOptimizer | PersistentOptimizer) and not rule.template.decays and number:
        raise ValueError(f"{rule.template.name} has no weight decay, and {number} is asked for: set weight_decay to 0")
    made, factors, order = [], [], sorted(set(keys.values()))
    for index, spared, kind in order:
        chosen = groups[index] if index >= 0 else ParamGroup("")
        decay = 0.0 if spared else number if chosen.weight_decay is None else chosen.weight_decay
        options = rule.options_of(kind) if isinstance(rule, MuonWithAdamW) else rule.defaults
        words = [chosen.title or "default", *([kind] if kind else []), *(["no weight decay"] if spared else [])]
        made.append({"lr": base * chosen.lr_factor, "weight_decay": decay, **options, "name": ", ".join(words)})
        factors.append(chosen.lr_factor)
    places = {key: at for at, key in enumerate(order)}
    return Arranged(made, factors, {name: places[key] for name, key in keys.items()})


def _hyperparameters(
    optimizer: Any, rule: FlatOptimizer, lr: float | Callable[[int], float] | None, weight_decay: float | None
) -> tuple[float | Callable[[int], float], float | tuple[float]]:
    """Return learning rate and weight decay; the latter as a tuple if it applies to all parameters.

    An optimizer class gets its own defaults for what is not given, the same for all parameters.
    """
    made = not isinstance(optimizer, str | FlatOptimizer)
    accepted = inspect.signature(optimizer).parameters if made else {}
    defaults = {
        name: parameter.default
        for name, parameter in accepted.items()
        if isinstance(parameter.default, int | float) and name in ("lr", "weight_decay")
    }
    if made and isinstance(rule, TorchOptimizer | WholeOptimizer | PersistentOptimizer) and rule.template.decays:
        defaults["weight_decay"] = rule.template.group["weight_decay"]
    rate = lr if lr is not None else defaults.get("lr", DEFAULT_LR)
    if weight_decay is not None:
        return rate, weight_decay
    return rate, (defaults["weight_decay"],) if defaults.get("weight_decay") else 0.0


def _taken_over(model: nn.Module, instance: torch.optim.Optimizer) -> Arranged:
    """Return the groups of an optimizer instance that was built on the model's parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    group_of: dict[str, int] = {}
    for at, group in enumerate(instance.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise RefusedValue("the optimizer instance has a parameter that is not the model's")
            if names[id(parameter)] in group_of:
                raise Refused(
                    f"{names[id(parameter)]} is in the optimizer twice, and torch would update it twice in each step: "
                    "put every parameter into one group"
                )
            group_of[names[id(parameter)]] = at
    left = [n for n, p in model.named_parameters() if p.requires_grad and n not in group_of]
    if left:
        raise RefusedValue(
            f"the optimizer instance lacks {left[0]} ({len(left)} trainable parameters in all): give it to the "
            "optimizer, or freeze it with requires_grad_(False)"
        )
    return Arranged(instance.param_groups, [1.0] * len(instance.param_groups), group_of)
