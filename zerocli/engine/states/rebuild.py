"""Rebuilt modules: recovers tensors that a module computes in `__init__` and keeps outside its parameters.

Rotary tables, masks and position ids are computed once, in the constructor. A module that was built on the meta device
has lost them. A second module of the same class, built from the same config on a real device, has them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

PLAIN = (int, float, str, bool, type(None))


def meta_attributes(module: nn.Module) -> list[str]:
    """Return the module's attributes that are meta tensors, but neither parameters nor buffers."""
    # Not isinstance, which asks the object itself: a weak reference's proxy may have lost what it stands for.
    return [name for name, value in vars(module).items() if issubclass(type(value), torch.Tensor) and value.is_meta]


def fill_from_rebuilt(module: nn.Module, path: str, buffers: Sequence[str], device: torch.device) -> None:
    """Fill these buffers and the meta attributes from a rebuilt module; raise ValueError with the name if it fails."""
    attributes = meta_attributes(module)
    names = ", ".join(f"{path}.{name}" if path else name for name in [*buffers, *attributes])
    anew = rebuild(module, device)
    if anew is None:
        raise ValueError(
            f"{names}: on the meta device, and neither reset_parameters() nor a config of {type(module).__name__} "
            "fills it; build the model on a real device, or give that module a reset_parameters() that does"
        )
    for name in buffers:
        made, target = anew._buffers.get(name), module._buffers[name]
        if made is None or target is None or made.shape != target.shape:
            raise ValueError(f"{names}: {type(module).__name__} built anew from its config has another {name}")
        target.copy_(made)
    for name in attributes:
        setattr(module, name, getattr(anew, name))


def rebuild(module: nn.Module, device: torch.device) -> nn.Module | None:
    """Return a module of the same class built from `module.config`, without parameters; None if it has no config.

    Other arguments without a default are taken from plain attributes of the same name.
    """
    config = getattr(module, "config", None)
    if config is None:
        return None
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module).__init__).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name == "self":
            continue
        if name == "config":
            arguments[name] = config
        elif name == "device":
            arguments[name] = None  # the surrounding one: of buffers the host's, so that all devices have equal ones
        elif name in vars(module) and isinstance(vars(module)[name], PLAIN):
            arguments[name] = vars(module)[name]
        elif parameter.default is parameter.empty:
            return None
    if "config" not in arguments:
        return None
    with without_parameters(), torch.device("cpu"):
        made = type(module)(**arguments)
    return made.to(device) if not any(True for _ in made.parameters()) else made


@contextlib.contextmanager
def without_parameters() -> Iterator[None]:
    """Move each parameter that a module registers while the body runs to the meta device."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
