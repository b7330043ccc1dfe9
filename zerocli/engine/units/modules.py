"""Sharded modules: calls of a user's module go through the engine, by attributes of the instance.

The user's own hooks run inside, with gathered parameters. `module(x)` and `module.forward(x)` are equivalent. The class
and the signature of `forward` do not change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from zerocli.engine.guards.parameters import Pending, Released
from zerocli.engine.units.divide import outside
from zerocli.engine.units.odd_widths import linear_forward
from zerocli.engine.units.unit import Unit
from zerocli.errors import Refused

if TYPE_CHECKING:
    from zerocli.engine.units.hooks import Hooks

_ENTRY = "_zerocli_entry"


class Entry:
    """A sharded module's link to its engine: the unit that holds its parameters, and its original forward."""

    def __init__(self, unit: Unit, module: nn.Module, hooks: Hooks) -> None:
        self.unit, self.hooks = unit, hooks
        self.own = module is unit.module
        """Whether the module is the unit itself; otherwise it is part of the rest, and may be called by itself."""
        self.root = self.own and unit.index == 0
        self.before = module.__dict__.get("forward")
        """The forward that the user had set on the instance, if any."""
        self.body: Callable[..., Any] = linear_forward(module) or _present_forward(module)
        self.methods: list[str] = []
        """Attributes of the instance that sharding added."""
        self.called = False
        """Whether the next forward belongs to a `__call__` in progress."""


class _ClassForward:
    """The forward that a module's class has at each call: libraries replace it on the class, also after `shard`."""

    def __init__(self, module: nn.Module) -> None:
        self.__self__ = module

    @property
    def __func__(self) -> Callable[..., Any]:
        return type(self.__self__).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)


def _present_forward(module: nn.Module) -> Callable[..., Any]:
    forward: Callable[..., Any] = module.forward
    of_class = getattr(forward, "__func__", None) is getattr(type(module), "forward", module)
    return _ClassForward(module) if of_class else forward


def wrap(module: nn.Module, unit: Unit, hooks: Hooks) -> Entry:
    """Route a module's calls through the engine's hooks."""
    if _ENTRY in module.__dict__:
        raise Refused(f"{type(module).__name__} is sharded by another engine already: close that one first")
    entry = Entry(unit, module, hooks)
    routes = {
        "load_state_dict": _load(module, entry),
        "forward": _forward(module, entry),
        "_call_impl": _call(module._call_impl, entry),
        "__deepcopy__": functools.partial(_deep_copy, module),
        "__reduce_ex__": functools.partial(_refuse_pickling, module),
    }
    if entry.root:
        routes["zero_grad"] = _zero(module.zero_grad, entry)
    entry.methods += routes
    # Not by attributes, which the user's own __setattr__ may refuse.
    module.__dict__.update(routes | {_ENTRY: entry})
    return entry


def unwrap(module: nn.Module) -> None:
    """Undo `wrap`."""
    entry: Entry | None = module.__dict__.pop(_ENTRY, None)
    if entry is not None:
        for name in entry.methods:
            module.__dict__.pop(name, None)
        if entry.before is not None:
            module.__dict__["forward"] = entry.before


def is_routed(module: nn.Module, name: str) -> bool:
    """Whether an attribute of the instance is one that `wrap` has set."""
    entry: Entry | None = module.__dict__.get(_ENTRY)
    return entry is not None and name in entry.methods


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
        return entry.hooks.run(entry, method, args, kwargs)

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


def _call(original: Callable[..., Any], entry: Entry) -> Callable[..., Any]:
    """Return the function that `module(...)` runs; torch looks it up on the instance."""

    def within(*args: Any, **kwargs: Any) -> Any:
        entry.called = True
        try:
            return original(*args, **kwargs)
        finally:
            entry.called = False

    def call(*args: Any, **kwargs: Any) -> Any:
        return entry.hooks.run(entry, within, args, kwargs)

    return call


def _forward(module: nn.Module, entry: Entry) -> Callable[..., Any]:
    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not entry.called:  # by itself, without a call
            return entry.hooks.run(entry, entry.body, args, kwargs)
        entry.called = False
        with entry.hooks.engine.gatherer.saving():  # the user's own checkpoint, with its hooks, may be in between
            return entry.body(*args, **kwargs)

    return forward


def _load(module: nn.Module, entry: Entry) -> Callable[..., Any]:
    original = module.load_state_dict

    def load_state_dict(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        # The engine also loads masters and every rank's part, which a copy into parameters would miss.
        if entry.root:
            return entry.hooks.engine.load_state_dict(state_dict, strict)
        if any(isinstance(p, Released) for p in module.parameters()):
            return entry.hooks.engine.load_part(module, state_dict, strict)
        if any(isinstance(p, Pending) for p in module.parameters()):  # torch would put our refusal into a RuntimeError
            raise Refused(
                f"parameters of this {type(module).__name__} are being updated, because of defer_update=True: call "
                "engine.synchronize() before load_state_dict"
            )
        return original(state_dict, strict=strict, assign=assign)

    return load_state_dict


def _zero(original: Callable[..., Any], entry: Entry) -> Callable[..., Any]:
    def zero_grad(set_to_none: bool = True) -> None:
        original(set_to_none)  # refused if the engine holds gradients
        if not set_to_none:
            entry.hooks.engine.zero_grad(set_to_none)

    return zero_grad


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    made = type(module).__new__(type(module))
    memo[id(module)] = made
    entry: Entry = module.__dict__[_ENTRY]
    state = {key: value for key, value in module.__dict__.items() if key not in (_ENTRY, *entry.methods)}
    if entry.before is not None:
        state["forward"] = entry.before
    made.__dict__.update(copy.deepcopy(state, memo))
    return made


def _refuse_pickling(module: nn.Module, protocol: Any) -> Any:
    raise Refused(
        f"a sharded {type(module).__name__} cannot be pickled, nor copied by copy.copy: save engine.state_dict(), or "
        "take the copy that engine.unsharded_model() returns"
    )
