"""A model's own way to save and load, run on whole values: its hooks, overridden methods and extra state.

While `model.state_dict()` or `load_state_dict()` runs, plain tensors with whole values stand in for the parameters and
buffers. So what a state contains, and how an older one is converted, is decided by the model's own code.
"""

from __future__ import annotations

import contextlib
import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zerocli.engine.states.named import StateMismatch, aliases_in, named_tensors
from zerocli.engine.units.modules import is_routed


class Manner(enum.Enum):
    """What a model does to a state that it loads."""

    BY_NAME = enum.auto()
    """Nothing: values go to the tensors of their names."""
    CONVERTED = enum.auto()
    """Its hooks, torch's modules or extra state change or read the state; tensors are then assigned by name."""
    OWN = enum.auto()
    """Its own methods or hooks that run afterwards may change the loaded tensors too."""


def manner_of(model: nn.Module) -> Manner:
    """Return what loading a state does in this model beyond copying by name."""
    found = Manner.BY_NAME
    for module in model.modules():
        definer = _definer(module, "_load_from_state_dict")
        if _definer(module, "load_state_dict") is not nn.Module:
            return Manner.OWN
        if definer is None or not definer.__module__.startswith("torch.") or module._load_state_dict_post_hooks:
            return Manner.OWN
        extra = _definer(module, "set_extra_state") is not nn.Module
        if extra or module._load_state_dict_pre_hooks or definer is not nn.Module:
            found = Manner.CONVERTED
    return found


def _definer(module: nn.Module, method: str) -> type | None:
    """Return the class that defines a module's method; None if the instance itself does."""
    if method in module.__dict__ and not is_routed(module, method):
        return None
    return next(kind for kind in type(module).__mro__ if method in kind.__dict__)


@contextlib.contextmanager
def _standing_in(model: nn.Module, values: Mapping[int, torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Put plain tensors in place of the parameters and buffers with these ids while the body runs; yield them."""
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    members: dict[str, Any]
    for module in model.modules():
        for members in (module._parameters, module._buffers):
            for name, own in members.items():
                if own is not None and id(own) in values:
                    if id(own) not in made:
                        value, real = values[id(own)], isinstance(own, nn.Parameter)
                        made[id(own)] = nn.Parameter(value, own.requires_grad) if real else value
                    before.append((members, name, own))
    try:
        for members, name, own in before:
            members[name] = made[id(own)]
        yield made
    finally:
        for members, name, own in before:
            members[name] = own


# -- saving ------------------------------------------------------------------------------------------------------------


def save_own(model: nn.Module, values: Mapping[int, torch.Tensor]) -> Any:
    """Return the state_dict of an unsharded model with these parameters, by id; it shares no memory with the model."""
    held = dict(values)
    for b in model.buffers():
        held[id(b)] = b.detach().cpu().clone()
    with _standing_in(model, held) as made:
        state = model.state_dict()
    safe = {id(tensor) for tensor in held.values()} | {id(tensor) for tensor in made.values()}
    memory = {t.untyped_storage().data_ptr() for t in made.values() if t.layout == torch.strided and not t.is_quantized}

    def independent(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or id(value) in safe:
            return value
        if value.layout == torch.strided and not value.is_quantized:
            if value.numel() and value.untyped_storage().data_ptr() in memory:
                return value.detach()
        return value.detach().cpu().clone()

    if not isinstance(state, MutableMapping):
        return tree_map(independent, state)
    for key, value in state.items():
        state[key] = tree_map(independent, value)
    return state


# -- loading -----------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """What a model's own methods made of a state; nothing is written into the model yet, except plain attributes."""

    tensors: dict[int, torch.Tensor]
    """Whole values by the ids of the model's own parameters and buffers; those not in the state may be left out."""
    replaced: list[tuple[nn.Module, str, torch.Tensor]]
    """Buffers that the model replaced by others: (module, name, buffer)."""
    extra: list[tuple[nn.Module, Any]]
    """Extra states, for `set_extra_state`."""
    missing: list[str]
    unexpected: list[str]


def load_own(
    model: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    whole_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]],
    current: Callable[[], Mapping[int, torch.Tensor]],
) -> Loaded:
    """Run the model's own load_state_dict on stand-ins.

    `current` returns the whole parameters as they are, which a model that loads in its OWN manner may read or change.
    Raises StateMismatch for wrong shapes, and with `strict` for names that are missing or unknown.
    """
    own = manner_of(model) is Manner.OWN
    values: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(model):
        if not isinstance(tensor, nn.Parameter):
            values[id(tensor)] = tensor.detach().clone()  # torch's BatchNorm puts its own into an older state
        elif not own and id(tensor) not in values:
            shape = whole_shape(name, tuple(tensor.shape))
            values[id(tensor)] = torch.empty(shape, dtype=tensor.dtype, device="meta")
    if own:
        values |= current()
    slots = [
        (module, members, name, tensor)
        for module in model.modules()
        for members in (module._parameters, module._buffers)
        for name, tensor in members.items()
        if tensor is not None and id(tensor) in values
    ]
    extra: list[tuple[nn.Module, Any]] = []
    with _standing_in(model, values) as made, _deferred_extra_states(model, extra):
        missing, unexpected = _load(model, state, strict, own)
        after = [(module, name, tensor, members.get(name)) for module, members, name, tensor in slots]
    found: dict[int, torch.Tensor] = {}
    replaced = []
    for module, name, tensor, new in after:
        if new is None or (not own and new is made[id(tensor)]):
            continue
        if not isinstance(tensor, nn.Parameter) and own and new is not made[id(tensor)]:
            replaced.append((module, name, new.detach()))
        elif (first := found.get(id(tensor))) is not None and not (
            first.shape == new.shape and torch.equal(first, new)
        ):
            raise StateMismatch(f"{name} of {type(module).__name__} is tied, and the state has two values for it")
        elif (wanted := made[id(tensor)].shape) != new.shape:
            raise StateMismatch(
                f"loading gave {name} the shape {tuple(new.shape)}, and it is sharded as {tuple(wanted)}: load the "
                "state before shard"
            )
        else:
            found[id(tensor)] = new.detach()
    missing = _without_aliases(model, missing)
    if strict and (missing or unexpected):
        raise StateMismatch(f"state_dict does not match: missing {missing}, unknown {unexpected}")
    return Loaded(found, replaced, extra, missing, unexpected)


def _load(model: nn.Module, state: Mapping[str, Any], strict: bool, own: bool) -> tuple[list[str], list[str]]:
    """Call the load_state_dict of the user's class; return the missing and the unknown names."""
    given: Any = OrderedDict((k, v.detach() if isinstance(v, torch.Tensor) else v) for k, v in state.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        given._metadata = OrderedDict((key, dict(value)) for key, value in metadata.items())
    kind = type(model)
    overridden = kind.load_state_dict is not nn.Module.load_state_dict
    try:
        if own:
            keys = kind.load_state_dict(model, given, strict=strict and overridden)
        else:
            keys = nn.Module.load_state_dict(model, given, strict=False, assign=True)
    except RuntimeError as error:
        raise StateMismatch(str(error)) from error
    if keys is None:
        return [], []
    return list(keys.missing_keys), list(keys.unexpected_keys)


@contextlib.contextmanager
def _deferred_extra_states(model: nn.Module, found: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Collect what would be given to `set_extra_state`, which may look at the module's real parameters."""
    modules = [m for m in model.modules() if _definer(m, "set_extra_state") not in (nn.Module, None)]
    try:
        for module in modules:
            module.__dict__["set_extra_state"] = lambda state, module=module: found.append((module, state))
        yield
    finally:
        for module in modules:
            module.__dict__.pop("set_extra_state", None)


def _without_aliases(model: nn.Module, missing: list[str]) -> list[str]:
    """Return the missing names without those of tied tensors that came under another name."""
    absent = set(missing)
    present = {name for aliases in aliases_in(model).values() if not absent.issuperset(aliases) for name in aliases}
    return [name for name in missing if name not in present]
