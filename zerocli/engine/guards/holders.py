"""Who holds a storage: its use count, the Python tensors on it, graphs that saved it, and numpy arrays."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements in a storage of its own device."""
    return not tensor.is_meta and torch._C._has_storage(tensor) and tensor.numel() > 0


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, valid while any tensor holds it; 0 if it has none."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return int(tensor.untyped_storage()._cdata) if has_memory(tensor) else 0
        except (RuntimeError, NotImplementedError):  # sparse tensors, wrappers of torch.func
            return 0


def uses(tensor: torch.Tensor) -> int:
    """Return how many tensors are on the same storage."""
    storage = tensor.untyped_storage()
    count = int(torch._C._storage_Use_Count(storage._cdata))
    return count - _COUNTED_ALONE + 1


def _alone() -> tuple[int, int]:
    """Return how often the storage of one tensor is used, and how many references its object has."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()  # uses the storage itself, and the tensor refers to it
    return int(torch._C._storage_Use_Count(storage._cdata)), sys.getrefcount(storage)


_COUNTED_ALONE, _REFERENCES = _alone()


def keeps_storage(tensor: torch.Tensor) -> bool:
    """Whether the program keeps the object of a tensor's storage; files that are mapped into memory keep theirs."""
    storage = tensor.untyped_storage()
    return storage.resizable() and sys.getrefcount(storage) > _REFERENCES


_OWN = "_zerocli_own"


def mark_own(*tensors: torch.Tensor) -> None:
    """Mark tensors that the engine itself keeps of its memory."""
    for tensor in tensors:
        tensor.__dict__[_OWN] = True


def is_own(tensor: torch.Tensor) -> bool:
    """Whether the engine itself keeps the tensor."""
    return _OWN in tensor.__dict__


def live_tensors(generation: int | None = None) -> list[torch.Tensor]:
    """Return all tensors among Python's objects, or those of one generation of the collector."""
    kinds: set[Any] = set(_subclasses(torch.Tensor))
    objects: list[Any] = gc.get_objects(generation)
    return [each for each in objects if type(each) in kinds]


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    below: list[type] = type.__subclasses__(kind)
    for each in below:
        yield from _subclasses(each)


def on_storages(tensors: Iterable[torch.Tensor], storages: Collection[int]) -> dict[int, list[torch.Tensor]]:
    """Return those of the tensors that are on one of the storages, by storage."""
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if (storage := storage_of(tensor)) in storages:
            found.setdefault(storage, []).append(tensor)
    return found


def saved_by_graphs(tensors: Iterable[torch.Tensor], storages: Collection[int]) -> dict[int, int]:
    """Return how often the graphs of these tensors have saved a tensor on one of the storages."""
    counts = dict.fromkeys(storages, 0)
    with torch._C.DisableTorchFunctionSubclass():
        left: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.requires_grad and tensor.grad_fn is not None]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        left += [following for following, _ in node.next_functions]
        for saved in _saved(node):
            if (storage := storage_of(saved)) in counts:
                counts[storage] += 1
    return counts


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a node of a graph holds, without the hooks that unpack them: those may be collective."""
    if isinstance(variable := getattr(node, "variable", None), torch.Tensor):
        yield variable
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                raw = getattr(node, name)
            except RuntimeError:  # freed by backward
                continue
            for each in raw if isinstance(raw, tuple | list) else (raw,):
                if isinstance(value := getattr(each, "data", None), torch.Tensor):
                    yield value


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another is a view of; often nothing else refers to it."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._base if tensor._is_view() else None


def held_in_cpp(tensors: Iterable[torch.Tensor], views: Iterable[torch.Tensor] = ()) -> int:
    """Return how often something beside Python and views of them holds the tensors: a graph, a DLPack capsule.

    `views` are further tensors that may be views of them.
    """
    tensors = list(tensors)
    with torch._C.DisableTorchFunctionSubclass():
        held = sum(tensor._use_count() - 1 for tensor in tensors)  # type: ignore[attr-defined]
    ids = {id(tensor) for tensor in tensors}
    return int(held) - sum(id(base_of(view)) in ids for view in (*tensors, *views))


def exported(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return those of the tensors from which a numpy array was made that still uses their memory.

    An array holds its tensor by a reference that neither the collector nor this thread's frames show.
    """
    # numpy() makes a storage not resizable; so does a file or an array that the memory came from.
    mine = [each for each in tensors if each.device.type == "cpu" and not each.untyped_storage().resizable()]
    if not mine:
        return []
    mine.append(torch.empty(1))  # how a tensor counts that only this list holds
    hidden = {id(each): count for each, count in zip(mine, list(map(sys.getrefcount, mine)), strict=True)}
    for holder in gc.get_referrers(*mine):
        for value in gc.get_referents(holder):
            if id(value) in hidden:
                hidden[id(value)] -= 1
    frame = sys._getframe(1)
    while frame is not None:
        for value in frame.f_locals.values():
            if id(value) in hidden:
                hidden[id(value)] -= 1
        frame = frame.f_back  # type: ignore[assignment]
    usual = hidden[id(mine.pop())]
    return [each for each in mine if hidden[id(each)] - (held_in_cpp([each]) > 0) > usual]


def keeper(model: nn.Module, tensor: object) -> str:
    """Return which attribute of which module keeps a tensor, in words, or an empty string."""
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if value is tensor or _contains(value, tensor):
                return f"attribute {key!r} of {name or 'the model'}"
    return ""


def _contains(value: Any, tensor: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(each is tensor for each in value)
