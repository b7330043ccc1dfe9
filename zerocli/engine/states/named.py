"""Tensors by name: whether a state matches a model, in which a tied weight has several names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from zerocli.engine.tensor_parallel import TensorParallel

State = Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]


class StateMismatch(ValueError, RuntimeError):
    """A state that is not of this model; torch's load_state_dict raises RuntimeError for the same."""


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's parameters and persistent buffers under all their names, which no hook has changed."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, p in module._parameters.items():
            if p is not None:
                yield prefix + name, p
        for name, b in module._buffers.items():
            if b is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, b


def aliases_in(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each of the model's parameters and persistent buffers, by tensor id."""
    found: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(id(tensor), []).append(name)
    return found


class IncompatibleKeys(NamedTuple):
    """Missing and unexpected names, as in torch's `load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Matched(NamedTuple):
    """The name in the state that each tensor of a model is loaded from, by tensor id, and all mismatches."""

    names: dict[int, str]
    missing: list[str]
    unexpected: list[str]
    other_shape: list[str]

    def require(self, strict: bool = True) -> None:
        """Raise StateMismatch with all mismatches; without `strict`, only wrong shapes count."""
        if self.other_shape or (strict and (self.missing or self.unexpected)):
            raise StateMismatch(
                f"state_dict does not match: missing {self.missing}, unknown {self.unexpected}, "
                f"other shape {self.other_shape}"
            )


def match(model: nn.Module, state: Mapping[str, torch.Tensor], tp: TensorParallel) -> Matched:
    """Return how `state` matches the model; a tied weight needs one of its names, and several must be equal."""
    own = dict(named_tensors(model))
    found = Matched({}, [], sorted(state.keys() - own.keys()), [])
    for key, aliases in aliases_in(model).items():
        there = [name for name in aliases if name in state]
        kinds = {name: type(state[name]) for name in there}
        if odd := [
            f"{name} is a {kind.__name__}" for name, kind in kinds.items() if not issubclass(kind, torch.Tensor)
        ]:
            found.other_shape.extend(odd)
            continue
        if not there:
            found.missing.extend(aliases)
            continue
        first = there[0]
        whole = tp.whole_shape(aliases[0], own[first].shape)
        wrong = [
            f"{name} {tuple(state[name].shape)}, not {tuple(whole)}" for name in there if state[name].shape != whole
        ]
        found.other_shape.extend(wrong)
        if not wrong:
            for other in there[1:]:
                if state[other] is not state[first] and not torch.equal(state[other], state[first]):
                    raise StateMismatch(
                        f"{first} and {other} are one tied weight of the model and two different ones of the state; "
                        "leave one of them out"
                    )
        found.names[key] = first
    return found


def given(model: nn.Module, state: State | None, tp: TensorParallel) -> Callable[[str], torch.Tensor] | None:
    """Return a function from a parameter's name to this rank's part of its given value; None if no state is given.

    Raise ValueError, before anything is read, if a mapping's names or shapes do not match the model.
    """
    if state is None:
        return None
    aliases, ids = aliases_in(model), {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)}
    if isinstance(state, Mapping):
        match(model, state, tp).require()
    # Parameters are replaced while the model is built, so ids change; names do not.
    others = {name: aliases[key] for name, key in ids.items() if key in aliases}

    def read(name: str) -> torch.Tensor:
        value = _find(state, others[name])
        if value is None:
            raise ValueError(f"state gives no value for {' or '.join(others[name])}")
        return tp.part(name, value)

    return read


def load_buffers(model: nn.Module, state: State) -> None:
    """Overwrite the model's persistent buffers with those in `state`."""
    with torch.no_grad():
        for name, value in named_tensors(model):
            if not isinstance(value, nn.Parameter) and (new := _find(state, [name])) is not None:
                value.copy_(new)


def _find(state: State, names: list[str]) -> torch.Tensor | None:
    """Return the value of the first of these names in `state`; a function may raise KeyError for unknown names."""
    for name in names:
        try:
            value = state[name] if isinstance(state, Mapping) else state(name)
        except KeyError:
            continue
        if value is not None:
            return value
    return None
