"""Unsharding: an independent, whole, plain copy of a sharded model, as the user's own classes have it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from zerocli.engine import Engine


@torch.no_grad()
def unsharded_model(engine: Engine, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """See `Engine.unsharded_model`."""
    if engine.tensor_parallel.world > 1:
        raise ValueError(
            f"the layers of this model are split over {engine.tensor_parallel.world} tensor-parallel ranks: a whole "
            "copy has other shapes; build the model again and load engine.state_dict() into it"
        )
    return copy_module(engine.model, engine.state_dict(), torch.device(device), dtype)


def copy_module(
    model: nn.Module, state: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a deep copy of `model` whose parameters have the values of `state`, without what sharding added to it.

    No parameter's memory is copied: each is replaced by its new one. Ties and requires_grad are kept, and hooks that
    are not this package's own. `dtype` is of floating-point parameters and buffers; by default parameters are fp32,
    frozen ones that are kept in fewer bits too, so that the copy computes in one dtype, and buffers as they are.
    """
    memo: dict[int, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and id(value) not in memo:
            # Always a tensor of its own: what `state` holds belongs to the caller.
            new = state[name].to(device, _dtype(state[name], dtype or torch.float32), copy=True)
            memo[id(value)] = nn.Parameter(new, requires_grad=value.requires_grad)
    if left := [name for name, value in model.named_parameters() if id(value) not in memo]:
        raise ValueError(f"the model's state_dict() leaves out {left}: their values are not known; name them there too")
    for b in model.buffers():
        memo[id(b)] = b.detach().to(device, _dtype(b, dtype), copy=True)
    kept = [_strip(module) for module in model.modules()]
    try:
        made = copy.deepcopy(model, memo)
    finally:
        for module, (own, cls, hooks) in zip(model.modules(), kept, strict=True):
            _restore(module, own, cls, hooks)
    return made


def _dtype(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype


def _is_ours(value: Any) -> bool:
    """Whether a function was made by this package around a user's module; of its models' own parts none was."""
    function = getattr(value, "__func__", None) or getattr(value, "func", None) or value
    # By where it was written: functools.wraps gives it the name and module of what it is around.
    where = getattr(function, "__globals__", {}).get("__name__", "")
    return where.startswith("zerocli.") and not where.startswith("zerocli.models")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _strip(module: nn.Module) -> tuple[dict[str, Any], type[nn.Module], dict[str, dict[int, Any]]]:
    """Take this package's own from the module, and return it: methods on the instance, its class, its hooks."""
    own = {name: value for name, value in vars(module).items() if callable(value) and _is_ours(value)}
    for name in own:
        delattr(module, name)
    cls = type(module)
    plain = getattr(cls, "_zerocli_class", None)
    if plain is not None:
        module.__class__ = plain
    hooks = {}
    for kind in _HOOKS:
        found = getattr(module, kind, None)
        if found:
            hooks[kind] = dict(found)
            for key in [key for key, hook in found.items() if _is_ours(hook)]:
                del found[key]
    return own, cls, hooks


def _restore(module: nn.Module, own: dict[str, Any], cls: type[nn.Module], hooks: dict[str, dict[int, Any]]) -> None:
    if type(module) is not cls:
        module.__class__ = cls
    for name, value in own.items():
        object.__setattr__(module, name, value)
    for kind, found in hooks.items():
        target = getattr(module, kind)
        target.clear()
        target.update(found)
