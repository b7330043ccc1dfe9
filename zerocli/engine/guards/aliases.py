"""Aliases: tensors outside the engine that share memory with a parameter, found before the parameter moves.

`shard` moves parameters into flats. A view, a `detach()`ed tensor or a `state_dict()` made before would stay behind on
the old memory and see no update. The use count of a storage says whether anything else holds it; only then are Python's
objects searched. Where the parameter stays whole, the tensors found are pointed at its new place, and share its values
as they do in plain torch. Elsewhere they lose their values, and the first use of one raises Refused: a program that
never reads its old state dict is not disturbed, and the old memory is freed.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerocli.engine.guards.holders import (
    base_of,
    exported,
    has_memory,
    held_in_cpp,
    is_own,
    keeper,
    keeps_storage,
    live_tensors,
    on_storages,
    saved_by_graphs,
    storage_of,
    uses,
)
from zerocli.engine.guards.parameters import Guarded, WithoutValues, derived, first, may_be_edited
from zerocli.engine.units.gather_buffers import ReleasedBuffer
from zerocli.engine.units.unit import Flat
from zerocli.errors import Refused

_DATA: Any = torch._C.TensorBase.data
_REASON = "_zerocli_invalidated"
_MEMORY = "_zerocli_memory"
_SEARCHES = 3
"""Searches of all objects in a row that may find nothing."""
_INSTEAD = "compute it in forward, keep a copy (.clone()) of its values, or read engine.state_dict()"


class Invalidated(WithoutValues):
    """Mixin of the class of a tensor that has lost its values: any use of them is refused."""

    @classmethod
    def _refuse(cls, func: Any, args: Any, kwargs: Any) -> Any:
        raise Refused(_reason_of(first((args, kwargs), Invalidated)))

    def as_subclass(self, cls: type) -> Any:
        raise Refused(_reason_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise Refused(_reason_of(self))

    def __repr__(self) -> str:
        return f"<a tensor without values: {_reason_of(self)}>"


class Reason:
    """Why a tensor has lost its values."""

    def __init__(self, name: str, model: nn.Module, fact: str) -> None:
        self._name, self._model, self._fact = name, weakref.ref(model), fact

    def message(self, tensor: Any) -> str:
        """Return the fact, where the tensor is kept, and what to do instead."""
        model = self._model()
        held = f" ({where})" if model is not None and (where := keeper(model, tensor)) else ""
        return f"a tensor of shape {tuple(tensor.shape)}{held} shared memory with {self._name}{self._fact}: {_INSTEAD}"


class ReleasedViews:
    """Views that users keep of released gather buffers, which would not follow a change of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._searches = _SEARCHES

    def invalidate(self, buffers: Callable[[], list[ReleasedBuffer]]) -> None:
        """Take the values of such views away; called when the parameters in `buffers` have changed.

        Young objects are searched first. What is found nowhere is held by a graph; it is not looked for among all
        objects again and again.
        """
        for generation in (0, 1, 2):
            if not (released := {each.storage: each for each in buffers()}):
                break
            if generation < 2 or self._searches > 0:
                for storage, tensors in on_storages(live_tensors(generation), released).items():
                    for tensor in tensors:
                        if not isinstance(tensor, Guarded | Invalidated) and not is_own(tensor):
                            name = _name_at(released[storage], tensor)
                            invalidate(tensor, Reason(name, self._model, ", which has changed since"))
                tensors, tensor = [], torch.empty(0)  # hold none
        self._searches = self._searches - 1 if buffers() else _SEARCHES


def _name_at(released: ReleasedBuffer, tensor: torch.Tensor) -> str:
    at = (tensor.data_ptr() - released.start) // released.flat.dtype.itemsize
    names = [entry.name for entry in released.flat.layout.entries if entry.offset <= at < entry.offset + entry.numel]
    return names[0] if names else f"parameters of {released.flat.unit.title}"


def _reason_of(tensor: Invalidated | None) -> str:
    return str(tensor.__dict__[_REASON].message(tensor)) if tensor is not None else ""


def invalidate(tensor: torch.Tensor, reason: Reason) -> None:
    """Take a tensor's values away, and its memory unless a numpy array may use it; any later use is refused."""
    fill = float("nan") if tensor.dtype.is_floating_point else 0
    one = torch.full((1,), fill, dtype=tensor.dtype, device=tensor.device)
    _move(tensor, one.expand(tensor.shape) if tensor.shape else one[0])
    tensor.__dict__[_REASON] = reason
    tensor.__class__ = derived(Invalidated, type(tensor))


def _move(tensor: torch.Tensor, values: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    # A numpy array or a DLPack capsule that was made from the tensor holds the tensor, and has its old address.
    if not storage.resizable() or held_in_cpp([tensor]):
        tensor.__dict__[_MEMORY] = storage
    with torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(tensor, values)


@dataclass(frozen=True)
class Alias:
    """A tensor that shares elements with a parameter."""

    tensor: torch.Tensor
    parameter: nn.Parameter
    name: str
    """The parameter's."""
    place: tuple[Sequence[int], Sequence[int], int] | None
    """Size, stride and offset of it in the contiguous parameter; None if it is no view of that one parameter."""
    buffer: str
    """Its name, if it is one of the model's buffers."""


class Aliases:
    """The tensors that share memory with parameters that are about to move."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._known: set[int] = set()
        self._buffers: dict[int, str] = {}
        self._found: list[Alias] = []

    def find(self, flats: Iterable[Flat], fresh: set[int]) -> None:
        """Find the aliases of parameters that `shard` is about to move, except `fresh` ones; refuse unknown holders."""
        groups = self._groups(flats, fresh)
        for members in groups.values():
            _refuse_shared(members)
        # In plain torch too, a parameter that moves to another device leaves its aliases behind.
        groups = {storage: members for storage, members in groups.items() if self._stays(members[0][1])}
        for storage, tensors in self._search(groups).items():
            self._add(tensors, groups[storage])
        arrays = {id(tensor) for tensor in exported(alias.tensor for alias in self._found)}
        if names := [alias.name for alias in self._found if id(alias.tensor) in arrays]:
            raise Refused(
                f"{names[0]} shares memory with a numpy array, which would not follow its updates: make the array a "
                "copy, p.detach().numpy().copy(), before shard"
            )

        if kept := [members[0][0] for members in groups.values() if keeps_storage(members[0][1])]:
            raise Refused(
                f"the storage of {kept[0]} is kept as an object, which would not follow the parameter's updates: "
                "drop it, or keep a copy of the values (.clone()), before shard"
            )

    def find_in(self, flats: Iterable[Flat]) -> None:
        """Find the views that users keep of whole flats whose parameters are about to move."""
        flats = list(flats)
        groups = self._groups([flat for flat in flats if flat.resident is not None], set())
        own = {id(tensor) for flat in flats for _, _, tensor in flat.holdings()}
        tensors = (tensor for tensor in live_tensors() if id(tensor) not in self._known and id(tensor) not in own)
        for storage, found in on_storages(tensors, groups).items():
            self._add(found, groups[storage])
        self._found = [alias for alias in self._found if alias.place is not None]  # others are the engine's own

    def _groups(self, flats: Iterable[Flat], fresh: set[int]) -> dict[int, list[tuple[str, nn.Parameter]]]:
        groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for flat in flats:
            for entry, parameter in zip(flat.layout.entries, flat.parameters, strict=True):
                if id(parameter) not in fresh and has_memory(parameter):
                    groups.setdefault(storage_of(parameter), []).append((entry.name, parameter))
                    self._known.add(id(parameter))
        return groups

    def _add(self, tensors: Iterable[torch.Tensor], members: list[tuple[str, nn.Parameter]]) -> None:
        aliases = (_alias(tensor, members, self._buffers.get(id(tensor), "")) for tensor in tensors)
        self._found += [alias for alias in aliases if alias is not None]

    def _stays(self, parameter: torch.Tensor) -> bool:
        here = self._device
        index = torch.cuda.current_device() if here.type == "cuda" and here.index is None else here.index
        return parameter.device.type == here.type and (here.type != "cuda" or parameter.device.index == index)

    def _search(self, groups: Mapping[int, list[tuple[str, nn.Parameter]]]) -> dict[int, list[torch.Tensor]]:
        """Return the tensors but parameters that are on one of the storages, by storage."""
        self._buffers = {id(b): name for name, b in self._model.named_buffers() if storage_of(b) in groups}
        own = on_storages(self._model.buffers(), groups)
        suspects = _unknown(groups, own)
        for collected in (False, True):
            if not suspects:
                return own
            tensors = live_tensors()
            found = on_storages((tensor for tensor in tensors if id(tensor) not in self._known), suspects)
            for storage in suspects:  # a view's base may be no Python object until it is asked for
                others = found.setdefault(storage, [])
                views = [*others, *(parameter for _, parameter in groups[storage])]
                bases = {id(base): base for view in views if (base := base_of(view)) is not None}
                there = set(map(id, others))
                others += [base for each, base in bases.items() if each not in there and each not in self._known]
            left = _unknown(groups, found)
            left = {s: left.get(s, 0) + held_in_cpp(found[s], [p for _, p in groups[s]]) for s in suspects}
            left = {storage: count for storage, count in left.items() if count > 0}
            saved = saved_by_graphs(tensors, left) if left else {}
            left = {storage: count for storage, count in left.items() if count > saved[storage]}
            if not left:
                return own | found
            if not collected:
                del tensors, found, others, views, bases
                gc.collect()  # objects that nothing refers to any more may still be there
                suspects = _unknown(groups, own)
        name = groups[next(iter(left))][0][0]
        raise Refused(
            f"{name} shares memory with something that is no Python tensor (a DLPack export, a C++ extension, a traced "
            "constant), which would not follow its updates: drop it, or give it a copy, before shard"
        )

    def redirect(self, flats: Iterable[Flat]) -> None:
        """Point each alias at the new memory of its parameter; take its values away where that is not possible."""
        places = {
            id(parameter): (flat, entry.offset)
            for flat in flats
            for entry, parameter in zip(flat.layout.entries, flat.parameters, strict=True)
        }
        for alias in self._found:
            flat, offset = places[id(alias.parameter)]
            if flat.resident is not None and _follow(alias, flat.resident, offset):
                may_be_edited(alias.parameter, None if alias.buffer else alias.tensor)
                if alias.buffer:  # placing buffers may have made a copy of it
                    owner, _, key = alias.buffer.rpartition(".")
                    self._model.get_submodule(owner)._buffers[key] = alias.tensor
            elif alias.buffer:
                raise Refused(
                    f"the buffer {alias.buffer} shares memory with {alias.name}, which moves: register a copy "
                    "(.clone()) as the buffer, or compute it in forward"
                )
            else:
                fact = ", which is partitioned now" if flat.resident is None else ", which has moved"
                invalidate(alias.tensor, Reason(alias.name, self._model, fact))
        self._found = []


def _unknown(
    groups: Mapping[int, list[tuple[str, nn.Parameter]]], found: Mapping[int, list[torch.Tensor]]
) -> dict[int, int]:
    """Return the storages with more tensors on them than the parameters and those found, with their number."""
    left = {s: uses(members[0][1]) - len(members) - len(found.get(s, ())) for s, members in groups.items()}
    return {storage: count for storage, count in left.items() if count > 0}


def _follow(alias: Alias, resident: torch.Tensor, offset: int) -> bool:
    """Make an alias a view of its parameter's new memory; return whether it is one."""
    if alias.place is None or alias.tensor.dtype != resident.dtype or alias.tensor.device != resident.device:
        return False
    size, stride, within = alias.place
    try:
        with torch.no_grad():
            _move(alias.tensor, resident.as_strided(size, stride, resident.storage_offset() + offset + within))
    except RuntimeError:  # a tensor of inference mode
        return False
    return True


def _alias(tensor: torch.Tensor, members: list[tuple[str, nn.Parameter]], buffer: str) -> Alias | None:
    """Return how a tensor shares memory with one of the parameters on its storage; None if it does not."""
    if isinstance(tensor, Guarded):
        raise Refused(f"{members[0][0]} shares memory with a parameter of another engine: close that one before shard")
    if isinstance(tensor, Invalidated):
        return None
    start, stop = _span(tensor)
    for name, parameter in members:
        first, last = _span(parameter)
        if start < last and first < stop:
            inside = first <= start and stop <= last and tensor.dtype == parameter.dtype
            plain = not tensor.is_conj() and not tensor.is_neg()
            return Alias(tensor, parameter, name, _place(tensor, parameter) if inside and plain else None, buffer)
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return int(start), int(start + (reach + 1) * tensor.element_size())


def _place(tensor: torch.Tensor, parameter: torch.Tensor) -> tuple[Sequence[int], Sequence[int], int] | None:
    """Return size, stride and offset of a tensor in its parameter once that is contiguous, or None."""
    within = int(tensor.storage_offset() - parameter.storage_offset())
    if parameter.is_contiguous():
        return tensor.size(), tensor.stride(), within
    contiguous = torch.empty(parameter.shape, device="meta").stride()
    turned = dict(zip(zip(parameter.shape, parameter.stride(), strict=True), contiguous, strict=True))
    sides = list(zip(tensor.shape, tensor.stride(), strict=True))
    if within or any(side not in turned and side[0] != 1 for side in sides):
        return None
    return tensor.size(), [turned.get(side, 1) for side in sides], 0


def _refuse_shared(members: list[tuple[str, nn.Parameter]]) -> None:
    """Raise Refused if two parameters share elements: in torch each is updated, and both in one memory."""
    ordered = sorted(members, key=lambda each: _span(each[1]))
    for (name, one), (other, two) in zip(ordered, ordered[1:], strict=False):
        if _span(two)[0] < _span(one)[1] and _meet(one, two):
            raise Refused(
                f"{name} and {other} are two parameters on one memory, as `b.data = a.data` makes them, and an "
                "optimizer would update that memory twice: make them one parameter, `b = a`, before shard"
            )


def _meet(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.is_contiguous() and two.is_contiguous():
        return True
    marks = torch.zeros(max(_span(one)[1] // one.element_size(), _span(two)[1] // two.element_size()), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(two.shape, two.stride(), two.storage_offset()).any())
