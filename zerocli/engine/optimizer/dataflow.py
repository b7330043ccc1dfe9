"""What an optimizer's step does to its parameters, observed operation by operation in a trial.

A rule is elementwise if every operation that it calls is: then no trial's values, sizes or thresholds can hide a
dependence between elements. It treats parameters one by one if no operation joins what belongs to two of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

_KEEPS_PLACES = frozenset(
    "copy_ _to_copy to_copy detach detach_ alias zeros_like ones_like empty_like full_like zeros ones full empty "
    "empty_strided new_zeros new_ones new_full new_empty new_empty_strided zero_ fill_ masked_fill masked_fill_ "
    "lift_fresh lift_fresh_copy scalar_tensor floor_divide floor_divide_ _fused_adam_ _fused_adamw_ _fused_sgd_ "
    "_fused_adagrad_ contiguous rsub set_ clamp_min clamp_max isfinite isnan sym_size sym_numel sym_stride "
    "prim_layout device is_pinned _pin_memory _conj resolve_conj resolve_neg lerp lerp_ "
    "_local_scalar_dense is_nonzero item".split()
)
"""Operations that are not tagged as pointwise and yet give each element from the same element of their inputs."""
_FOREACH_REDUCES = ("_foreach_norm", "_foreach_max", "_foreach_powsum")
_LEAKS = frozenset("_local_scalar_dense is_nonzero equal item".split())
"""Operations that hand a value to Python, where it may decide what is called next."""


class Traced(nn.Parameter):
    """A parameter of a trial; records the names of attributes that a plain parameter does not have."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name not in _PLAIN and not name.startswith("__"):
            object.__getattribute__(self, "__dict__").setdefault("_asked", set()).add(name)
        return super().__getattribute__(name)


_PLAIN = frozenset(dir(nn.Parameter(torch.zeros(1)))) | {"_asked"}


class TracedCount(int):
    """A count that a rule keeps as a number; records what it is compared with."""

    seen: set[int] = set()

    def __add__(self, other: Any) -> Any:
        return TracedCount(int(self) + other) if isinstance(other, int) else int(self) + other

    __radd__ = __iadd__ = __add__


def _noting(name: str) -> Callable[[TracedCount, Any], Any]:
    """Return an operator of numbers that records its second operand."""

    def operate(self: TracedCount, other: Any) -> Any:
        if isinstance(other, int | float) and abs(other) < 1e9:
            TracedCount.seen.add(int(other))
        return getattr(operator, name)(int(self), other)

    return operate


for _name in ("__mod__", "__floordiv__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(TracedCount, _name, _noting(_name))


class Dataflow(TorchDispatchMode):
    """Records of a step: operations that are not elementwise, joined parameters, random numbers, data read by Python.

    `owners` maps a tensor's storage to the parameters that its values come from; see `own`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owners: dict[int, frozenset[int]] = {}
        self._alive: list[Any] = []
        """Storages seen so far: the address of a freed one could be given to another."""
        self._read: frozenset[int] = frozenset()
        """Parameters whose values Python has read last in this step."""
        self.mixes = ""
        """The first operation that is not elementwise."""
        self.joins = ""
        """How the update of a parameter first came to depend on another parameter."""
        self.draws = ""
        """The first operation that draws random numbers."""
        self.decides = False
        """Whether Python has read a value that comes from a parameter or a gradient."""
        self.used: set[int] = set()
        """Parameters whose values, gradients or states were used in this step."""
        self.compared: set[int] = set()
        """Numbers that counts in tensors were compared with."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler with the first operation, which takes seconds

    def begin(self) -> None:
        """Forget what was read and used in the step before."""
        self._read, self.used = frozenset(), set()

    def own(self, tensor: torch.Tensor, index: int) -> None:
        """Say that a tensor holds values of one parameter."""
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._owners[storage._cdata] = frozenset((index,))

    def _of(self, tensors: Iterable[torch.Tensor]) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for tensor in tensors:
            found |= self._owners.get(tensor.untyped_storage()._cdata, frozenset())
        return found

    def _mark(self, tensor: torch.Tensor, owners: frozenset[int], name: str) -> None:
        storage = tensor.untyped_storage()
        before = self._owners.get(storage._cdata)
        owners = owners | self._read if tensor.numel() else owners
        if before and owners - before and not self.joins:
            self.joins = name
        if before is None:
            self._alive.append(storage)
        self._owners[storage._cdata] = owners | (before or frozenset())
        if len(self._owners[storage._cdata]) > 1 and not self.joins:
            self.joins = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = list(tensors_in((args, kwargs)))
        owners = self._of(given)
        self.used |= owners
        if name in _LEAKS:
            return self._leak(func, args, kwargs, given, owners)
        out = func(*args, **kwargs)
        results = list(tensors_in(out))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = self.draws or name
        if not self.mixes and not _keeps_places(func, name, given, results):
            self.mixes = name
        if not owners and any(tensor.numel() == 1 for tensor in given):
            self.compared |= {int(a) for a in args if isinstance(a, int | float) and abs(a) < 1e9}
        if name.startswith("_foreach_") or name.startswith("_fused_"):
            self._mark_lists(args, kwargs, out, name)
        else:
            about = [argument.alias_info for argument in func._schema.arguments]
            changed = [a for a, alias in zip(args, about, strict=False) if alias is not None and alias.is_write]
            for tensor in (*results, *tensors_in(changed)):
                self._mark(tensor, owners, name)
        return out

    def _leak(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], owners: frozenset[int]) -> Any:
        if owners:
            self.decides, self._read = True, owners  # the latest only: most rules read one parameter, then write it
            self.joins = self.joins or (func.overloadpacket.__name__ if len(owners) > 1 else "")
        if any(tensor.is_meta for tensor in given):
            self.decides = True
            return False if func.overloadpacket.__name__ in ("equal", "is_nonzero") else 1.0
        return func(*args, **kwargs)

    def _mark_lists(self, args: Any, kwargs: Any, out: Any, name: str) -> None:
        """Follow an operation on lists, whose results and changes belong to the same place in each list."""
        lists = [a for a in (*args, *kwargs.values(), out) if isinstance(a, list | tuple) and _all_tensors(a)]
        single = self._of(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        longest = max((len(each) for each in lists), default=0)
        for at in range(longest):
            row = [each[at] for each in lists if len(each) == longest]
            owners = self._of(row) | single
            for tensor in row:
                if tensor.numel() > 1 or owners:
                    self._mark(tensor, owners, name)


def _keeps_places(func: Any, name: str, given: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Whether an operation computes each element from the same element of its inputs, and from single numbers."""
    if name.startswith("_foreach_"):
        return not name.startswith(_FOREACH_REDUCES)
    if all(tensor.numel() <= 1 for tensor in (*given, *results)):
        return all(tensor.dim() == 0 for tensor in given) or _tagged(func, name)
    if not given:  # makes a tensor: the same number everywhere
        return name in _KEEPS_PLACES
    if name in ("view", "_unsafe_view", "expand", "reshape", "squeeze", "unsqueeze", "as_strided"):
        return all(tensor.shape == given[0].shape for tensor in results)
    shapes = {tuple(tensor.shape) for tensor in (*given, *results) if tensor.dim()}
    return _tagged(func, name) and len(shapes) == 1


def _tagged(func: Any, name: str) -> bool:
    return torch.Tag.pointwise in func.tags or name in _KEEPS_PLACES


def _all_tensors(values: Any) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operation's arguments or results: nested in lists and dicts only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
