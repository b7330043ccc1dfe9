"""Sharded modules: calls of a user's module go through the engine, through a subclass created at run time.

The user's own hooks run inside, with gathered parameters. `module(x)` and `module.forward(x)` are equivalent.
Attributes, `isinstance`, the class name and the signature of `forward` do not change.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn

from zerocli.engine.parameters import ReleasedParameter
from zerocli.engine.unit import Unit, outside
from zerocli.errors import Refused

_ENTRY = "_zerocli_entry"
_CLASS = "_zerocli_class"


class Runner(Protocol):
    """Runs the calls of sharded modules."""

    def run(self, entry: Entry, function: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def run_body(self, entry: Entry, args: Any, kwargs: Any) -> Any: ...

    def load_state_dict(self, state: Any, strict: bool) -> Any: ...

    def load_part(self, module: nn.Module, state: Any, strict: bool) -> Any: ...


class Entry:
    """A sharded module's link to its engine: the unit that holds its parameters, and its original forward."""

    def __init__(self, unit: Unit, module: nn.Module, runner: Runner) -> None:
        self.unit, self.runner = unit, runner
        self.own = module is unit.module
        """Whether the module is the unit itself; otherwise it is part of the rest, and may be called by itself."""
        self.root = self.own and unit.index == 0
        self.before = module.__dict__.get("forward")
        """The forward that the user had set on the instance, if any."""
        self.body: Callable[..., Any] = module.forward
        self.methods: list[str] = []
        """Registered methods of the instance."""
        self.called = False
        """Whether the next forward belongs to a `__call__` in progress."""

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `module.__call__`, including hooks."""

        def called(*args: Any, **kwargs: Any) -> Any:
            self.called = True
            try:
                return function(*args, **kwargs)
            finally:
                self.called = False

        return self.runner.run(self, called, args, kwargs)

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Run `module.forward`, as part of a call or by itself."""
        if self.called:
            self.called = False
            return self.runner.run_body(self, args, kwargs)
        return self.runner.run(self, self.body, args, kwargs)


def wrap(module: nn.Module, unit: Unit, runner: Runner) -> Entry:
    """Route a module's calls through the runner."""
    if _ENTRY in module.__dict__:
        raise Refused(f"{type(module).__name__} is sharded by another engine already: close that one first")
    entry = Entry(unit, module, runner)
    module.__dict__.pop("forward", None)
    module.__dict__[_ENTRY] = entry
    sharded = _sharded_class(type(module))  # type: ignore[arg-type]
    object.__setattr__(module, "__class__", sharded)  # the user's own __setattr__ may refuse
    return entry


def unwrap(module: nn.Module) -> None:
    """Undo `wrap`."""
    entry: Entry | None = module.__dict__.pop(_ENTRY, None)
    if entry is not None:
        object.__setattr__(module, "__class__", class_of(module))
        for name in entry.methods:
            module.__dict__.pop(name, None)
        if entry.before is not None:
            module.__dict__["forward"] = entry.before


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module, also if it is sharded."""
    kind: type[nn.Module] = getattr(type(module), _CLASS, type(module))
    return kind


def register_method(module: nn.Module, name: str) -> None:
    """Gather a sharded module's parameters for one of its methods, as for its forward."""
    entry: Entry | None = module.__dict__.get(_ENTRY)
    if entry is None:
        raise Refused(
            f"{type(module).__name__} is inside a unit, which is gathered as a whole: register the method of the unit, "
            "or choose shard(..., units=...) so that it is one"
        )
    method = getattr(module, name)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        assert entry is not None
        return entry.runner.run(entry, method, args, kwargs)

    module.__dict__[name] = run
    entry.methods.append(name)


def outside_of_units(model: nn.Module, units: list[Unit]) -> Iterator[nn.Module]:
    """Yield the modules, except the model itself, that hold parameters of the rest; each may be called by itself."""
    rest = {id(p) for flat in units[0].flats for p in flat.parameters}
    # torch.compile's wrapper of a part is called; the part in it is inside its graph.
    compiled = {id(m._orig_mod) for m in model.modules() if "_orig_mod" in m._modules}
    for module in outside(model, {id(unit.module) for unit in units if unit.index > 0} | compiled):
        container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if module is not model and not container and any(id(p) in rest for p in module.parameters()):
            yield module


@contextlib.contextmanager
def _unannounced(original: type) -> Iterator[None]:
    """Let the body make a subclass without `__init_subclass__` of the user's classes, which may need arguments."""
    own = original.__dict__.get("__init_subclass__")
    type.__setattr__(original, "__init_subclass__", classmethod(lambda cls, **arguments: None))
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(original, "__init_subclass__")
        else:
            type.__setattr__(original, "__init_subclass__", own)


@functools.cache
def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_ENTRY].call(functools.partial(original.__call__, self), args, kwargs)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_ENTRY].forward(args, kwargs)

    def load_state_dict(self: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        entry: Entry = self.__dict__[_ENTRY]
        if entry.root:  # also loads masters and every rank's part, which a copy into parameters would miss
            return entry.runner.load_state_dict(state_dict, strict)
        if any(isinstance(p, ReleasedParameter) for p in self.parameters()):
            return entry.runner.load_part(self, state_dict, strict)
        return original.load_state_dict(self, state_dict, strict=strict, assign=assign)

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = original.__new__(original)
        memo[id(self)] = made
        entry: Entry = self.__dict__[_ENTRY]
        state = {key: value for key, value in self.__dict__.items() if key not in (_ENTRY, *entry.methods)}
        if entry.before is not None:
            state["forward"] = entry.before
        made.__dict__.update(copy.deepcopy(state, memo))
        return made

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        raise Refused(
            f"a sharded {original.__name__} cannot be pickled: save engine.state_dict(), or the module that "
            "engine.unsharded_model() returns"
        )

    body: dict[str, Any] = {_CLASS: original, "__call__": __call__, "forward": forward}
    body |= {"load_state_dict": load_state_dict, "__deepcopy__": __deepcopy__, "__reduce_ex__": __reduce_ex__}
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    # A metaclass of the user's may count or refuse classes, so only its base makes this one.
    meta: Any = abc.ABCMeta if issubclass(type(original), abc.ABCMeta) else type
    with _unannounced(original):
        made: type[nn.Module] = meta.__new__(type(original), original.__name__, (original,), body)
    return made
