"""What a trial of an optimizer must see and leave alone outside of parameters and states: hooks, attributes, classes,
random numbers.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from zerocli.engine.optimizer.copies import HOOKS, METHODS, SHARED_HOOKS, Source, content

PRIVATE = ("_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name", "state", "param_groups")
"""Attributes of every optimizer that say nothing of its rule."""


@contextlib.contextmanager
def without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep torch from running step hooks: the engine runs them itself, once per step."""
    shared = (*SHARED_HOOKS.values(), *(vars(optimizer).get(name, {}) for name in HOOKS[:2]))
    kept = [(hooks, dict(hooks)) for hooks in shared if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)


def frozen(value: Any, depth: int = 4) -> Any:
    """Return something that differs if the value was changed."""
    if isinstance(value, torch.Tensor):
        return (id(value), value._version)
    if isinstance(value, str | bytes | int | float | complex | None):
        return repr(value)
    if depth and isinstance(value, dict):
        return tuple((frozen(k, 0), frozen(v, depth - 1)) for k, v in value.items())
    if depth and isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        return tuple(frozen(each, depth - 1) for each in value)
    if depth and hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType | types.ModuleType):
        return (id(value), *(frozen(each, depth - 1) for each in vars(value).values()))
    return id(value)


def kept_outside(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what an optimizer keeps on itself, in its groups and on its class, by the words of a message."""
    found = {f"self.{k}": frozen(v) for k, v in vars(optimizer).items() if k not in (*PRIVATE, *HOOKS, *METHODS)}
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                word = f'param_groups[...]["{key}"]'
                found[word] = (found.get(word), frozen(value))
    for kind in _classes(type(optimizer)):
        for key, value in vars(kind).items():
            if isinstance(value, int | float | list | dict | set | torch.Tensor) and not key.startswith("__"):
                found[f"{kind.__name__}.{key}"] = frozen(value)
    loose = {key: v for key, v in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return found | {"self.state": frozen(loose)}


def _classes(kind: type) -> list[type]:
    return [
        k for k in kind.__mro__ if k not in (torch.optim.Optimizer, object) and not k.__module__.startswith("torch.")
    ]


@contextlib.contextmanager
def random_restored() -> Iterator[set[str]]:
    """Leave all random numbers as they are; afterwards the set says whose were drawn, other than torch's."""
    drawn: set[str] = set()
    before, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield drawn
    if random.getstate() != before:
        drawn.add("Python's random")
        random.setstate(before)
    if not all(np.array_equal(a, b) for a, b in zip(numpys, np.random.get_state(), strict=True)):
        drawn.add("numpy.random")
        np.random.set_state(numpys)


@contextlib.contextmanager
def class_restored(kind: Any) -> Iterator[None]:
    """Undo what a trial changes on the user's class: counts and the like."""
    kinds = _classes(kind) if isinstance(kind, type) else []
    plain = (int, float, list, dict, set, torch.Tensor)
    kept = [(k, n, v, _copied(v)) for k in kinds for n, v in vars(k).items() if isinstance(v, plain) and n[:2] != "__"]
    try:
        yield
    finally:
        for owner, name, value, copy in kept:
            if isinstance(value, list):
                value[:] = copy
            elif isinstance(value, dict | set):
                value.clear()
                value.update(copy)
            elif isinstance(value, torch.Tensor):
                value.data.copy_(copy)
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(value) if isinstance(value, list | dict | set) else value


def constants(source: Source) -> set[int]:
    """Return the whole numbers in the code and the options of an optimizer: a rule may change after that many steps."""
    found: set[int] = set()
    for kind in _classes(source.kind) if isinstance(source.kind, type) else []:
        for value in vars(kind).values():
            function = getattr(value, "__wrapped__", value)
            if isinstance(function, types.FunctionType):
                _constants(function.__code__, function.__globals__, found, 2)
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found |= _whole(value)
    if source.instance is not None:
        for value in vars(source.instance).values():
            found |= _whole(value)
    for group in source.groups:
        for value in group.values():
            found |= _whole(value)
    return found


class Outside:
    """What a rule may read other than parameters, gradients and states, as it was when it was proved.

    With other values the rule may do something else. Of a fraction only the sign counts, and of a whole number which
    numbers of the rule's code it has passed: a schedule of the weight decay, or an epoch, changes nothing by itself.
    The learning rate does not count at all.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, source: Source) -> None:
        self._optimizer = optimizer
        self._classes = _classes(source.kind) if isinstance(source.kind, type) else []
        self._places = [row for each in self._classes for row in _places(vars(each).values(), 2)]
        self._numbers = sorted(constants(source))
        self._known: dict[str, Any] | None = None
        self._now: dict[str, Any] = {}

    def changed(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return what differs from what was accepted last, in words such as `self.count`; empty if nothing does."""
        now = {f"self.{k}": self._kind(v) for k, v in vars(self._optimizer).items() if k not in _NOT_READ}
        for at, group in enumerate(groups):
            rows = {k: self._kind(v) for k, v in group.items() if k not in _NOT_OPTIONS}
            now |= {f'param_groups[{at}]["{k}"]': kind for k, kind in rows.items()}
        for each in self._classes:
            now |= {f"{each.__name__}.{k}": self._kind(v) for k, v in vars(each).items() if k[:2] != "__"}
        self._now = now | {name: self._kind(read()) for name, read in self._places}
        if self._known is None:
            self.accept()
        assert self._known is not None
        keys = self._known.keys() | self._now.keys()
        return min((key for key in keys if self._known.get(key, self) != self._now.get(key, self)), default="")

    def accept(self) -> None:
        """Take what `changed` saw as known."""
        self._known = self._now

    def _kind(self, value: Any, depth: int = 3) -> Any:
        """Return something that differs if a rule could branch differently on the value."""
        if isinstance(value, float):
            return (value > 0) - (value < 0)
        if isinstance(value, str | bool | None):
            return value
        if isinstance(value, int):
            return (value > 0) - (value < 0), bisect.bisect(self._numbers, value), value in self._numbers
        rows: Mapping[Any, Any] = {}
        if isinstance(value, list | tuple):
            rows = dict(enumerate(value[: _MANY + 1]))
        elif not isinstance(value, _OPAQUE):
            rows = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        if not depth or not rows or len(rows) > _MANY:
            return id(value)
        names = [key if isinstance(key, int | str) else id(key) for key in rows]
        return tuple(zip(names, [self._kind(each, depth - 1) for each in rows.values()], strict=True))


_NOT_READ = frozenset((*PRIVATE, *HOOKS, *METHODS, "defaults"))
_NOT_OPTIONS = frozenset(("params", "param_names", "name", "lr", "initial_lr"))
_OPAQUE = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, types.FunctionType, types.MethodType, types.ModuleType)
"""What is told apart by identity alone."""
_MANY = 64


def _places(values: Iterable[Any], depth: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the globals and closures that functions read: the name, and a function that reads it."""
    for value in values:
        function = inspect.unwrap(value) if callable(value) else value
        if not isinstance(function, types.FunctionType) or _foreign(function.__module__):
            continue
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            yield name, functools.partial(content, cell)
        known, names = function.__globals__, set(_names(function.__code__))
        for name in sorted(names & known.keys()):
            if not isinstance(known[name], types.ModuleType):
                yield name, functools.partial(known.get, name)
            elif not _foreign(name):  # config.CENTRED
                inner = vars(known[name])
                yield from ((f"{name}.{each}", functools.partial(inner.get, each)) for each in names & inner.keys())
        if depth:
            yield from _places([known[name] for name in names & known.keys()], depth - 1)


def _foreign(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "np", "numpy", *sys.stdlib_module_names)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


def _whole(value: Any) -> set[int]:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 1 < value < 1e7 and value == int(value)
    return {int(value)} if fits else set()


def _constants(code: types.CodeType, names: Mapping[str, Any], found: set[int], depth: int) -> None:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            _constants(constant, names, found, depth)
        else:
            found |= _whole(constant)
    for name in code.co_names:
        value = names.get(name)
        found |= _whole(value)
        if depth and isinstance(value, types.FunctionType) and not value.__module__.startswith("torch"):
            _constants(value.__code__, value.__globals__, found, depth - 1)
