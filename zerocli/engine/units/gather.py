"""Gathering: a unit's parameters are all-gathered just before use, into a small fixed pool of buffers.

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
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from tiers.events import NOTHING
from zerocli.engine.comm import Pending
from zerocli.engine.context import Context
from zerocli.engine.guards.holders import mark_own
from zerocli.engine.streams import SideStream, StreamEvent
from zerocli.engine.units.unit import Flat, State, Unit
from zerocli.errors import Refused
from zerocli.layout.buffers import gather_limits, gather_name

STALE = (
    "this loss was computed with parameters that have changed since, by step() or by loading: run forward again before "
    "backward"
)
_NO_HOOKS = (
    "torch.func.grad, vjp, jacrev and hessian forbid saved-tensor hooks, by which partitioned parameters are gathered "
    "again in backward: run them inside `with torch.no_grad(), engine.gathered():`, use torch.autograd.grad, or stage=2"
)


@dataclass(eq=False)
class Buffer:
    """One gather buffer of the pool."""

    tensor: torch.Tensor
    holder: Flat | None = None
    freed: StreamEvent | None = None
    """The last compute that reads the buffer ends here; the next gather into it starts after this event."""
    used_at: int = 0
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Parameter views by flat id, created once."""
    own_uses: int = 0
    """Use count of the storage without references from outside the gatherer."""
    last: Flat | None = None
    """The flat that it holds or has held last."""

    def __post_init__(self) -> None:
        self.storage = self.tensor.untyped_storage()
        mark_own(self.tensor)

    @property
    def uses(self) -> int:
        return torch._C._storage_Use_Count(self.storage._cdata)

    @property
    def aliased(self) -> bool:
        """Whether other code keeps a view of it; only valid while no parameter is a view of it."""
        return self.uses > self.own_uses

    def views_of(self, flat: Flat) -> list[torch.Tensor]:
        """Return the flat's parameters as views of the buffer; called while no other code refers to it."""
        if id(flat) not in self.views:
            self.views[id(flat)] = flat.views(self.tensor)
            mark_own(*self.views[id(flat)])
        self.own_uses, self.last = self.uses, flat
        return self.views[id(flat)]


class Left:
    """A released buffer that other code keeps views of; does not keep its memory alive."""

    def __init__(self, buffer: Buffer) -> None:
        assert buffer.last is not None
        self.flat, self._buffer = buffer.last, weakref.ref(buffer)
        self._storage = StorageWeakRef(buffer.storage)
        self.start = buffer.tensor.data_ptr()
        self.stop = self.start + buffer.tensor.nbytes

    @property
    def storage(self) -> int:
        """Identity of its storage, valid while it is held."""
        return int(self._storage.cdata)

    @property
    def held(self) -> bool:
        """Whether other code still keeps a view of it."""
        buffer = self._buffer()
        return not self._storage.expired() if buffer is None else buffer.aliased


class Pin:
    """Counts the code that computes with a unit's parameters; a class, as it is entered for every call of a unit."""

    def __init__(self, pins: dict[int, int], index: int) -> None:
        self._pins, self._index = pins, index

    def __enter__(self) -> None:
        self._pins[self._index] += 1

    def __exit__(self, *_: object) -> None:
        self._pins[self._index] -= 1


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


class Gatherer:
    """Gathers units, prefetching them in the order traced in the previous step, and releases them."""

    def __init__(
        self,
        units: list[Unit],
        context: Context,
        deferred: bool,
        before_gather: Callable[[Flat], None],
        look_ahead: Callable[[Sequence[Unit], Sequence[Unit]], None],
        agree: Callable[[Flat], None],
    ) -> None:
        self._units, self._collectives, self._device = units, context.collectives, context.device
        self._waits, self._events = context.waits, context.events
        self._limit = context.sizing.gather_buffers
        self._limits = gather_limits([flat.spec for unit in units for flat in unit.flats], context.sizing)
        self._before_gather, self._look_ahead, self._agree = before_gather, look_ahead, agree
        self._side = SideStream(context.device)
        self._pool: dict[tuple[int, torch.dtype], list[Buffer]] = {}
        self._buffer_of: dict[int, Buffer] = {}
        self._pins: dict[int, int] = {unit.index: 0 for unit in units}
        self._clock = 0
        self._order: list[int] = []
        self._seen: list[int] = []
        self._update_order: list[Unit] | None = None
        self._cursor = 0
        self._hooks: list[tuple[Any, Any]] = []
        self._outer_hooks: list[Any] = []
        """Of each of `_hooks`, the hooks that were active before, or None."""
        self._left: list[Left] = []
        self.deferred = deferred
        """Whether the compute stream waits for updated resident parameters only when their unit is used."""
        self.moves = any(flat.state is not State.RESIDENT for unit in units for flat in unit.flats)
        """Whether any parameter is gathered and released; otherwise there is nothing to hook or release."""
        stores = [flat.param_store for unit in units for flat in unit.flats]
        self._far = any(store is not None and not store.tier.addressable for store in stores)
        """Whether any parameters are on a tier that must be read well ahead (a disk)."""

    # -- the order of use ------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, record: bool) -> None:
        """Gather the unit's parameters for its forward or backward, and start prefetching the next units.

        `record` adds the use to the step's trace; the next step prefetches in that order.
        """
        if record:
            self._seen.append(unit.index)
        self._cursor = self._position_after(unit.index)
        with _outside_checkpoints():
            self.need(unit)
            self.prefetch()
        if self._far:
            order = [self._units[index] for index in self._order]
            self._look_ahead(order[self._cursor :], order[: self._cursor])

    def forward_order(self) -> list[Unit]:
        """Return all units in the order of rank 0's first forward, the same on every rank.

        Updates and the gathers after them follow this order, so it must not depend on what this rank ran.
        """
        if self._update_order is not None:
            return self._update_order
        first_use = {index: at for at, index in reversed(list(enumerate(self._seen)))}
        return sorted(self._units, key=lambda unit: first_use.get(unit.index, len(self._seen)))

    def agree_on_order(self) -> None:
        """Adopt rank 0's order of updates permanently; collective on the first call, a no-op afterwards."""
        if self._update_order is None:
            indices = self._collectives.broadcast_indices([unit.index for unit in self.forward_order()])
            self._update_order = [self._units[index] for index in indices]

    def end_step(self) -> None:
        """Close the step's trace; the next step prefetches in this order."""
        if self._seen:
            self._order, self._seen = self._seen, []
        self._cursor = 0

    def _position_after(self, index: int) -> int:
        for at in range(self._cursor, len(self._order)):
            if self._order[at] == index:
                return at + 1
        return len(self._order)

    def prefetch(self) -> bool:
        """Start gathering the next units while buffers are free; return whether any gather was started."""
        started = False
        ahead = self._order[self._cursor : self._cursor + self._limit - 1] if self.moves else []
        for index in ahead:
            for flat in self._units[index].flats:
                if flat.state is State.SHARDED:
                    buffer = self._free_buffer(flat)
                    if buffer is None:
                        return started
                    self._fill(flat, buffer)
                    started = True
        return started

    # -- gather and release ----------------------------------------------------------------------------------------

    def need(self, unit: Unit) -> None:
        """Make the unit's parameters usable on the current stream; gathers those that were not prefetched."""
        with self.pinned(unit):  # one flat of the unit must not take another's buffer
            for flat in unit.flats:
                self._need_flat(flat)

    def _need_flat(self, flat: Flat) -> None:
        if self.deferred and flat.resident is not None:
            self._before_gather(flat)
        if flat.state is State.SHARDED:
            self._fill(flat, self._free_buffer(flat) or self._evict(flat))
        if flat.pending is not None:
            if flat.pending.done:
                flat.pending.wait()
            else:
                with self._waits.waiting("transfers" if flat.param_store is not None else "collectives"):
                    flat.pending.wait()
            flat.pending = None
            buffer = self._buffer_of.get(id(flat))
            if buffer is not None:
                flat.attach(buffer.tensor, buffer.views[id(flat)])
        flat.let_go()  # its update came before what was waited for
        if flat.unread:
            flat.forbid_reads(False)
        self._clock += 1
        if flat.state is not State.RESIDENT:
            self._buffer_of[id(flat)].used_at = self._clock

    def _fill(self, flat: Flat, buffer: Buffer) -> None:
        assert buffer.holder is None
        buffer.holder = flat  # set before _agree, which may gather other flats into other buffers
        self._buffer_of[id(flat)] = buffer
        buffer.views_of(flat)
        try:
            self._agree(flat)
            flat.pending = self._gather(flat, buffer.tensor, buffer.freed)
        except BaseException:
            self._drop(flat)
            raise

    def _gather(self, flat: Flat, full: torch.Tensor, freed: StreamEvent | None) -> Pending:
        """Start gathering a flat's parameters into `full`, after the `freed` event of its previous contents."""
        self._before_gather(flat)  # a pending update must be issued before the parameters are read
        with self._side.run(after=freed):
            if flat.written is not None:
                flat.written.wait()
            with self._events.gather(flat.unit):
                if flat.param_store is None:
                    assert flat.shard is not None
                    return self._collectives.all_gather(full, flat.shard, f"parameters of {flat.unit.title}")
                # Fetch this rank's slice, then all-gather. Only streams wait here; the host waits only for a slow disk.
                # The all-gather is issued now, not when the slice arrives, so that all ranks keep one launch order.
                own = full[flat.own.start : flat.own.stop]
                with self._waits.waiting("transfers"):
                    flat.param_store.fetch(0, own).wait()
                return self._collectives.all_gather(full, own, f"parameters of {flat.unit.title}")

    def join(self, flat: Flat) -> None:
        """Take part in a gather that only other ranks need, and discard the result."""
        full = torch.empty(flat.layout.total, dtype=flat.dtype, device=self._device)
        self._gather(flat, full, None).wait()

    def refresh(self, flat: Flat) -> None:
        """Start all-gathering the updated slices of resident parameters."""
        if self._collectives.world == 1:  # its slice is the whole
            if self.deferred and flat.trainable and flat.resident is not None:
                flat.pending = Pending(None, flat.written, "an update")
            return
        if flat.trainable and flat.resident is not None and flat.shard is not None and flat.held == flat.own:
            with self._side.run(after=flat.written), self._events.gather(flat.unit):
                what = f"parameters of {flat.unit.title}"
                flat.pending = self._collectives.all_gather(flat.resident, flat.shard, what)

    def holds(self, unit: Unit) -> bool:
        """Whether the unit's parameters are gathered or being gathered."""
        return all(flat.state is not State.SHARDED for flat in unit.flats)

    def in_use(self, unit: Unit) -> bool:
        """Whether the unit is pinned: some code computes with its parameters."""
        return self._pins[unit.index] > 0

    def pinned(self, unit: Unit) -> Pin:
        """Keep the unit's buffers from being released or evicted while the body runs."""
        return Pin(self._pins, unit.index)

    def release(self, unit: Unit) -> None:
        """Release the unit's buffers unless it is pinned; they are refilled after the compute issued so far."""
        if self._pins[unit.index] == 0:
            for flat in unit.flats:
                if flat.state is State.GATHERED:
                    self._vacate(flat)

    def release_all(self, quietly: bool = False, resident: bool = True) -> None:
        """Finish all gathers in flight and release all units: no buffer may outlive an update of its parameters.

        `quietly` is for when another error is being raised: further errors here are suppressed. If not `resident`, the
        gathers of resident parameters stay in flight until their unit is used.
        """
        for unit in self._units:
            for flat in unit.flats:
                if flat.pending is not None and (resident or flat.resident is None):
                    try:
                        self._need_flat(flat)
                    except Exception:
                        if not quietly:
                            raise
                        self._drop(flat)
            self.release(unit)

    def _drop(self, flat: Flat) -> None:
        """Drop a gather that failed and free its buffer."""
        flat.pending = None
        buffer = self._buffer_of.pop(id(flat), None)
        if buffer is not None:
            buffer.holder, buffer.freed = None, StreamEvent(self._device)

    def reset_prefetch_order(self) -> None:
        """Reset the position in the trace: a step starts next."""
        self._cursor = 0

    def _vacate(self, flat: Flat) -> None:
        changed = flat.changed_while_whole()
        buffer = self._buffer_of.pop(id(flat))
        buffer.holder, buffer.freed = None, StreamEvent(self._device)
        flat.detach()
        if changed:
            raise Refused(
                f"{changed[0]} was changed in place while it was gathered, and the change would be lost: change it "
                f"outside forward, inside `with engine.gathered({changed[0]!r}, write=True)`"
            )

    # -- the pool --------------------------------------------------------------------------------------------------

    def _free_buffer(self, flat: Flat) -> Buffer | None:
        """Return a free buffer of the flat's size, allocating one if that size is under its limit; else None."""
        buffers = self._pool.setdefault((flat.layout.total, flat.dtype), [])
        for at, buffer in enumerate(buffers):
            if buffer.holder is None:
                return self._unaliased(buffers, at, flat)
        if len(buffers) < self._limits[flat.layout.total, flat.spec.width]:
            return self._grow(buffers, flat)
        return None

    def _evict(self, flat: Flat) -> Buffer:
        """Return the least recently used unpinned buffer of the flat's size, emptied; allocate if all are pinned."""
        buffers = self._pool[(flat.layout.total, flat.dtype)]
        idle = [b for b in buffers if b.holder and not self._pins[b.holder.unit.index]]
        if not idle:
            return self._grow(buffers, flat)
        # Prefetched buffers that were not used yet come last: they are the likeliest to be needed next.
        buffer = min(idle, key=lambda b: (b.holder is not None and b.holder.pending is not None, b.used_at))
        assert buffer.holder is not None
        self._need_flat(buffer.holder)
        self._vacate(buffer.holder)
        return self._unaliased(buffers, buffers.index(buffer), flat)

    def _unaliased(self, buffers: list[Buffer], at: int, flat: Flat) -> Buffer:
        """Return the free buffer at a place of the pool, replaced by a new one if other code keeps views of it.

        The memory of the old one is freed with its last view. Which gathers a rank starts must not depend on this: a
        thread of gloo's may still keep a view on one rank and not on another.
        """
        if buffers[at].aliased:
            self._left.append(Left(buffers[at]))
            buffers[at] = self._grow([], flat)
        return buffers[at]

    def _grow(self, buffers: list[Buffer], flat: Flat) -> Buffer:
        buffers.append(Buffer(torch.empty(flat.layout.total, dtype=flat.dtype, device=self._device)))
        return buffers[-1]

    def left(self) -> list[Left]:
        """Return the released buffers that other code keeps views of; called while no unit is gathered."""
        free = [b for buffers in self._pool.values() for b in buffers if b.holder is None and b.last is not None]
        self._left = [each for each in self._left if each.held]
        return [*self._left, *(Left(buffer) for buffer in free if buffer.aliased)]

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the gather buffers."""
        for buffers in self._pool.values():
            for buffer in buffers:
                yield "gathered", gather_name(buffer.tensor.numel()), buffer.tensor

    # -- saved tensors: see [Note: gather buffers and autograd] ----------------------------------------------------

    def locate(self, tensor: torch.Tensor) -> SavedView | None:
        """Return the position of `tensor` in its flat if it is a view of a gather buffer, else None."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a torch.func wrapper: keeping it keeps a reference to the buffer
            return None
        for buffers in self._pool.values():
            for buffer in buffers:
                start = buffer.tensor.data_ptr()
                if start <= address < start + buffer.tensor.nbytes and buffer.last is not None:
                    return _saved_view(tensor, address - start, buffer.last)
        for left in self._left:
            if left.start <= address < left.stop and left.held:
                return _saved_view(tensor, address - left.start, left.flat)
        return None

    def resolve(self, saved: SavedView) -> torch.Tensor:
        """Return the saved view, recreated from the buffer that holds its flat now; refuse changed values."""
        if saved.num_changes != saved.flat.num_changes:
            raise Refused(STALE)
        self._need_flat(saved.flat)
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
        if not self.moves or not torch.is_grad_enabled():
            return NOTHING
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            self._refuse_without_hooks()
            return NOTHING
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return NOTHING if outer is not None and outer in self._hooks else self._saving(outer)

    def _refuse_without_hooks(self) -> None:
        """Raise Refused unless all units stay gathered: autograd would save views of buffers that are refilled."""
        if any(self._pins[unit.index] == 0 or not self.holds(unit) for unit in self._units if unit.flats):
            raise Refused(_NO_HOOKS)

    @contextlib.contextmanager
    def _saving(self, outer: Any) -> Iterator[None]:
        outer_pack, outer_unpack = outer if outer is not None else (None, None)

        def pack(tensor: torch.Tensor) -> Any:
            saved = self.locate(tensor)
            if saved is not None:
                return saved
            return tensor if outer_pack is None else outer_pack(tensor)

        def unpack(packed: Any) -> Any:
            if isinstance(packed, SavedView):
                return self.resolve(packed)
            return packed if outer_unpack is None else outer_unpack(packed)

        self._hooks.append((pack, unpack))
        self._outer_hooks.append(outer)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):  # torch.func disables them
                raise Refused(_NO_HOOKS) from error
            raise
        finally:
            self._hooks.pop()
            self._outer_hooks.pop()

    def inside_checkpoint(self) -> bool:
        """Whether a checkpoint of torch's, around the units that run now, keeps what autograd saves."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top in self._hooks:
            top = self._outer_hooks[self._hooks.index(top)]
        return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def _saved_view(tensor: torch.Tensor, nbytes: int, flat: Flat) -> SavedView:
    """Return the position of a view that starts `nbytes` into a buffer of the flat."""
    bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg(), flat.num_changes)
    return SavedView(flat, nbytes // tensor.element_size(), tensor.size(), tensor.stride(), *bits)


def _outside_checkpoints() -> contextlib.AbstractContextManager[object]:
    """Keep a gather out of what torch's selective checkpointing records and replays."""
    modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    cached = any(type(mode).__name__ in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode") for mode in modes)
    return _disable_current_modes() if cached else NOTHING
