"""Gathering: a unit's parameters are all-gathered just before use, into a small fixed pool of buffers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.mover import StagedStore
from tiers.events import NOTHING
from zerocli.engine.comm import Pending
from zerocli.engine.grouped import Grouped
from zerocli.engine.streams import SideStream, StreamEvent
from zerocli.engine.units.codecs import decode
from zerocli.engine.units.gather_buffers import Buffer, ReleasedBuffer
from zerocli.engine.units.saved_views import SavedViews
from zerocli.engine.units.unit import Flat, State, Unit
from zerocli.errors import Refused
from zerocli.layout.buffers import COPIES, DECODING, gather_limits, gather_name, has_copy, staged_name
from zerocli.layout.codecs import scratch_nbytes

if TYPE_CHECKING:
    from zerocli.engine.agreement import Agreement
    from zerocli.engine.engine import Engine


@dataclass(eq=False)
class GroupCopy:
    """This rank's part of the copy of a flat that its group gathers from."""

    memory: torch.Tensor
    num_changes: int = -1
    """The flat's `num_changes` when it was filled, which is the same on all ranks."""


class Pin:
    """Counts the code that computes with a unit's parameters; a class, as it is entered for every call of a unit."""

    def __init__(self, pins: dict[int, int], index: int) -> None:
        self._pins, self._index = pins, index

    def __enter__(self) -> None:
        self._pins[self._index] += 1

    def __exit__(self, *_: object) -> None:
        self._pins[self._index] -= 1


class Gatherer:
    """Gathers units, prefetching them in the order traced in the previous step, and releases them."""

    agreement: Agreement
    """That of the same flats; set once it is made."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._units, self._device = engine, engine.units, engine.device
        self._collectives, self._shards = engine.collectives, engine.shards
        self._waits, self._events = engine.waits, engine.events
        flats, sizing = list(engine.flats()), engine.sizing
        self._limit = sizing.gather_buffers
        self._limits = gather_limits([flat.spec for flat in flats], sizing)
        self._side = SideStream(engine.device)
        self._pool: dict[tuple[tuple[int, int, int], torch.dtype], list[Buffer]] = {}
        self._copied = {id(flat) for flat in flats if has_copy(flat.spec, sizing)}
        self._copies: dict[int, GroupCopy] = {}
        """By flat id: made when it is gathered first."""
        self._scratch: torch.Tensor | None = None
        """Memory in which encoded parameters are decoded, one flat after another on the side stream."""
        encoded = [flat for flat in flats if flat.codec]
        sizes = (scratch_nbytes(flat.codec, flat.layout.total, engine.device.type) for flat in encoded)
        self._scratch_nbytes = max(sizes, default=0)
        self._buffer_of: dict[int, Buffer] = {}
        self._pins: dict[int, int] = {unit.index: 0 for unit in engine.units}
        self._clock = 0
        self._order: list[int] = []
        self._seen: list[int] = []
        self._update_order: list[Unit] | None = None
        self._cursor = 0
        self.replaced: list[ReleasedBuffer] = []
        """Buffers that were dropped from the pool."""
        self.interrupted = False
        """Whether a gather has failed on this rank that others may have begun."""
        self.deferred = engine.settings.defer_update
        """Whether the compute stream waits for updated resident parameters only when their unit is used."""
        self.moves = any(flat.state is not State.RESIDENT for flat in flats)
        """Whether any parameter is gathered and released; otherwise there is nothing to hook or release."""
        self._far = any(flat.param_store is not None and not flat.param_store.tier.addressable for flat in flats)
        """Whether any parameters are on a tier that must be read well ahead (a disk)."""
        self.saved = SavedViews(self)

    # -- the order of use ------------------------------------------------------------------------------------------

    def enter(self, unit: Unit, record: bool) -> None:
        """Gather the unit's parameters for its forward or backward, and start prefetching the next units.

        `record` adds the use to the step's trace; the next step prefetches in that order.
        """
        if record:
            self._seen.append(unit.index)
        ahead = self._order[self._cursor :]
        self._cursor += ahead.index(unit.index) + 1 if unit.index in ahead else len(ahead)
        with _outside_checkpoints():
            self.need(unit)
            self.prefetch()
        if self._far:
            self._look_ahead()

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

    def follow(self, other: Gatherer) -> None:
        """Take over the order of use, and that of updates, from the gatherer of the same units before."""
        self._order, self._seen, self._update_order = other._order, other._seen, other._update_order

    def restart(self) -> None:
        """Forget what this step has used: it is run again from its beginning."""
        self._seen, self._cursor = [], 0

    def _look_ahead(self) -> None:
        """Tell the mover which parameters are used next: the rest of this step's order, then its beginning in the next.

        Parameters that this step or a pending update will still change are not read ahead.
        """
        updater, uses = self._engine.updater, []
        for at in (*range(self._cursor, len(self._order)), *range(self._cursor)):
            for flat in self._units[self._order[at]].flats:
                if isinstance(flat.param_store, StagedStore):
                    read = not updater.has_pending_update(flat) if at >= self._cursor else not flat.trainable
                    uses.append((flat.param_store, read))
        if uses:
            self._engine.mover.expect(uses)

    def prefetch(self) -> bool:
        """Start gathering the next units while buffers are free; return whether any gather was started."""
        started = False
        # One buffer fewer than there are: the unit that computes now has one.
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
                self.need_flat(flat)

    def need_flat(self, flat: Flat) -> None:
        """Make a flat's parameters usable on the current stream."""
        # Whole parameters are not gathered, so a deferred update that has not been issued yet is issued here.
        if self.deferred and flat.resident is not None:
            self._before_gather(flat)
        if flat.state is State.SHARDED:
            self._fill(flat, self._free_buffer(flat) or self._evict(flat))
        if flat.pending is not None:
            # A collective on a CPU is done once it was waited for, which is here: only on a GPU can it be done before,
            # and then no time of waiting is counted.
            if flat.pending.done:
                flat.pending.wait()
            else:
                with self._waits.waiting("transfers" if flat.param_store is not None else "collectives"):
                    flat.pending.wait()
            flat.pending = None
            buffer = self._buffer_of.get(id(flat))
            if buffer is not None:
                flat.attach(*buffer.views[id(flat)])
        flat.gradient.free_used()  # its update came before what was waited for
        if flat.unread:
            flat.forbid_reads(False)
        self._clock += 1
        if flat.state is not State.RESIDENT:
            self._buffer_of[id(flat)].used_at = self._clock

    def _fill(self, flat: Flat, buffer: Buffer) -> None:
        assert buffer.holder is None
        buffer.holder = flat  # set before agree_on, which may gather other flats into other buffers
        self._buffer_of[id(flat)] = buffer
        full = buffer.part_for(flat)
        try:
            self.agreement.agree_on(flat)
            self.interrupted = True
            flat.pending = self._gather(flat, full, buffer.freed, buffer.staged)
            self.interrupted = False
        except BaseException:
            self._drop(flat)
            raise

    def _gather(
        self, flat: Flat, full: torch.Tensor, freed: StreamEvent | None, staged: torch.Tensor | None = None
    ) -> Pending:
        """Start gathering a flat's parameters into `full`, after the `freed` event of its previous contents.

        Encoded ones arrive in `staged`, unless they are on the device.
        """
        # A pending update must be issued before the parameters are read; it may write them to their place at once.
        own = full[flat.own.start : flat.own.stop] if flat.param_store is not None and not flat.codec else None
        written = self._before_gather(flat, own, freed)
        if id(flat) in self._copied and id(flat) not in self._copies:
            assert isinstance(self._shards, Grouped) and flat.shard is not None
            numel = flat.shard.numel() * self._shards.across.world
            self._copies[id(flat)] = GroupCopy(flat.shard.new_empty(numel))
            freed = None  # compute may still use the memory that the copy is made from
        # After the last compute that reads the buffer, not all that was issued: a prefetch overlaps with the unit that
        # runs now. A new buffer has no event and waits for all: compute may still use the memory it is made from.
        with self._side.run(after=freed):
            # The update of the slice may have run on another side stream.
            if flat.written is not None:
                flat.written.wait()
            with self._events.gather(flat.unit):
                if flat.codec:
                    return self._gather_encoded(flat, full, staged)
                if flat.param_store is None:
                    assert flat.shard is not None
                    return self._all_gather(flat, full, flat.shard)
                # Fetch this rank's slice, then all-gather. Only streams wait here; the host waits only for a slow disk.
                # The all-gather is issued now, not when the slice arrives, so that all ranks keep one launch order.
                assert own is not None
                if not written:
                    with self._waits.waiting("transfers"):
                        flat.param_store.fetch(0, own).wait()
                return self._all_gather(flat, full, own)

    def _before_gather(self, flat: Flat, own: torch.Tensor | None = None, free: StreamEvent | None = None) -> bool:
        """Issue the rest of a flat's update; the host may have to wait for states on a disk, which delays compute.

        With `own`, memory for this rank's slice that is free after an event, return whether it is written there.
        """
        updater = self._engine.updater
        updater.run_ahead()
        if not updater.has_pending_update(flat):
            return False
        with self._waits.waiting("optimizer"):
            if own is not None and free is not None:
                return updater.issue_into(flat, own, free)
            updater.issue_updates(flat)
        return False

    def _all_gather(self, flat: Flat, full: torch.Tensor, own: torch.Tensor) -> Pending:
        """Start to gather `full`: from this rank's group if that has a copy, which is renewed after a change."""
        what, copy = f"parameters of {flat.unit.title}", self._copies.get(id(flat))
        if copy is None:
            return self._shards.all_gather(full, own, what)
        assert isinstance(self._shards, Grouped)
        if copy.num_changes != flat.num_changes:
            self._shards.across.all_gather(copy.memory, own, what).wait()
            copy.num_changes = flat.num_changes
        return self._shards.inside.all_gather(full, copy.memory, what)

    def _gather_encoded(self, flat: Flat, full: torch.Tensor, staged: torch.Tensor | None) -> Pending:
        """Start to fetch and gather an encoded flat, and to decode it into `full`."""
        pending, encoded = Pending(None, None), flat.shard
        if flat.param_store is not None:
            assert staged is not None
            share = staged.numel() * flat.own.start // flat.layout.total
            encoded = staged[share : share + flat.spec.own_nbytes]
            with self._waits.waiting("transfers"):
                flat.param_store.fetch(0, encoded).wait()
        assert encoded is not None
        if flat.own.numel < flat.layout.total:
            assert staged is not None
            pending, encoded = self._all_gather(flat, staged, encoded), staged
        pending.then = functools.partial(self._decode, flat.codec, encoded, full)
        if self._device.type == "cuda":  # nothing waits: decoding is queued behind the gather on this side stream
            pending.wait()
            return Pending(None, StreamEvent(self._device))
        return pending

    @torch.no_grad()
    def _decode(self, codec: str, encoded: torch.Tensor, full: torch.Tensor) -> None:
        if self._scratch is None and self._scratch_nbytes:
            self._scratch = torch.empty(self._scratch_nbytes, dtype=torch.uint8, device=self._device)
        decode(codec, encoded, full, self._scratch)

    def join(self, flat: Flat) -> None:
        """Take part in a gather that only other ranks need, and discard the result."""
        # Allocated on the compute stream, which waits for the gather below: the allocator cannot hand the memory on
        # while the gather still writes to it.
        full, staged = self._memory_for(flat)
        self._gather(flat, full[: flat.layout.total], None, staged).wait()

    def refresh(self, flat: Flat) -> None:
        """Start all-gathering the updated slices of resident parameters."""
        if self._shards.world == 1:  # its slice is the whole
            if self.deferred and flat.trainable and flat.resident is not None:
                flat.pending = Pending(None, flat.written, "an update")
            return
        if flat.trainable and flat.resident is not None and flat.shard is not None and flat.held == flat.own:
            with self._side.run(after=flat.written), self._events.gather(flat.unit):
                what = f"parameters of {flat.unit.title}"
                flat.pending = self._shards.all_gather(flat.resident, flat.shard, what)

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
                        self.need_flat(flat)
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
        # Compared while the parameters are still views of the buffer.
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
        buffers = self._pool.setdefault((flat.spec.gather_size, flat.dtype), [])
        for at, buffer in enumerate(buffers):
            if buffer.holder is None:
                return self._unaliased(buffers, at, flat)
        if len(buffers) < self._limits[flat.spec.gather_size]:
            return self._grow(buffers, flat)
        return None

    def _evict(self, flat: Flat) -> Buffer:
        """Return the least recently used unpinned buffer of the flat's size, emptied; allocate if all are pinned."""
        buffers = self._pool[(flat.spec.gather_size, flat.dtype)]
        idle = [b for b in buffers if b.holder and not self._pins[b.holder.unit.index]]
        if not idle:
            return self._grow(buffers, flat)
        # Prefetched buffers that were not used yet come last: they are the likeliest to be needed next.
        buffer = min(idle, key=lambda b: (b.holder is not None and b.holder.pending is not None, b.used_at))
        # A gather into it may be in flight; two must not write to the same memory.
        assert buffer.holder is not None
        self.need_flat(buffer.holder)
        self._vacate(buffer.holder)
        return self._unaliased(buffers, buffers.index(buffer), flat)

    def _unaliased(self, buffers: list[Buffer], at: int, flat: Flat) -> Buffer:
        """Return the free buffer at a place of the pool, replaced by a new one if other code keeps views of it.

        The memory of the old one is freed with its last view. Which gathers a rank starts must not depend on this: a
        thread of gloo's may still keep a view on one rank and not on another.
        """
        if buffers[at].aliased:
            self.replaced.append(ReleasedBuffer(buffers[at]))
            buffers[at] = self._grow([], flat)
        return buffers[at]

    def _grow(self, buffers: list[Buffer], flat: Flat) -> Buffer:
        buffers.append(Buffer(*self._memory_for(flat)))
        return buffers[-1]

    def _memory_for(self, flat: Flat) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return memory for a gathered flat, and for what it arrives in if that is encoded."""
        staged, device = flat.spec.staged_nbytes, self._device
        full = torch.empty(flat.spec.gather_size[0], dtype=flat.dtype, device=device)
        return full, torch.empty(staged, dtype=torch.uint8, device=device) if staged else None

    def released_with_views(self) -> list[ReleasedBuffer]:
        """Return the released buffers that other code keeps views of; called while no unit is gathered."""
        free = [b for buffers in self._pool.values() for b in buffers if b.holder is None and b.last is not None]
        self.replaced = [each for each in self.replaced if each.held]
        return [*self.replaced, *(ReleasedBuffer(buffer) for buffer in free if buffer.aliased)]

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the gather buffers."""
        if self._scratch is not None:
            yield "buffers", DECODING, self._scratch
        for copy in self._copies.values():
            yield "gathered", COPIES, copy.memory
        for buffer in self.buffers():
            yield "gathered", gather_name(buffer.tensor.numel()), buffer.tensor
            if buffer.staged is not None:
                yield "gathered", staged_name(buffer.staged.numel()), buffer.staged

    def buffers(self) -> Iterator[Buffer]:
        return (buffer for buffers in self._pool.values() for buffer in buffers)

    def all_stay(self) -> bool:
        """Whether all units stay gathered for now."""
        return all(self._pins[unit.index] > 0 and self.holds(unit) for unit in self._units if unit.flats)

    def saving(self) -> contextlib.AbstractContextManager[object]:
        """Keep autograd from saving views of gather buffers while the body runs."""
        return self.saved.saving() if self.moves else NOTHING


def _outside_checkpoints() -> contextlib.AbstractContextManager[object]:
    """Keep a gather out of what torch's selective checkpointing records and replays."""
    # These modes expect the same operations in forward and recomputation, but a unit may be gathered in one only.
    modes = (torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack()))
    cached = any(type(mode).__name__ in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode") for mode in modes)
    return _disable_current_modes() if cached else NOTHING
