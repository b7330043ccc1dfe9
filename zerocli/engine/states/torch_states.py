"""The state dict of a torch optimizer, by position, as the engine's own, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerocli.engine.optimizer.optim import FlatOptimizer
from zerocli.engine.optimizer.proof import is_number
from zerocli.engine.optimizer.torchrule import TorchOptimizer, WholeOptimizer
from zerocli.engine.optimizer.whole_rule import KEPT, PersistentOptimizer
from zerocli.errors import Refused

_ADVICE = "construct the optimizer with the same groups as then, and give shard the instance"


def is_torchs(saved: Mapping[str, Any]) -> bool:
    """Whether this is what `torch.optim.Optimizer.state_dict` returns."""
    groups = saved.get("param_groups")
    return "counts" not in saved and isinstance(groups, list) and all("params" in group for group in groups)


def translate(
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    named: Mapping[str, nn.Parameter],
    trained: Sequence[str],
    rule: FlatOptimizer,
    loss_scale: Any,
) -> dict[str, Any]:
    """Return a torch optimizer's state dict in the form of `Engine.optimizer_state_dict`; Refused if it does not fit.

    Positions count through the optimizer's groups in order; names, where torch has saved them, take precedence.
    """
    places, hyperparameters = _places(saved["param_groups"], groups, named)
    states: dict[str, dict[str, Any]] = {}
    counts: dict[str, int] = {}
    numbers: dict[str, dict[str, float]] = {}
    kept: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for name, p in named.items():
        own = {k: v for k, v in saved["state"].get(places.get(name), {}).items() if v is not None}
        states[name], rest = _arrays(name, own, p, rule)
        counts[name] = int(float(own["step"])) if is_number(own.get("step")) else int(bool(own))
        kept[name] = ([key for key in own if key not in rest], rest)
        if isinstance(rule, PersistentOptimizer):
            continue
        odd = [k for k in rest if k != "step" and not isinstance(rule, TorchOptimizer | WholeOptimizer)]
        odd += [k for k, v in rest.items() if not is_number(v) and not isinstance(v, torch.Tensor)]
        if odd:
            raise Refused(f"the state {odd[0]!r} of {name} is none that the optimizer keeps here: {_ADVICE}")
        if isinstance(rule, TorchOptimizer | WholeOptimizer):
            numbers[name] = {key: float(value) for key, value in rest.items() if is_number(value)}
            states[name] |= {key: value for key, value in rest.items() if not is_number(value)}
    if isinstance(rule, PersistentOptimizer):
        for first in trained[:1]:
            states[first] = states[first] | {KEPT: rule.packed(kept)}
    most = max(counts.values(), default=0)
    return {
        **{"state": states, "counts": counts, "numbers": numbers, "steps": most, "updates": float(most)},
        **{"loss_scale": loss_scale, "param_groups": hyperparameters},
    }


def _arrays(
    name: str, own: Mapping[str, Any], p: nn.Parameter, rule: FlatOptimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a parameter, zero where it has none, and its other states."""
    found = {}
    for key in rule.state_names:
        value = own.get(key)
        if value is not None and (not isinstance(value, torch.Tensor) or value.shape != p.shape):
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise Refused(
                f"the saved state {key!r} of {name} is {shape}, and the parameter {tuple(p.shape)}: {_ADVICE}"
            )
        found[key] = torch.zeros(p.shape) if value is None else value
    return found, {key: value for key, value in own.items() if key not in found}


def _places(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], named: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return each parameter's position in a saved state, and the hyperparameters of each group."""
    names = {id(p): name for name, p in named.items()}
    ours = [[names[id(p)] for p in group["params"]] for group in groups]
    plain = [{k: v for k, v in group.items() if k not in ("params", "param_names", "name")} for group in saved]
    alike = [len(group["params"]) for group in saved] == [len(group) for group in ours]
    if all("param_names" in group for group in saved):
        found = {n: at for group in saved for n, at in zip(group["param_names"], group["params"], strict=True)}
        if set(found) != {name for group in ours for name in group}:
            raise Refused(f"the saved optimizer state is of parameters with other names: {_ADVICE}")
    elif alike:
        found = {
            n: at for group, own in zip(saved, ours, strict=True) for n, at in zip(own, group["params"], strict=True)
        }
    elif len(saved) == 1 and len(saved[0]["params"]) == len(named):
        found = dict(zip(named, saved[0]["params"], strict=True))
    else:
        sizes = [len(group["params"]) for group in saved]
        raise Refused(
            f"the saved optimizer state has groups of {sizes} parameters, and this one of {[len(g) for g in ours]}, so "
            f"that its positions do not say which parameters they are: {_ADVICE}"
        )
    if not alike:
        kinds = {(repr(group.get("lr")), repr(group.get("weight_decay"))) for group in groups}
        if len(saved) != 1 or len(kinds) > 1:
            raise Refused(f"the saved optimizer state has other groups, with hyperparameters of their own: {_ADVICE}")
        plain = [dict(plain[0]) for _ in groups]
    for values, group in zip(plain, groups, strict=True):
        if "name" in group:
            values["name"] = group["name"]
    return found, plain
