"""Recomputation of a forward that changes state: it sees what the first run saw, and leaves no second trace.

[Note: state under recomputation]
A block may change more than its output: buffers (running statistics, a codebook), attributes (a counter, a cache), the
state of Python's and numpy's random generators, globals. Before the first run of a call, `RecomputedCall` notes the
state in reach. The recomputation compares it with the present one, and puts back what differs while it runs.

Objects are exchanged, not written to: a module gets a copy of the buffer or list as the first run found it, and its own
object afterwards. So no version counter changes that another graph depends on.

The first calls of a block keep copies of everything in reach and compare values. Later ones keep copies only of what
was found to change, and compare identities and version counters, which needs no device synchronisation. A change that
begins later is refused, because its old value is gone.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from zerocli.engine.guards.aliases import Invalidated
from zerocli.engine.recompute.mutable_state import IGNORED, object_dicts, owned_dicts, variables
from zerocli.errors import Refused

CAREFUL_CALLS = 2
"""Number of recomputed calls of a block that compare all values."""

_MISSING = object()
_CONTAINERS = frozenset((list, dict, set, deque, bytearray, OrderedDict, defaultdict, Counter))


class _Copy(NamedTuple):
    """An object as the first run found it."""

    original: Any
    content: Any
    version: int
    """Version counter of a tensor."""


class Seen(NamedTuple):
    """What the first run of one call found."""

    dicts: list[tuple[dict[str, Any], dict[str, Any]]]
    """Attributes and buffers: the live dictionary, and its items at that time."""
    versions: list[tuple[dict[str, Any], str, int]]
    """Version counters of buffers."""
    copies: dict[int, _Copy]
    """Copies of objects that may change, by the object's id."""
    training: list[bool]
    generators: list[Any]
    """States of the global random generators; empty if the block does not draw from them."""


class ReachableState:
    """The state that a recomputed block can change: of its own modules, and of `others` outside of all blocks."""

    def __init__(self, name: str, module: nn.Module, others: list[nn.Module]) -> None:
        self.name = name
        self._own = list(module.modules())
        inside = {id(each) for each in self._own}
        self._modules = [*self._own, *(each for each in others if id(each) not in inside)]
        self._quick: list[dict[str, Any]] = []
        self._buffers: list[dict[str, Any]] = []
        self._variables: list[Any] | None = None
        """Closures and globals that its methods name."""
        self._changing: dict[tuple[int, str], dict[str, Any]] = {}
        """Places of objects whose content was found to change: the dictionary, by its id and the key."""
        self._draws = False
        self._pure = all(map(_is_pure, self._modules))
        """Whether no forward in reach changes anything: those of the built-in models do not."""
        self.careful = 0 if self._pure else CAREFUL_CALLS
        self._mode: list[bool] = []

    def note(self, given: list[dict[str, Any]]) -> Seen:
        """Return the present state; copies of all of it while little is known about the block.

        `given` are the attributes of objects among the call's arguments.
        """
        if self._pure:
            return Seen([], [], {}, [], [])
        training = [module.training for module in self._own]
        if training != self._mode:  # train() after eval(): other buffers may change now
            self._mode, self.careful = training, CAREFUL_CALLS
        if self._variables is None:
            self._variables = list(variables(self._modules))
        if self.careful:
            self._quick, self._buffers = owned_dicts(self._modules)
        for each in self._variables:
            each.refresh()
        dicts = [(d, dict(d)) for d in (*self._quick, *self._buffers, *self._variables)]
        if self.careful:
            found = [value for _, items in dicts for key, value in items.items() if key not in IGNORED]
        else:
            found = [d.get(key) for (_, key), d in self._changing.items()]
        dicts += [(d, dict(d)) for d in given]
        found += [value for d in given for value in d.values()]
        copies = {id(value): made for value in found if (made := _copied(value, shared=self.careful > 0))}
        versions = [(d, k, t._version) for d in self._buffers for k, t in d.items() if t is not None]
        return Seen(dicts, versions, copies, training, _states() if self._draws or self.careful else [])

    def ran(self, seen: Seen) -> None:
        """Learn from the first run of a call whether the block draws from the global random generators."""
        if self.careful and not self._draws:
            self._draws = not _equal_states(seen.generators, _states())

    @contextlib.contextmanager
    def as_seen(self, seen: Seen) -> Iterator[None]:
        """Give the body the state of the first run, and restore the present one afterwards."""
        back: list[tuple[dict[str, Any], str, Any]] = []
        made: dict[int, Any] = {}
        originals: list[_Copy] = []
        for each in self._variables or ():
            each.refresh()
        changed = self._changed(seen)
        for d, items in seen.dicts:
            for key in _differing(d, items, changed):
                back.append((d, key, d.get(key, _MISSING)))
                old = items.get(key, _MISSING)
                if id(old) in changed:
                    if id(old) not in made:
                        made[id(old)] = _restored(seen.copies[id(old)])
                        originals.append(_noted(old))
                    old = made[id(old)]
                _put(d, key, old)
        generators = [(each, _state(each)) for each in _drawn_from(seen, changed)]
        for each, _ in generators:
            _set_state(each, seen.copies[id(each)].content)
        training, states = [module.training for module in self._own], _states() if self._draws else []
        self._switch(training, seen.training)
        if self._draws:
            _restore_states(seen.generators)
        try:
            yield
        finally:
            for d, key, value in reversed(back):
                _put(d, key, value)
            for each, state in generators:
                _set_state(each, state)
            self._switch(seen.training, training)
            _restore_states(states)
            self.careful = max(0, self.careful - 1)
            self._refuse_changed(originals)

    def _refuse_changed(self, originals: list[_Copy]) -> None:
        """Refuse a recomputation that reached an object although its place held a copy."""
        error = sys.exc_info()[0]
        if error is not None and error.__name__ != "_StopRecomputationError":  # torch's way to end a recomputation
            return
        for original in originals:
            if _differs(original, careful=False):
                raise Refused(
                    f"{self.name} is recomputed, and its forward changes a {type(original.original).__name__} that it "
                    "reaches in more than one way, so it would be changed twice: exclude the block with "
                    "shard(..., recompute=...)"
                )

    def _changed(self, seen: Seen) -> set[int]:
        """Return the ids of objects whose content differs from what the first run found; refuse what has no copy."""
        found = {key for key, copied in seen.copies.items() if self._found(copied)}
        if found and self.careful:
            self._changing |= {(id(d), k): d for d, items in seen.dicts for k, v in items.items() if id(v) in found}
        for d, key, version in seen.versions:
            value = d.get(key)
            if value is not None and value._version != version and id(value) not in seen.copies:
                before = next(items for live, items in seen.dicts if live is d).get(key)
                if value is before:
                    raise Refused(
                        f"{self.name} is recomputed, and its buffer {key!r} was changed between its forward and its "
                        "backward, but not in its first calls: exclude the block with shard(..., recompute=...)"
                    )
        return found

    def _found(self, copied: _Copy) -> bool:
        if not self.careful and isinstance(copied.original, torch.Tensor):
            return True  # it is known to change; neither batch norm nor `.data` counts a version
        return _differs(copied, self.careful > 0)

    def _switch(self, now: list[bool], to: list[bool]) -> None:
        if now != to and not self._pure:
            for module, mode in zip(self._own, to, strict=True):
                module.training = mode


def _is_pure(module: nn.Module) -> bool:
    """Whether a module is of the built-in models, or one of torch's without buffers: their forwards change nothing."""
    kind = type(module).__module__
    if kind.startswith("zerocli.models.") and not module.__dict__.get("_forward_hooks"):
        return True
    return kind.startswith("torch.nn.modules.") and not module._buffers and not module._forward_pre_hooks


class RecomputedCall:
    """The two runs of one call of a recomputed block."""

    def __init__(
        self, reach: ReachableState, check: Callable[[], None], args: Any, kwargs: Any, leaves: list[Any]
    ) -> None:
        self._reach, self._check = reach, check
        self._seen: Seen | None = None
        self._call: tuple[Any, Any] | None = (args, kwargs)
        """The arguments, until the first run takes them: it gets the caller's own containers."""
        self._given = [d for leaf in leaves for d in object_dicts(leaf)]
        self._leaves = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_leaf]

    def arguments(self, spec: TreeSpec, leaves: Any) -> Any:
        """Return (args, kwargs): the caller's own for the first run, new containers of `leaves` for the others."""
        call, self._call = self._call, None
        return tree_unflatten(leaves, spec) if call is None else call

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the block's forward, or its recomputation: then with the state that the first run found."""
        if self._seen is None:
            seen = self._seen = self._reach.note(self._given)
            yield
            self._reach.ran(seen)
            return
        self._check()
        if any(leaf._version != version for leaf, version in self._leaves):
            raise Refused(
                f"{self._reach.name} is recomputed, and one of its inputs was changed in place after it was given: "
                "give it a copy, or exclude the block with shard(..., recompute=...)"
            )
        with self._reach.as_seen(self._seen):
            yield


# -- objects -----------------------------------------------------------------------------------------------------------


_newest: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""The last copy of a tensor that some call still keeps, by the tensor's id."""


def _copied(value: Any, shared: bool = False) -> _Copy | None:
    """Return a copy of an object that can change in place; None of any other.

    If `shared`, a tensor's last copy is used again where it has the same values: many blocks have one table in reach.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(value, Invalidated) or value.requires_grad or value.layout != torch.strided or value.is_meta:
            return None
        newest = _newest.get(id(value)) if shared else None
        content = newest if newest is not None and _same_bits(value, newest) else value.detach().clone()
        if shared:
            _newest[id(value)] = content
        return _Copy(value, content, value._version)
    if type(value) in _CONTAINERS:
        return _Copy(value, copy.copy(value), 0)
    state = _state(value)
    return None if state is None else _Copy(value, state, 0)


def _restored(copied: _Copy) -> Any:
    """Return an object like the original as it was copied; the copy itself stays for another backward."""
    if isinstance(copied.original, torch.Tensor):
        return copied.content.clone()
    return copy.copy(copied.content) if type(copied.original) in _CONTAINERS else copied.original


def _noted(value: Any) -> _Copy:
    """Return what shows whether an object changes from now on; of a tensor the version counter alone."""
    if isinstance(value, torch.Tensor):
        return _Copy(value, None, value._version)
    return _copied(value) or _Copy(value, None, 0)


def _differs(copied: _Copy, careful: bool) -> bool:
    """Whether an object has changed since it was copied; `careful` compares the values of tensors."""
    now = copied.original
    if isinstance(now, torch.Tensor):
        if now._version != copied.version:
            return True
        # An edit through `.data` leaves the counter: what may change so is found in the first calls.
        return careful and not _same_bits(now, copied.content)
    if isinstance(now, dict):
        return len(now) != len(copied.content) or any(copied.content.get(k, _MISSING) is not v for k, v in now.items())
    if isinstance(now, set | bytearray):
        return bool(now != copied.content)
    if type(now) in _CONTAINERS:
        return len(now) != len(copied.content) or not all(map(is_, now, copied.content))
    return not _equal_states(_state(now), copied.content)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):  # in a plan, which has no values
        return True
    return bool(torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())))


def _differing(d: dict[str, Any], items: dict[str, Any], changed: set[int]) -> list[str]:
    """Return the keys whose object was replaced, added or removed, or whose object is among `changed`."""
    if not changed and len(d) == len(items) and all(map(is_, d.values(), items.values())):
        return []
    keys = [key for key, old in items.items() if d.get(key, _MISSING) is not old or id(old) in changed]
    return [key for key in (*keys, *(key for key in d if key not in items)) if key not in IGNORED]


def _put(d: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        d.pop(key, None)
    else:
        d[key] = value


# -- random generators -------------------------------------------------------------------------------------------------


def _state(generator: Any) -> Any:
    """Return the state of a random generator; None of any other object."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if numpy is not None and isinstance(generator, numpy.random.RandomState) else None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _drawn_from(seen: Seen, changed: set[int]) -> list[Any]:
    return [seen.copies[key].original for key in changed if _state(seen.copies[key].original) is not None]


def _states() -> list[Any]:
    """Return the states of Python's and numpy's global generators; checkpoint keeps torch's."""
    numpy: Any = sys.modules.get("numpy")
    return [random.getstate(), numpy.random.get_state() if numpy is not None else None]


def _restore_states(states: list[Any]) -> None:
    if states:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])


def _equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal_states, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)
