"""Objects that change in place: what is in them is noted, compared and put back, in the same object."""

from __future__ import annotations

import array
import itertools
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any

import numpy as np
import torch

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_SEQUENCES = frozenset((list, deque))
CONTAINERS = _DICTS | _SEQUENCES | {set}
LARGE = 256
"""Items of a container from which on only the container is followed, not what is in it."""
_SCALARS = frozenset((int, float, complex, str, bytes, bool, type(None)))
_ITERATORS: Any = (type(iter([])), type(iter(())), type(iter(range(0))))
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_NOTED = (bytearray, array.array, np.ndarray, *_GENERATORS)
"""What `content` knows how to note, beside containers."""
_LEAVES = (torch.Tensor, *_NOTED)
_NUMPY = (np.ndarray, np.generic)


def leaves(value: Any, depth: int = 8) -> Iterator[Any]:
    """Yield the objects that change in place, in a value and in the containers in it."""
    kind = type(value)
    if kind in _SCALARS:
        return
    if kind in CONTAINERS or issubclass(kind, tuple | frozenset):
        if kind in CONTAINERS:
            yield value
        if depth and len(value) <= LARGE:
            for each in members(value):
                yield from leaves(each, depth - 1)
    elif issubclass(kind, _LEAVES):
        yield value


def containers(value: Any) -> Iterator[Any]:
    """Yield the containers among the leaves of a value."""
    return (each for each in leaves(value) if type(each) in CONTAINERS)


def is_generator(kind: type) -> bool:
    """Whether objects of a class draw random numbers."""
    return issubclass(kind, _GENERATORS)


def members(value: Any) -> Iterable[Any]:
    """Return what is in a container, without plain numbers and words."""
    found = list(value.values()) if isinstance(value, dict) else list(value)
    return () if set(map(type, found)) <= _SCALARS else found


def content(value: Any) -> Any:
    """Return what is in an object that changes in place, other than a tensor; None of any other object."""
    kind = type(value)
    if kind in _DICTS:
        return dict(value)
    if kind in _SEQUENCES:
        return list(value)
    if kind is set:
        return set(value)
    if not issubclass(kind, _NOTED):
        return None
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, bytearray | array.array):
        return value[:]
    if hasattr(value, "bit_generator"):
        return value.bit_generator.state
    return value.get_state() if hasattr(value, "get_state") else value.copy()


def put_back(value: Any, old: Any, other: Callable[[Any], Any]) -> None:
    """Give an object its old content; `other` returns what stands for a member of a container."""
    kind = type(value)
    if kind in _DICTS:
        value.clear()
        dict.update(value, {key: other(each) for key, each in old.items()})  # that of Counter adds
    elif kind is list:
        value[:] = map(other, old)
    elif kind is deque or kind is set:
        value.clear()
        (value.extend if kind is deque else value.update)(map(other, old))
    elif isinstance(value, bytearray | array.array):
        value[:] = old
    elif isinstance(value, random.Random):
        value.setstate(old)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = old
    elif hasattr(value, "set_state"):
        value.set_state(old)
    else:
        value[...] = old


def same_content(a: Any, b: Any) -> bool:
    """Whether two contents of one object are the same."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and _same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and (all(map(is_, a, b)) or all(map(_same, a, b)))
    if issubclass(type(a), _NUMPY):
        return bool(a.tobytes() == b.tobytes())
    return bool(a == b)


def _same(a: Any, b: Any) -> bool:
    """Whether two members are the same: an object itself, or a number, or the state of a generator."""
    kind = type(a)
    if a is b:
        return True
    if kind is not type(b):
        return False
    if issubclass(kind, tuple | dict) or issubclass(kind, _NUMPY):
        return same_content(a, b)
    return kind in _SCALARS and bool(a == b)


def version(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; one made in inference mode has none, and changes nowhere else."""
    return 0 if tensor.is_inference() else tensor._version


def position(value: Any) -> Any:
    """Return how far an iterator or generator of Python's has got, if it can be known; None of any other object."""
    kind = type(value)
    if kind is types.GeneratorType:
        frame = value.gi_frame
        return (-1,) if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    if kind in _ITERATORS:
        return value.__length_hint__()
    return repr(value) if kind in (itertools.count, itertools.repeat) else None
