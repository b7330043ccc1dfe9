"""Sharded initialisation: each unit is initialised whole, sharded, and freed before the next unit.

A model that was built on the meta device is initialised module by module. Each module's seed depends only on the run's
seed and the module's name, so parameters are the same for every stage and world size. A module is filled by its
`reset_parameters`, then in a Hugging Face model by its `_init_weights`. A model that has values keeps rank 0's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from zerocli.engine.comm import Collectives
from zerocli.engine.states.rebuild import fill_from_rebuilt, meta_attributes
from zerocli.engine.units.unit import Flat


class Fresh(set[int]):
    """Ids of parameters and buffers that were on the meta device; `versions` are the buffers' initial versions."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[int, int] = {}

    def unwritten(self, module: nn.Module) -> list[str]:
        """Return the module's own buffers that were on the meta device and have not been written since."""
        return [
            name
            for name, b in module._buffers.items()
            if b is not None and b.numel() and id(b) in self and b._version == self.versions[id(b)]
        ]


def replace_meta(model: nn.Module, device: torch.device) -> Fresh:
    """Replace meta parameters and buffers by real ones, parameters without memory; return the ids to initialise."""
    fresh = Fresh()
    swapped: dict[int, nn.Parameter | torch.Tensor] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if id(p) not in swapped:
                    placeholder = torch.zeros(1, dtype=p.dtype, device=device).expand(p.shape)
                    swapped[id(p)] = nn.Parameter(placeholder, requires_grad=p.requires_grad)
                module._parameters[name] = swapped[id(p)]  # type: ignore[assignment]
        for name, b in module._buffers.items():
            if b is not None and b.is_meta:
                if id(b) not in swapped:
                    swapped[id(b)] = made = torch.zeros_like(b, device=device)
                    fresh.versions[id(made)] = made._version
                module._buffers[name] = swapped[id(b)]
    fresh.update(id(new) for new in swapped.values())
    return fresh


def whole_values(
    flat: Flat,
    fresh: Fresh,
    initialise: Callable[[], None],
    collectives: Collectives,
    device: torch.device,
    given: Callable[[str], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the flat's initial values, whole, in fp32 (or its own dtype if not floating).

    `given` returns the user's values by name; if it is set, nothing is initialised or communicated.
    """
    floating = flat.dtype.is_floating_point
    whole = torch.zeros(flat.layout.total, dtype=torch.float32 if floating else flat.dtype, device=device)
    views = flat.views(whole)
    made = [given is None and id(p) in fresh for p in flat.parameters]
    for parameter, view, new, entry in zip(flat.parameters, views, made, flat.layout.entries, strict=True):
        if given is not None:
            view.copy_(given(entry.name))
        elif not new:
            view.copy_(parameter.detach())
        elif floating:
            view.fill_(float("nan"))
    if given is None and not all(made):
        collectives.broadcast(whole)
    for parameter, view in zip(flat.parameters, views, strict=True):
        parameter.data = view
    if any(made):
        initialise()
        blank = [e.name for e, v, new in zip(flat.layout.entries, views, made, strict=True) if new and v.isnan().any()]
        if blank:
            raise ValueError(
                f"these parameters are on the meta device and no reset_parameters() fills them: {', '.join(blank)}; "
                "build the model on a real device, give the module that owns them a reset_parameters(), or pass the "
                "weights: shard(model, state=...)"
            )
    return whole


def initialise_modules(model: nn.Module, flat: Flat, seed: int, device: torch.device) -> None:
    """Initialise the flat's parameters with their modules' own methods, children before parents, each seeded.

    Other parameters stay unchanged, even if a module's method writes to them.
    """
    mine = {id(p) for p in flat.parameters}
    order = _post_order(model, mine)
    with _only(model, mine, everywhere=True):
        for found in order:
            if found.owns:
                reset(found.module, found.path, seed, device)
    # A tied weight is initialised by the first of its modules: Hugging Face ties weights after initialisation.
    with _only(model, mine, everywhere=False):
        for found in order:
            if found.contains:
                found.initialise(seed, device)


def reset_buffer_owners(model: nn.Module, fresh: Fresh, seed: int, device: torch.device) -> None:
    """Fill buffers that were on the meta device and that parameter initialisation did not fill (rotary tables).

    Uses the module's reset_parameters(), its model's _init_weights(), or a module rebuilt from its config. Raises
    ValueError for a buffer that none of them fills.
    """
    with _only(model, set(), everywhere=True):
        for found in _post_order(model, set()):
            module, path = found.module, found.path
            if fresh.unwritten(module) and not module._parameters:
                reset(module, path, seed, device)
            if fresh.unwritten(module):
                found.initialise(seed, device)
            blank = fresh.unwritten(module)
            if blank or meta_attributes(module):
                seeded(functools.partial(fill_from_rebuilt, module, path, blank, device), path, seed, device)


def reset(module: nn.Module, path: str, seed: int, device: torch.device) -> None:
    """Initialise one module with its own seed, if it has reset_parameters; the global random state is preserved."""
    method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if method is not None:
        seeded(method, path, seed, device)


def seeded(act: Callable[[], Any], name: str, seed: int, device: torch.device) -> None:
    """Call `act` with random numbers seeded by the seed and the name; the global random state is preserved."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        act()


@functools.lru_cache
def _blank(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


@contextlib.contextmanager
def _only(model: nn.Module, mine: set[int], everywhere: bool) -> Iterator[None]:
    """Put all parameters but `mine` on the meta device while the body runs, where writes have no effect.

    With `everywhere` a tied one of `mine` stays real in all its modules, otherwise only in the first.
    """
    hidden: list[tuple[nn.Module, str, nn.Parameter]] = []
    seen: set[int] = set()
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None or (id(p) in mine and (everywhere or id(p) not in seen)):
                seen.add(id(p))
                continue
            hidden.append((module, name, p))
    try:
        for module, name, p in hidden:
            module._parameters[name] = _blank(p.shape, p.dtype)
        yield
    finally:
        for module, name, p in hidden:
            module._parameters[name] = p


class _Found(NamedTuple):
    path: str
    module: nn.Module
    owns: bool
    """Whether the module itself owns one of the given parameters."""
    contains: bool
    """Whether the module or one of its submodules owns one."""
    method: Callable[[nn.Module], Any] | None
    """`_init_weights` of the innermost Hugging Face model around it."""

    def initialise(self, seed: int, device: torch.device) -> None:
        """Initialise the module as its Hugging Face model does, if there is one."""
        if self.method is not None:
            seeded(functools.partial(self.method, self.module), f"{self.path}:init", seed, device)


def _post_order(model: nn.Module, mine: set[int]) -> list[_Found]:
    """Return the modules, children before parents."""
    order: list[_Found] = []
    seen: set[int] = set()

    def walk(module: nn.Module, path: str, method: Callable[[nn.Module], Any] | None) -> bool:
        if id(module) in seen:
            return False
        seen.add(id(module))
        # Compared by name, because transformers may not be installed.
        if any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__):
            method = getattr(module, "_init_weights", method)
        contains = False
        for name, child in module.named_children():
            contains |= walk(child, f"{path}.{name}" if path else name, method)
        owns = any(id(p) in mine for p in module._parameters.values() if p is not None)
        order.append(_Found(path, module, owns, contains or owns, method))
        return contains or owns

    walk(model, "", None)
    return order
