"""Saved views: what autograd saves of a gather buffer is its place in the flat, not the memory.

[Note: gather buffers and autograd]
Autograd saves views of weights for backward. A buffer that is refilled with the next unit's parameters would change
under such a view, so none is ever saved. While a sharded module runs, a saved-tensor hook replaces every view of a
gather buffer by (flat, offset, shape, stride). Backward recreates the view from the buffer that holds the unit then,
gathering it if needed. Other tensors go to the hooks that were active before, so recomputation and save-on-CPU hooks
work inside and outside. Memory is constant, and an unexpected order costs speed, never correctness.

A view kept in another way (an attribute of a custom function's context, a graph for second derivatives) raises the use
count of the buffer's storage. Such a buffer is never refilled: it is dropped from the pool and replaced by a new one.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import disable_saved_tensors_hooks

from tiers.events import NOTHING
from zerocli.engine.guards.parameters import Released, name_of, no_values
from zerocli.engine.units.unit import Flat
from zerocli.errors import Refused

if TYPE_CHECKING:
    from zerocli.engine.units.gather import Gatherer

STALE = (
    "this loss was computed with parameters that step() has changed since, or that were loaded or moved: run forward "
    "again before backward"
)
_NO_HOOKS = (
    "torch.func.grad, vjp, jacrev and hessian, and torch.autograd.graph.disable_saved_tensors_hooks, forbid "
    "saved-tensor hooks, by which partitioned parameters are gathered again in backward: run them inside `with "
    "torch.no_grad(), engine.gathered():`, use torch.autograd.grad, or stage=2"
)
_DISABLING: Any = disable_saved_tensors_hooks.__wrapped__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SavedView:
    """A view of a gather buffer, as autograd saves it: its position in the flat instead of a memory address."""

    flat: Flat
    offset: int
    """In elements of `dtype`, which may differ from the flat's (a complex view of real numbers)."""
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    conjugate: bool
    negative: bool
    num_changes: int
    """The flat's counter when the view was saved."""


class SavedViews:
    """Replaces views of gather buffers in what autograd saves, and recreates them in backward."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer
        self._hooks: dict[int, Any] = {}
        """The hooks that were active before ours, or None, by the id of our `pack`."""

    def locate(self, tensor: torch.Tensor) -> SavedView | None:
        """Return the position of `tensor` in its flat if it is a view of a gather buffer, else None."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a torch.func wrapper: keeping it keeps a reference to the buffer
            return None
        for buffer in self._gatherer.buffers():
            start = buffer.tensor.data_ptr()
            if start <= address < start + buffer.tensor.nbytes and buffer.last is not None:
                return _saved_view(tensor, address - start, buffer.last)
        for released in self._gatherer.replaced:
            if released.start <= address < released.stop and released.held:
                return _saved_view(tensor, address - released.start, released.flat)
        return None

    def resolve(self, saved: SavedView) -> torch.Tensor:
        """Return the saved view, recreated from the buffer that holds its flat now; refuse changed values."""
        if saved.num_changes != saved.flat.num_changes:
            raise Refused(STALE)
        self._gatherer.need_flat(saved.flat)
        buffer = saved.flat.buffer
        assert buffer is not None
        if saved.dtype == buffer.dtype:
            return buffer.as_strided(saved.size, saved.stride, saved.offset)
        view = torch.empty(0, dtype=saved.dtype, device=buffer.device)
        start = buffer.storage_offset() * buffer.element_size() // saved.dtype.itemsize
        view.set_(buffer.untyped_storage(), start + saved.offset, saved.size, saved.stride)
        view = view.conj() if saved.conjugate else view
        return torch._neg_view(view) if saved.negative else view

    def saving(self) -> contextlib.AbstractContextManager[object]:
        """Keep autograd from saving views of gather buffers while the body runs."""
        if not torch.is_grad_enabled():
            return NOTHING
        if not allow_hooks():
            if not self._gatherer.all_stay():  # autograd would save views of buffers that are refilled
                raise Refused(_NO_HOOKS)
            return NOTHING
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # Ours may be on top already, of the unit around this one.
        return NOTHING if outer is not None and id(outer[0]) in self._hooks else self._saving(outer)

    @contextlib.contextmanager
    def _saving(self, outer: Any) -> Iterator[None]:
        outer_pack, outer_unpack = outer if outer is not None else (None, None)

        def pack(tensor: torch.Tensor) -> Any:
            if isinstance(tensor, Released):  # read by a class of tensors whose own code torch asks first
                raise Refused(no_values(name_of(tensor)))
            saved = self.locate(tensor)
            if saved is not None:
                return saved
            return tensor if outer_pack is None else outer_pack(tensor)

        def unpack(packed: Any) -> Any:
            if isinstance(packed, SavedView):
                return self.resolve(packed)
            return packed if outer_unpack is None else outer_unpack(packed)

        self._hooks[id(pack)] = outer
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):  # torch.func disables them
                raise Refused(_NO_HOOKS) from error
            raise
        finally:
            del self._hooks[id(pack)]

    def inside_checkpoint(self) -> bool:
        """Whether a checkpoint of torch's, around the units that run now, keeps what autograd saves."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top is not None and id(top[0]) in self._hooks:
            top = self._hooks[id(top[0])]
        return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def allow_hooks() -> bool:
    """Whether the caller's code allows saved-tensor hooks."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def disables_hooks(error: BaseException) -> bool:
    """Whether torch raised an error because code disables saved-tensor hooks where there are some, in its own words."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is _DISABLING.__code__


def _saved_view(tensor: torch.Tensor, nbytes: int, flat: Flat) -> SavedView:
    """Return the position of a view that starts `nbytes` into a buffer of the flat."""
    bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg(), flat.num_changes)
    return SavedView(flat, nbytes // tensor.element_size(), tensor.size(), tensor.stride(), *bits)
