"""Sharded initialisation: each unit's values are made whole once, cut, and freed before the next unit's.

A model that was built on the meta device is initialised module by module from its own `reset_parameters`, each with a
seed made of the run's seed and the module's name: the same parameters for every stage and world size. A model that
already has values keeps rank 0's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from zerocli.comm import Collectives
from zerocli.unit import Flat


def replace_meta(model: nn.Module, device: torch.device) -> set[int]:
    """Give meta parameters and buffers a real device, without memory for parameters; return the ids to initialise."""
    fresh: set[int] = set()
    swapped: dict[int, nn.Parameter | torch.Tensor] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in swapped:
                    hollow = torch.zeros(1, dtype=p.dtype, device=device).expand(p.shape)
                    swapped[id(p)] = nn.Parameter(hollow, requires_grad=p.requires_grad)
                module._parameters[name] = swapped[id(p)]  # type: ignore[assignment]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                if id(b) not in swapped:
                    swapped[id(b)] = torch.zeros_like(b, device=device)
                module._buffers[name] = swapped[id(b)]
    fresh.update(id(new) for new in swapped.values())
    return fresh


def place_buffers(model: nn.Module, fresh: set[int], collectives: Collectives, device: torch.device) -> None:
    """Put the model's buffers on the device; those that had values start from rank 0's."""
    for module in model.modules():
        for name, b in module._buffers.items():
            if b is not None and id(b) not in fresh:
                placed = b.to(device)
                if placed.numel():
                    collectives.broadcast(placed)
                module._buffers[name] = placed


def whole_values(
    flat: Flat, fresh: set[int], initialise: Callable[[], None], collectives: Collectives, device: torch.device
) -> torch.Tensor:
    """Return the flat's initial values, whole, in fp32 (or its own dtype if not floating)."""
    floating = flat.dtype.is_floating_point
    whole = torch.zeros(flat.layout.total, dtype=torch.float32 if floating else flat.dtype, device=device)
    views = flat.views(whole)
    made = [id(p) in fresh for p in flat.parameters]
    for parameter, view, new in zip(flat.parameters, views, made, strict=True):
        if not new:
            view.copy_(parameter.detach())
        elif floating:
            view.fill_(float("nan"))
    if not all(made):
        collectives.broadcast(whole)
    for parameter, view in zip(flat.parameters, views, strict=True):
        parameter.data = view
    if any(made):
        initialise()
        blank = [e.name for e, v, new in zip(flat.layout.entries, views, made, strict=True) if new and v.isnan().any()]
        if blank:
            raise ValueError(
                f"these parameters are on the meta device and no reset_parameters() fills them: {', '.join(blank)}; "
                "build the model on a real device, or give the module that owns them a reset_parameters()"
            )
    return whole


def initialise_modules(model: nn.Module, flat: Flat, seed: int, device: torch.device) -> None:
    """Call `reset_parameters` of the modules that own the flat's parameters, children before parents, each seeded."""
    mine = {id(p) for p in flat.parameters}
    for path, module in _post_order(model, ""):
        if not any(id(p) in mine for p in module._parameters.values() if p is not None):
            continue
        reset(module, path, seed, device)


def reset_buffer_owners(model: nn.Module, fresh: set[int], seed: int, device: torch.device) -> None:
    """Fill buffers that came from the meta device in modules without parameters (such as rotary tables)."""
    for path, module in _post_order(model, ""):
        own = [b for b in module._buffers.values() if b is not None and id(b) in fresh]
        if own and not module._parameters:
            if not reset(module, path, seed, device):
                raise ValueError(f"{path} has buffers on the meta device and no reset_parameters() to fill them")


def reset(module: nn.Module, path: str, seed: int, device: torch.device) -> bool:
    """Initialise one module with a seed of its own; the global random state is left as it was."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is None:
        return False
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        method()
    return True


def _post_order(module: nn.Module, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, child in module.named_children():
        yield from _post_order(child, f"{path}.{name}" if path else name, seen)
    yield path, module
