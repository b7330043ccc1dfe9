"""Recomputation of a forward that changes state: it sees what the first run saw, and leaves no second trace.

[Note: state under recomputation]
A block may change more than its output: buffers (running statistics, a codebook), attributes (a counter, a cache), the
state of random generators, variables. Before the first run of a call, `RecomputedCall` notes the state in reach
(mutable_state.py). The recomputation compares it with the present one, and puts back what differs while it runs.

Tensors are exchanged, not written to: a module gets a copy of the buffer as the first run found it, and its own object
afterwards. So no version counter changes that another graph depends on. Containers and generators get their old content
back, and the present one afterwards.

The first calls of a block keep copies of everything in reach and compare values. Later ones keep copies only of what
was found to change, and compare identities, lengths and version counters, which needs no device synchronisation. A
change that begins later is refused, because its old value is gone.

The first calls also compare what autograd saves in both runs, and what they return (saved_values.py): state that is not
in reach is refused.
"""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Set
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.checkpoint import set_checkpoint_early_stop

from zerocli.engine.guards.aliases import Invalidated
from zerocli.engine.recompute.contents import (
    CONTAINERS,
    LARGE,
    containers,
    content,
    is_generator,
    leaves,
    position,
    put_back,
    same_content,
    version,
)
from zerocli.engine.recompute.mutable_state import IGNORED, Reach, View, object_dicts
from zerocli.engine.recompute.saved_values import SavedValues, is_end
from zerocli.errors import Refused

CAREFUL_CALLS = 2
"""Number of recomputed calls of a block that compare all values."""
_EXCLUDE = "exclude the block with shard(..., recompute=...)"

_MISSING = object()


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
    versions: list[tuple[dict[str, Any], str, torch.Tensor, int]]
    """Version counters of buffers, and of tensors in attributes that are not known to change."""
    copies: dict[int, _Copy]
    """Copies of objects that may change, by the object's id."""
    training: list[bool]
    generators: list[Any]
    """States of the global random generators; empty if the block does not draw from them."""
    lengths: list[tuple[Any, int]]
    """Lengths of containers that are not known to change."""
    positions: list[tuple[Any, Any]]
    """Iterators, and how far they had got."""


class ReachableState:
    """The state that a recomputed block can change: of its own modules, and of `others` outside of all blocks."""

    def __init__(self, name: str, module: nn.Module, others: list[nn.Module]) -> None:
        self.name = name
        self._own = list(module.modules())
        inside = {id(each) for each in self._own}
        self._modules = [*self._own, *(each for each in others if id(each) not in inside)]
        self._places: list[dict[str, Any]] = []
        self._buffers: list[dict[str, Any]] = []
        self._changing: dict[tuple[int, str], dict[str, Any]] = {}
        """Places of objects whose content was found to change: the dictionary, by its id and the key."""
        self._steady: list[tuple[dict[str, Any], str]] = []
        """Places of containers that were not found to change: the dictionary, and the key."""
        self._still: list[tuple[dict[str, Any], str]] = []
        """Places of tensors that were not found to change, in attributes and variables."""
        self._draws = False
        self._pure = all(map(_is_pure, self._modules))
        """Whether no forward in reach changes anything: those of the built-in models do not."""
        self.careful = 0
        """How many calls are still to compare all values: of two the first runs whole again, the second in part."""
        self.catches = False
        """Whether the forward catches the exception by which torch ends a recomputation: then all of them run whole."""
        self._mode: list[bool] = []

    def begin(self) -> int:
        """Begin a call; return how many careful ones there are still to be."""
        training = [module.training for module in self._own]
        if training != self._mode and not self._pure:  # train() after eval(): other buffers may change now
            self._mode, self.careful = training, CAREFUL_CALLS
        return self.careful

    def note(self, given: list[dict[str, Any]]) -> Seen:
        """Return the present state; copies of all of it while little is known about the block.

        `given` are the attributes of objects among the call's arguments.
        """
        if self._pure:
            return Seen([], [], {}, [], [], [], [])
        if self.careful:
            reach = Reach(self._modules, len(self._own))
            self._places, self._buffers = reach.places, reach.buffers
            self._draws = self._draws or reach.draws
        self._refresh()
        dicts = [(d, dict(d)) for d in (*self._places, *self._buffers)]
        positions = []
        if self.careful:
            found = [leaf for _, items in dicts for k, v in items.items() if k not in IGNORED for leaf in leaves(v)]
            positions = [(v, at) for _, items in dicts for v in items.values() if (at := position(v)) is not None]
        else:
            found = [leaf for (_, key), d in self._changing.items() for leaf in leaves(d.get(key))]
        dicts += [(d, dict(d)) for d in given]
        found += [leaf for d in given for value in d.values() for leaf in leaves(value)]
        copies = {id(value): made for value in found if (made := _copied(value, shared=self.careful > 0))}
        versions = [(d, k, t, version(t)) for d in self._buffers for k, t in d.items() if t is not None]
        versions += [(d, k, t, version(t)) for d, k in self._still for t in leaves(d.get(k)) if _is_plain(t)]
        generators = _states() if self._draws or self.careful else []
        lengths = [(each, len(each)) for d, key in self._steady for each in containers(d.get(key))]
        return Seen(dicts, versions, copies, self._mode, generators, lengths, positions)

    def _refresh(self) -> None:
        for each in self._places:
            if isinstance(each, View):
                each.refresh()

    def ran(self, seen: Seen) -> None:
        """Learn from the first run of a call what the block draws from; refuse a change that cannot be undone."""
        if self.careful and not self._draws:
            self._draws = not all(map(same_content, seen.generators, _states()))
        if taken := [iterator for iterator, at in seen.positions if position(iterator) != at]:
            raise Refused(
                f"{self.name} is recomputed, and its forward takes from a {type(taken[0]).__name__}, which cannot be "
                f"put back: keep a list and a number, or {_EXCLUDE}"
            )
        self._refuse_grown(seen.lengths)

    def _refuse_grown(self, lengths: list[tuple[Any, int]]) -> None:
        if grown := [container for container, length in lengths if len(container) != length]:
            raise Refused(
                f"{self.name} is recomputed, and its forward has changed the length of a {type(grown[0]).__name__}, "
                f"but not in its first calls: {_EXCLUDE}"
            )

    @contextlib.contextmanager
    def as_seen(self, seen: Seen, whole: bool) -> Iterator[None]:
        """Give the body the state of the first run, and restore the present one afterwards.

        Unless it runs `whole`, torch ends it at the last tensor that backward needs. What it has changed by then and
        would change back (a flag, a stack) is put back here.
        """
        self._refresh()
        careful, changed = self.careful, self._changed(seen)
        now = [(d, items if _is_same(d, items) else dict(d)) for d, items in seen.dicts]
        tensors = {key for key in changed if isinstance(seen.copies[key].original, torch.Tensor)}
        made = {key: seen.copies[key].content.clone() for key in tensors}
        originals = [_Copy(seen.copies[key].original, None, version(seen.copies[key].original)) for key in tensors]
        filled = {key: copied for key, copied in seen.copies.items() if _is_refilled(copied, changed)}
        present = [(copied.original, content(copied.original)) for copied in filled.values()]
        for copied in filled.values():
            put_back(copied.original, copied.content, lambda each: _exchanged(each, made))
        for d, items in seen.dicts:
            for key in _differing(d, items, tensors):
                _put(d, key, _exchanged(items.get(key, _MISSING), made))
        training, states = [module.training for module in self._own], _states() if self._draws else []
        self._switch(training, seen.training)
        if self._draws:
            _restore_states(seen.generators)
        try:
            yield
        finally:
            self._refresh()
            for d, items in now:
                for key in _differing(d, items, set()):
                    _put(d, key, items.get(key, _MISSING))
            for each, before in present:
                put_back(each, before, lambda member: member)
            if sys.exc_info()[1] is not None:
                self._undo_half(seen, changed | filled.keys())
            elif not whole:
                self.catches = True
            self._switch(seen.training, training)
            _restore_states(states)
            self.careful = 1 if careful == CAREFUL_CALLS and whole else 0
            if careful and not self.careful:
                self._end_careful_calls()
            self._refuse_changed(originals)

    def _undo_half(self, seen: Seen, known: set[int]) -> None:
        """Put back what a recomputation has changed and not changed back, because torch has ended it before."""
        self._refuse_grown(seen.lengths)
        half = {key: each for key, each in seen.copies.items() if key not in known and _differs(each, self.careful > 0)}
        self._note_changing(seen, half.keys())
        for each in half.values():
            if isinstance(each.original, torch.Tensor):
                each.original.data.copy_(each.content)
            else:
                put_back(each.original, each.content, lambda member: member)

    def _end_careful_calls(self) -> None:
        """Follow from now on only what is small or was found to change, and what may draw random numbers later."""
        drawing = ((d, key) for d in self._places for key in d if key not in IGNORED)
        self._changing |= {(id(d), k): d for d, k in drawing if any(is_generator(type(each)) for each in leaves(d[k]))}
        changing = {id(d) for d in self._changing.values()}
        self._places = [d for d in self._places if len(d) <= LARGE or id(d) in changing]
        held = [
            (d, key) for d in self._places for key in d if key not in IGNORED and (id(d), key) not in self._changing
        ]
        self._steady = [(d, key) for d, key in held if any(True for _ in containers(d[key]))]
        self._still = [(d, key) for d, key in held if any(map(_is_plain, leaves(d[key])))]

    def _refuse_changed(self, originals: list[_Copy]) -> None:
        """Refuse a recomputation that reached a tensor although its place held a copy."""
        error = sys.exc_info()[1]
        if error is not None and not is_end(error):
            return
        if any(version(each.original) != each.version for each in originals):
            raise Refused(
                f"{self.name} is recomputed, and its forward changes a Tensor that it reaches in more than one way, so "
                f"it would be changed twice: {_EXCLUDE}"
            )

    def _changed(self, seen: Seen) -> set[int]:
        """Return the ids of objects whose content differs from what the first run found; refuse what has no copy."""
        careful = self.careful > 0
        # After the first calls, a tensor with a copy is known to change; batch norm and `.data` count no version.
        found = {
            key
            for key, copied in seen.copies.items()
            if (not careful and isinstance(copied.original, torch.Tensor)) or _differs(copied, careful)
        }
        self._note_changing(seen, found)
        for d, key, tensor, counted in seen.versions:
            if version(tensor) != counted and id(tensor) not in seen.copies:
                if any(leaf is tensor for leaf in leaves(d.get(key))):
                    raise Refused(
                        f"{self.name} is recomputed, and its buffer or attribute {key!r} was changed between its "
                        f"forward and its backward, but not in its first calls: {_EXCLUDE}"
                    )
        return found

    def _note_changing(self, seen: Seen, found: Set[int]) -> None:
        if found and self.careful:
            rows = ((d, key, value) for d, items in seen.dicts for key, value in items.items())
            self._changing |= {(id(d), k): d for d, k, v in rows if any(id(leaf) in found for leaf in leaves(v))}

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
        self, reach: ReachableState, check: Callable[[], None], args: Any, kwargs: Any, inputs: list[Any]
    ) -> None:
        self._reach, self._check = reach, check
        self._seen: Seen | None = None
        self._call: tuple[Any, Any] | None = (args, kwargs)
        """The arguments, until the first run takes them: it gets the caller's own containers."""
        self._given = [d for leaf in inputs for d in object_dicts(leaf)]
        self._leaves = [(leaf, version(leaf)) for leaf in inputs if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
        careful = reach.begin()
        self._values = SavedValues(reach.name) if careful else None
        self._whole = reach.catches or careful == CAREFUL_CALLS

    def arguments(self, spec: TreeSpec, inputs: Any) -> Any:
        """Return (args, kwargs): the caller's own for the first run, new containers of `inputs` for the others."""
        call, self._call = self._call, None
        return tree_unflatten(inputs, spec) if call is None else call

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the block's forward, or its recomputation: then with the state that the first run found."""
        if self._seen is None:
            seen = self._seen = self._reach.note(self._given)
            with self._noted():
                yield
            self._reach.ran(seen)
            return
        self._check()
        if any(version(leaf) != counted for leaf, counted in self._leaves):
            raise Refused(
                f"{self._reach.name} is recomputed, and one of its inputs was changed in place after it was given: "
                "give it a copy, or exclude the block with shard(..., recompute=...)"
            )
        with self._reach.as_seen(self._seen, self._whole), self._noted():
            yield

    @property
    def ended(self) -> bool:
        """Whether torch has ended the recomputation that runs; known of a block's first calls."""
        return self._values is not None and self._values.ended

    def returned(self, output: Any) -> Any:
        """Return what a run of the forward gave; refuse a recomputation that gave other values."""
        if self._values is not None and self._whole:
            self._values.returned(output)
        return output

    def to_its_end(self) -> contextlib.AbstractContextManager[Any]:
        """Let the block's first recomputation run to the forward's end, where it is compared with the first run."""
        return set_checkpoint_early_stop(False) if self._whole else contextlib.nullcontext()

    def _noted(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._values is None else self._values.running()


# -- objects -----------------------------------------------------------------------------------------------------------


_newest: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""The last copy of a tensor that some call still keeps, by the tensor's id."""


def _copied(value: Any, shared: bool = False) -> _Copy | None:
    """Return a copy of an object that can change in place; None of any other.

    If `shared`, a tensor's last copy is used again where it has the same values: many blocks have one table in reach.
    """
    if isinstance(value, torch.Tensor):
        if not _is_plain(value):
            return None
        newest = _newest.get(id(value)) if shared else None
        made = newest if newest is not None and _same_bits(value, newest) else value.detach().clone()
        if shared:
            _newest[id(value)] = made
        return _Copy(value, made, version(value))
    noted = content(value)
    return None if noted is None else _Copy(value, noted, 0)


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor that can be copied and put back: of plain layout, and no parameter or result."""
    if not isinstance(value, torch.Tensor) or isinstance(value, Invalidated) or value.requires_grad:
        return False
    return value.layout == torch.strided and not value.is_meta


def _is_refilled(copied: _Copy, changed: set[int]) -> bool:
    """Whether an object needs its old content back: it has another one, or a tensor in it is exchanged."""
    if isinstance(copied.original, torch.Tensor):
        return False
    if id(copied.original) in changed:
        return True
    return bool(changed) and type(copied.original) in CONTAINERS and _holds(copied.content, changed)


def _holds(value: Any, changed: set[int]) -> bool:
    """Whether one of `changed` is among the members of a container's content or a tuple."""
    held = value.values() if isinstance(value, dict) else value
    return any(id(each) in changed or issubclass(type(each), tuple) and _holds(each, changed) for each in held)


def _exchanged(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Return the copy that stands for a tensor, also in a tuple; any other object as it is."""
    if made and type(value) is tuple and _holds(value, made.keys()):  # type: ignore[arg-type]
        return tuple(_exchanged(each, made) for each in value)
    return made.get(id(value), value)


def _differs(copied: _Copy, careful: bool) -> bool:
    """Whether an object has changed since it was copied; `careful` compares the values of tensors."""
    now = copied.original
    if isinstance(now, torch.Tensor):
        if version(now) != copied.version:
            return True
        # An edit through `.data` leaves the counter: what may change so is found in the first calls.
        return careful and not _same_bits(now, copied.content)
    return not same_content(content(now), copied.content)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):  # in a plan, which has no values
        return True
    return bool(torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num())))


def _is_same(d: dict[str, Any], items: dict[str, Any]) -> bool:
    return len(d) == len(items) and all(map(is_, d.values(), items.values()))


def _differing(d: dict[str, Any], items: dict[str, Any], changed: set[int]) -> list[str]:
    """Return the keys whose object was replaced, added or removed, or is among `changed`, or a tuple of such."""
    if not changed and _is_same(d, items):
        return []
    held = {id(old) for old in items.values() if type(old) is tuple and _holds(old, changed)} if changed else set()
    keys = [key for key, old in items.items() if d.get(key, _MISSING) is not old or id(old) in (changed | held)]
    return [key for key in (*keys, *(key for key in d if key not in items)) if key not in IGNORED]


def _put(d: dict[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        d.pop(key, None)
    else:
        d[key] = value


# -- random generators -------------------------------------------------------------------------------------------------


def _states() -> list[Any]:
    """Return the states of Python's and numpy's global generators; checkpoint keeps torch's."""
    return [random.getstate(), np.random.get_state()]


def _restore_states(states: list[Any]) -> None:
    if states:
        random.setstate(states[0])
        np.random.set_state(states[1])
