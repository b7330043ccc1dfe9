"""The Python state that a module's code can change: attributes and buffers, objects and containers in them, variables.

It is found by following what the code names: from a module to its attributes, class and hooks, from a function to its
closure, defaults and globals, from an object to its attributes and slots. Only helper functions and classes outside of
installed packages are followed, and of torch nothing.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zerocli.engine.recompute.contents import CONTAINERS, LARGE, content, is_generator, leaves, members

_OURS = ("_zerocli_entry", "forward", "_call_impl", "__deepcopy__", "__reduce_ex__", "load_state_dict", "zero_grad")
IGNORED = frozenset((*nn.Module().__dict__, *_OURS))
"""Attributes of a module that are not a forward's own state; `training` is compared apart."""

_ATOMS = (int, float, complex, str, bytes, bool, type(None), torch.Tensor, torch.dtype, torch.device, types.ModuleType)
_NOT_USERS = frozenset(("torch", "zerocli", "offload", "tiers", "builtins", "numpy", *sys.stdlib_module_names))
_NAMESPACES = ("SimpleNamespace", "Namespace")
_MOST = 5_000
"""Objects after which the search ends."""


class Reach:
    """The places where the code of modules keeps state: dictionaries, or views that are set like them."""

    def __init__(self, modules: list[nn.Module], num_own: int) -> None:
        self.places: list[dict[str, Any]] = []
        self.buffers: list[dict[str, Any]] = []
        self._seen: dict[Any, Any] = {}
        """Visited objects by id, and code and classes apart, kept alive so that no other object gets the id."""
        self._named: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        """Variables of each module of Python that functions name."""
        self._next: deque[Any] = deque()
        """What is to be visited, the nearest first: there may be more objects than the search takes."""
        self._num_own, self.draws = num_own, False
        """Whether the code of the first `num_own` modules names a global random generator."""
        for self._at, module in enumerate(modules):
            self._module(module)
            while self._next:
                self._visit(self._next.popleft())
        self.places += [_globals(known, list(names)) for known, names in self._named.values() if names]

    def _visit(self, value: Any) -> None:
        kind = type(value)  # not isinstance, which asks the object itself: it may be a proxy, or raise
        self._note_drawing(_draws(value))
        if issubclass(kind, _ATOMS) or id(value) in self._seen or len(self._seen) > _MOST:
            return
        if issubclass(kind, nn.Module):
            for each in value.modules():
                self._module(each)
            return
        self._seen[id(value)] = value
        if kind in CONTAINERS or issubclass(kind, tuple | frozenset):
            if len(value) <= LARGE:
                self._all(members(value))
        elif kind is types.FunctionType:
            if _is_own(_home(value)):
                self._function(value)
        elif kind is types.MethodType:
            self._all((value.__self__, value.__func__))
        elif issubclass(kind, functools.partial):
            self._hold({"args": value.args, "keywords": value.keywords, "func": value.func})
        elif issubclass(kind, type):
            if _is_own(_home(value)):
                self._class(value)
        elif content(value) is None:
            self._object(value)

    def _note_drawing(self, draws: bool) -> None:
        self.draws = self.draws or (draws and self._at < self._num_own)

    def _all(self, values: Any) -> None:
        """Visit these later; not at once, because a chain of objects is as deep as it is long."""
        self._next.extend(values)

    def _hold(self, place: dict[str, Any]) -> None:
        self.places.append(place)
        self._all(list(place.values()))

    def _module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        if module._buffers or _is_users(module):
            self.buffers.append(module._buffers)
        if _is_users(module):
            self.places.append(module.__dict__)
            self._all(value for key, value in list(module.__dict__.items()) if key not in IGNORED)
            self._all((*module._forward_hooks.values(), *module._forward_pre_hooks.values()))
            for kind in type(module).__mro__:
                self._class(kind)

    def _object(self, value: Any) -> None:
        kind = type(value)
        if _home(kind).partition(".")[0] in _NOT_USERS and kind.__name__ not in _NAMESPACES:
            return
        attributes = _attributes(value)
        found = [] if attributes is None else [attributes]
        if slots := {name: slot for each in kind.__mro__ for name, slot in _slots(each)}:
            found.append(_slot_values(value, slots))
        self.places += found
        if _is_own(_home(kind)):  # what a package's object refers to may be anything: a trainer, a whole program
            self._all((*(each for place in found for each in list(place.values())), *kind.__mro__))

    def _class(self, kind: type) -> None:
        """Follow a class of the user's; of a library's only what its methods name."""
        if _home(kind).partition(".")[0] in _NOT_USERS or (id(kind), "class") in self._seen:
            return
        self._seen[(id(kind), "class")] = kind
        if _is_own(_home(kind)):
            self._hold(_class_values(kind))
        for value in list(vars(kind).values()):
            function = getattr(value, "__func__", value)
            self._note_drawing(_draws(function))
            while isinstance(function, types.FunctionType) and _home(function).partition(".")[0] not in _NOT_USERS:
                self._function(function)
                function = getattr(function, "__wrapped__", None)

    def _function(self, function: types.FunctionType) -> None:
        if (id(function), "code") in self._seen:
            return
        self._seen[(id(function), "code")] = function
        code, known = function.__code__, function.__globals__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        cells = {name: cell for name, cell in cells.items() if name != "__class__" and _is_set(cell)}
        if closure := {name: cell for name, cell in cells.items() if _is_state(cell.cell_contents)}:
            self.places.append(_closure(closure))
        named = [known[name] for name in _names(code) if name in known]
        # `numpy.random`, or a module that is imported where it is used; not `torch.random`.
        self._note_drawing("random" in _names(code) and (not any(each is torch for each in named) or _imports(code)))
        state = (name for name in _names(code) if name in known and name[:2] != "__" and _is_state(known[name]))
        self._named.setdefault(id(known), (known, {}))[1].update(dict.fromkeys(state))
        self._all((*(cell.cell_contents for cell in cells.values()), *named))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if defaults and any(True for _ in leaves(defaults)):
            self.places.append({"defaults": defaults})
        self._all(defaults)
        if function.__dict__ and _is_own(_home(function)):
            self.places.append(function.__dict__)


def object_dicts(value: Any, depth: int = 3) -> Iterator[dict[str, Any]]:
    """Yield the attributes of an object that a block gets as an argument, and of the objects in it."""
    if has_state(value):
        attributes = _attributes(value)
        assert attributes is not None
        yield attributes
        if depth:
            for each in list(attributes.values()):
                yield from object_dicts(each, depth - 1)
    elif issubclass(type(value), list | tuple | dict) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from object_dicts(each, depth - 1)


def has_state(value: Any) -> bool:
    """Whether an attribute's value is an object with attributes of its own."""
    kind = type(value)
    if issubclass(kind, (*_ATOMS, tuple, frozenset, nn.Module, type, types.FunctionType, types.MethodType)):
        return False
    return _home(kind).split(".")[0] not in ("torch", "zerocli", "builtins") and _attributes(value) is not None


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object without asking its own code, which may raise; None if it has none."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return found if isinstance(found, dict) else None


def _home(definition: Any) -> str:
    """Return the name of a function's or class's module; an empty one if it was made from text."""
    name = getattr(definition, "__module__", None)
    return name if isinstance(name, str) else ""


@functools.cache
def _is_own(name: str) -> bool:
    """Whether a module of Python is the user's program: neither Python's, nor torch's, nor an installed package's."""
    if name.partition(".")[0] in _NOT_USERS:
        return False
    file = (getattr(sys.modules.get(name), "__file__", None) or "").replace("\\", "/")
    return "/site-packages/" not in file and "/dist-packages/" not in file


def _is_users(module: nn.Module) -> bool:
    """Whether more than torch's own code runs in a module's call: its class is the user's, or it has hooks."""
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return True
    return not type(module).__module__.startswith("torch.nn.modules.")


@functools.cache
def _names(code: types.CodeType) -> list[str]:
    """Return the names that code uses, with those of the functions and comprehensions in it."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return list(dict.fromkeys((*code.co_names, *(name for each in inner for name in _names(each)))))


@functools.cache
def _imports(code: types.CodeType) -> bool:
    """Whether a function imports random generators itself."""
    return any(each.opname == "IMPORT_NAME" and "random" in str(each.argval) for each in dis.get_instructions(code))


def _draws(value: Any) -> bool:
    """Whether a value is Python's or numpy's module of random numbers, or a function of their global generators."""
    if type(value) is types.ModuleType:
        return value.__name__ in ("random", "numpy.random")
    owner = getattr(value, "__self__", None) if type(value) in (types.BuiltinMethodType, types.MethodType) else None
    return owner is not None and is_generator(type(owner))


def _slots(kind: type) -> list[tuple[str, Any]]:
    held = ((name, value) for name, value in vars(kind).items() if name != "__dict__")
    return [(name, value) for name, value in held if isinstance(value, types.MemberDescriptorType)]


def _is_state(value: Any) -> bool:
    """Whether a variable's value may be a forward's state and not a definition, or an object of Python's own."""
    if callable(value) or isinstance(value, types.ModuleType | type):
        return False
    return _home(type(value)).partition(".")[0] not in sys.stdlib_module_names or _attributes(value) is None


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not assigned yet
        return False
    return True


class View(dict[str, Any]):
    """What is kept elsewhere than in a dictionary, as one that can be set; `refresh` reads it again."""

    def __init__(
        self,
        read: Callable[[], dict[str, Any]],
        write: Callable[[str, Any], None],
        remove: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._read, self._write, self._remove = read, write, remove
        super().__init__(read())

    def refresh(self) -> None:
        self.clear()
        self.update(self._read())

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._write(name, value)

    def pop(self, name: str, *default: Any) -> Any:
        self._remove(name)
        return super().pop(name, *default)


def _closure(cells: dict[str, types.CellType]) -> View:
    """Return the variables of a function's closure."""

    def write(name: str, value: Any) -> None:
        cells[name].cell_contents = value

    return View(lambda: {name: cell.cell_contents for name, cell in cells.items() if _is_set(cell)}, write)


def _globals(variables: dict[str, Any], names: list[str]) -> View:
    """Return those variables of a module of Python that functions name."""
    return View(lambda: {name: variables[name] for name in names if name in variables}, variables.__setitem__)


def _slot_values(owner: Any, slots: dict[str, Any]) -> View:
    """Return the slots of an object; what its own code says of them is not asked."""

    def read() -> dict[str, Any]:
        found = {}
        for name, slot in slots.items():
            with contextlib.suppress(AttributeError):  # not assigned
                found[name] = slot.__get__(owner)
        return found

    return View(read, lambda name, value: slots[name].__set__(owner, value), lambda name: slots[name].__delete__(owner))


def _class_values(kind: type) -> View:
    """Return the attributes of a class that are values, not definitions."""

    def read() -> dict[str, Any]:
        items = [(name, value) for name, value in vars(kind).items() if name[:2] != "__"]
        return {name: value for name, value in items if _is_state(value) and not hasattr(type(value), "__get__")}

    return View(read, functools.partial(type.__setattr__, kind), functools.partial(type.__delattr__, kind))
