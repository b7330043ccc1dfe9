"""The Python state that a module's code can change: its attributes and buffers, objects in them, and variables."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_OURS = ("_zerocli_entry", "forward", "_call_impl", "__deepcopy__", "__reduce_ex__", "load_state_dict", "zero_grad")
IGNORED = frozenset((*nn.Module().__dict__, *_OURS))
"""Attributes of a module that are not a forward's own state; `training` is compared apart."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), tuple, frozenset, torch.Tensor, torch.dtype, torch.device)


def owned_dicts(modules: list[nn.Module]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the attribute dictionaries and the buffer dictionaries of modules whose code is not torch's alone.

    The objects that their attributes hold count too, one level deep.
    """
    attributes: dict[int, dict[str, Any]] = {}
    buffers: list[dict[str, Any]] = []
    for module in modules:
        if _is_users(module):
            attributes[id(module.__dict__)] = module.__dict__
            buffers.append(module._buffers)
            for key, value in module.__dict__.items():
                if key not in IGNORED and has_state(value):
                    attributes.setdefault(id(value.__dict__), value.__dict__)
        elif module._buffers:
            buffers.append(module._buffers)
    return list(attributes.values()), buffers


def object_dicts(value: Any, depth: int = 3) -> Iterator[dict[str, Any]]:
    """Yield the attributes of an object that a block gets as an argument, and of the objects in it."""
    if has_state(value):
        yield value.__dict__
        if depth:
            for each in list(value.__dict__.values()):
                yield from object_dicts(each, depth - 1)
    elif isinstance(value, list | tuple | dict) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from object_dicts(each, depth - 1)


def variables(modules: list[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield the closures and the globals that the methods of these modules name, as dictionaries that can be set."""
    functions = {id(f): f for kind in dict.fromkeys(map(type, modules)) for f in _functions(kind)}
    named: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    for function in functions.values():
        code, known = function.__code__, function.__globals__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        if closure := {name: cell for name, cell in cells if name != "__class__" and _is_set(cell)}:
            yield _Closure(closure)
        names = [name for name in code.co_names if name in known and _is_state(known[name])]
        named.setdefault(id(known), (known, {}))[1].update(dict.fromkeys(names))
    for known, names_of in named.values():
        if names_of:
            yield _Globals(known, list(names_of))


def _functions(kind: type) -> Iterator[types.FunctionType]:
    for each in kind.__mro__:
        if each is nn.Module or each.__module__.split(".")[0] in ("torch", "builtins", "zerocli"):
            continue
        for value in vars(each).values():
            function = getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                yield function
                while isinstance(function := getattr(function, "__wrapped__", None), types.FunctionType):
                    yield function


def _is_users(module: nn.Module) -> bool:
    """Whether more than torch's own code runs in a module's call: its class is the user's, or it has hooks."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return True
    return not type(module).__module__.startswith("torch.nn.modules.")


def has_state(value: Any) -> bool:
    """Whether an attribute's value is an object with attributes of its own."""
    if isinstance(value, (*_PLAIN, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    return type(value).__module__.split(".")[0] not in ("torch", "zerocli", "builtins") and hasattr(value, "__dict__")


def _is_state(value: Any) -> bool:
    """Whether a global variable's value may be a forward's state and not a definition."""
    return not (callable(value) or isinstance(value, types.ModuleType | type))


def _is_set(cell: types.CellType) -> bool:
    try:
        return _is_state(cell.cell_contents)
    except ValueError:  # not assigned yet
        return False


class _Closure(dict[str, Any]):
    """The variables of a function's closure."""

    def __init__(self, cells: dict[str, types.CellType]) -> None:
        super().__init__({name: cell.cell_contents for name, cell in cells.items()})
        self._cells = cells

    def refresh(self) -> None:
        self.update({name: cell.cell_contents for name, cell in self._cells.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._cells[name].cell_contents = value


class _Globals(dict[str, Any]):
    """Those variables of a module of Python that one function names."""

    def __init__(self, variables: dict[str, Any], names: list[str]) -> None:
        super().__init__({name: variables[name] for name in names})
        self._variables = variables

    def refresh(self) -> None:
        self.update({name: self._variables[name] for name in self if name in self._variables})

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._variables[name] = value
