"""The update: runs the optimizer on every chunk that this rank holds, on whichever tier it is.

One pipeline serves all placements. States that the update device can address are updated in place. Other chunks are
fetched into one of a few slots while earlier chunks are updated, and written back while later ones are. On a GPU this
uses side streams, so the host does not wait, and the next forward overlaps with updates that it does not need yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offload.record import UNIT
from tiers.transfer import Transfer
from zerocli.engine.events import SILENT, Events
from zerocli.engine.grouped import Shards
from zerocli.engine.guards.holders import mark_own
from zerocli.engine.optimizer.compiled_update import CompiledAdam
from zerocli.engine.optimizer.counts import Counts, within
from zerocli.engine.optimizer.fused import fused_update
from zerocli.engine.optimizer.optim import At, FlatOptimizer, Group, StepValues, WholeRule
from zerocli.engine.optimizer.whole_rule import PersistentOptimizer
from zerocli.engine.optimizer.whole_update import update_together, update_whole
from zerocli.engine.streams import SideStream, StreamEvent, Waits
from zerocli.engine.units.master import REMAINDER, join, narrow, split_
from zerocli.engine.units.unit import MASTER, REPLICATED, Flat
from zerocli.layout.buffers import slot_widths
from zerocli.layout.constants import NUM_SLOTS
from zerocli.layout.flats import Sizing
from zerocli.layout.shards import Span

if TYPE_CHECKING:  # needs triton
    from zerocli.engine.optimizer.update_kernels import Parts

LEAD = NUM_SLOTS // 2
"""Number of chunks prefetched ahead of the one being updated; the other slots are being written back."""


@dataclass(eq=False)
class Job:
    """One chunk of a flat, with its span within what this rank holds."""

    flat: Flat
    span: Span
    parts: tuple[tuple[Span, int, int], ...]
    """The spans to update, relative to the chunk's start, each with its group and class of counts; see counts.py."""
    last: bool
    """Whether it is the last chunk of its flat."""
    passing: frozenset[str] = frozenset()
    """Names of the parts that are copied through a slot instead of updated in place: see `layout.slot_widths`."""
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    """Its master and states if they are on the device, made on first use."""
    target: torch.Tensor | None = None
    """Its parameters, likewise."""
    kernel_parts: Parts | None = None
    """Its parts for the fused update, made on first use."""


class Slot:
    """Buffers for one chunk at a time."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, str], torch.Tensor] = {}
        """By name and device type."""
        self.parts: dict[str, torch.Tensor] = {}
        """The current chunk's parts in the buffers: record, grad, master or parameters."""
        self.arriving: list[Transfer] = []
        self.leaving: list[Transfer] = []
        """Write-backs that still read the buffers."""
        self.used: StreamEvent | None = None
        """The end of an update that reads the buffers and writes nothing back."""

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())


class Updater:
    """Updates flats in order; offloaded states are updated in chunks of `sizing.chunk` elements."""

    def __init__(
        self,
        rule: FlatOptimizer,
        counts: Counts,
        collectives: Shards,
        device: torch.device,
        sizing: Sizing,
        events: Events = SILENT,
        compiled: CompiledAdam | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._events, self._waits = events, waits or Waits(device)
        self._rule, self._counts, self._collectives, self._device = rule, counts, collectives, device
        self.on_cpu = sizing.update_on_cpu
        self._sizing = sizing
        self.before_update: Callable[[Flat], None] = lambda flat: None
        """Called before a flat's states change, on the update's stream: a checkpoint may still be reading them."""
        self._fused = fused_update(rule) if sizing.fused_update else None
        self.compiled = compiled
        """The rule's kernel for updates on the CPU, if there is one."""
        self._fetching, self._updating = SideStream(device), SideStream(device)
        self._slots = [Slot() for _ in range(NUM_SLOTS)]
        self._scratch: dict[tuple[str, str], torch.Tensor] = {}
        """fp32 memory by use and device type."""
        self._inactive: frozenset[str] = frozenset()
        self._values: dict[str, StepValues] = {}
        """By device type. The device may read them until the next step replaces them."""
        self._updated: Callable[[Flat], None] = lambda flat: None
        self._jobs: list[Job] = []
        self._known: dict[int, list[Job]] = {}
        """Jobs by flat's id, if all parameters are updated; they are made again when classes of counts change."""
        self._known_version = -1
        self._inverse: tuple[StepValues, torch.Tensor | None] | None = None
        """The step's values on the CPU, and the factor that stands for dividing by their scale; None: it is 1."""
        self._into: tuple[Flat, torch.Tensor] | None = None
        """The flat whose new parameters are also written to memory of a gather, and that memory."""
        self.interrupted = False
        """Whether an error has left some states updated and others not."""
        self._left: set[int] = set()
        """Flats whose update has not been fully issued."""
        self._at = LEAD
        self._start = StreamEvent(device)

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of slots and scratch, on the device and on the host."""
        for slot in self._slots:
            for buffer in slot.buffers.values():
                yield "buffers", "update slots", buffer
        for buffer in self._scratch.values():
            yield "buffers", "update scratch", buffer

    def _place(self, flat: Flat) -> torch.device:
        """Return the device that updates a flat: the CPU if its states are offloaded and `on_cpu` is set."""
        return torch.device("cpu") if self.on_cpu and flat.record is not None else self._device

    def start(
        self,
        flats: Iterable[Flat],
        values: StepValues,
        updated: Callable[[Flat], None],
        inactive: frozenset[str] = frozenset(),
        deferred: bool = False,
    ) -> None:
        """Start updating the flats in order; `updated` is called after each, on the stream of its writes.

        Flats that are not offloaded are updated at once. The others are issued by `issue_updates` as the next forward
        needs them, so that its compute is not queued behind the whole update. Parameters in `inactive` are not
        updated.
        """
        # Updates of the last step that no forward has needed: they read slots and values that this step replaces.
        self.issue_updates()
        self._inactive = inactive
        flats, all_flats = [], list(flats)
        at_once = isinstance(self._rule, PersistentOptimizer) and self._rule.together
        for flat in all_flats:
            if not at_once and all(entry.name in inactive for entry in flat.layout.entries):
                flat.gradient.close()
            else:
                flats.append(flat)
        self._values = {place.type: values.to(place) for place in {self._place(flat) for flat in flats}}
        self._updated = updated
        if self._fused is not None and self._device.type in self._values:
            self._fused.begin(self._values[self._device.type])
        if self._rule.has_scalars:
            for group, history in self._pairs(flats):
                self._rule.advance(values.groups[group], values.at(history))
        # A rule that needs whole parameters gathers them now, at the same point on all ranks.
        together = [flat for flat in flats if self._rule.whole and self._needs_whole(flat, values)]
        if at_once:
            self._update_at_once(together, values)
        for flat in () if at_once else together:
            self.before_update(flat)
            assert isinstance(self._rule, WholeRule)
            with self._events.update(flat.unit):
                update_whole(flat, self._rule, values, self._counts, inactive, self._collectives)
            flat.written = StreamEvent(self._device)
            flat.gradient.close()
        flats = [flat for flat in flats if flat not in together]
        in_place = Slot()
        for flat in flats:
            if not flat.offloaded:
                with self._events.update(flat.unit):
                    for job in self._jobs_of(flat):
                        self._update(job, in_place)
                self._close(flat)
        self._jobs = [job for flat in flats if flat.offloaded for job in self._jobs_of(flat)]
        self._left = {id(job.flat) for job in self._jobs}
        self._at = 0
        # Side streams begin here: gradients, the norm and the step's values are complete at this point of the stream.
        self._start = StreamEvent(self._device)
        # Resident parameters may be read without the engine, so their updates are all issued now unless that is
        # `deferred`; others are only started.
        resident = [flat for flat in flats if flat.offloaded and flat.resident is not None and not deferred]
        if self._jobs:
            self.issue_updates(resident[-1] if resident else self._jobs[0].flat)

    def _update_at_once(self, flats: list[Flat], values: StepValues) -> None:
        """Update all flats in one step of the user's optimizer; see `PersistentOptimizer.together`."""
        assert isinstance(self._rule, PersistentOptimizer)
        for flat in flats:
            self.before_update(flat)
        if flats:
            with self._events.update(flats[0].unit):
                update_together(flats, self._rule, values, self._inactive, self._collectives)
        for flat in flats:
            flat.written = StreamEvent(self._device)
            flat.gradient.close()

    def _pairs(self, flats: Iterable[Flat]) -> list[tuple[int, int]]:
        """Return the (group, class of counts) pairs of all parameters that are updated."""
        entries = [entry for flat in flats for entry in flat.layout.entries if entry.name not in self._inactive]
        return sorted({(entry.group % REPLICATED, self._counts.class_of(entry.name)) for entry in entries})

    def _needs_whole(self, flat: Flat, values: StepValues) -> bool:
        return any(self._rule.is_whole(values.groups[entry.group % REPLICATED]) for entry in flat.layout.entries)

    def issue_into(self, flat: Flat, own: torch.Tensor, free: StreamEvent) -> bool:
        """Issue a flat's pending update and also write its new parameters to `own`, device memory that is free then.

        Returns False if `own` is not written: then they are fetched from their tier, where the update writes them too.
        """
        assert self.has_pending_update(flat)
        jobs = self._jobs_of(flat)
        passes = flat.held == flat.own and jobs[0].passing & {"parameters", "master"}
        if self._device.type != "cuda" or not passes or sum(job.span.numel for job in jobs) < flat.own.numel:
            self.issue_updates(flat)
            return False
        with self._updating.run(after=self._start):
            free.wait()
        self._into = flat, own
        try:
            self.issue_updates(flat)
        finally:
            self._into = None
        return True

    def issue_updates(self, flat: Flat | None = None) -> None:
        """Issue all updates up to and including this flat's, or all that are left if None."""
        if flat is not None and not self.has_pending_update(flat):
            return
        self.interrupted = True
        self._issue_up_to(flat)
        self.interrupted = False

    def _issue_up_to(self, flat: Flat | None) -> None:
        while self._at < len(self._jobs) + LEAD:
            i = self._at
            self._at += 1
            if i < len(self._jobs):
                with self._fetching.run(after=self._start):
                    self._fetch(self._jobs[i], self._slots[i % NUM_SLOTS])
            if i >= LEAD:
                job = self._jobs[i - LEAD]
                with self._updating.run(after=self._start):
                    with self._events.update(job.flat.unit):
                        self._update(job, self._slots[(i - LEAD) % NUM_SLOTS])
                    if job.last:
                        self._left.discard(id(job.flat))
                        self._close(job.flat, elsewhere=True)
                if job.last and job.flat is flat:
                    return
        if flat is None or not self._left:
            self._jobs, self._at = [], LEAD

    def has_pending_update(self, flat: Flat) -> bool:
        """Whether the flat's update has not been fully issued."""
        return id(flat) in self._left

    def _close(self, flat: Flat, elsewhere: bool = False) -> None:
        flat.gradient.close(elsewhere)
        flat.written = StreamEvent(self._device)
        self._updated(flat)

    def _jobs_of(self, flat: Flat) -> list[Job]:
        """Return the chunks that have something to update; one empty chunk if this rank has none."""
        if self._inactive:
            return self._make_jobs(flat)
        if self._known_version != self._counts.version:
            self._known, self._known_version = {}, self._counts.version
        jobs = self._known.get(id(flat))
        if jobs is None or jobs[0].flat is not flat:  # another flat may have had the id before
            jobs = self._known[id(flat)] = self._make_jobs(flat)
        return jobs

    def _make_jobs(self, flat: Flat) -> list[Job]:
        passing = frozenset(slot_widths(flat.spec, self._sizing))
        segments = [
            (span.shifted(-flat.held.start), at) for span, at in self._counts.segments(flat.layout, self._inactive)
        ]
        together = self._fuses(flat) and not flat.offloaded  # one launch for the whole flat
        size = self._sizing.chunk if flat.offloaded else self._chunk(flat.dtype, self._device)
        chunks = [
            (span, tuple((part, group % REPLICATED, at) for part, at in within(segments, span)))
            for group, span in flat.spec.chunks(max(1, flat.held.numel) if together else size)
        ]
        if together:
            parts = [(part.shifted(span.start), group, at) for span, found in chunks for part, group, at in found]
            chunks = [(Span(0, flat.held.numel), tuple(parts))]
        chunks = [chunk for chunk in chunks if chunk[1]] or [(Span(0, 0), ())]
        last = len(chunks) - 1
        return [Job(flat, span, parts, i == last, passing) for i, (span, parts) in enumerate(chunks)]

    def _fuses(self, flat: Flat) -> bool:
        """Whether the fused update updates the flat."""
        return self._fused is not None and self._place(flat).type == "cuda" and flat.dtype != torch.float32

    # -- one chunk -------------------------------------------------------------------------------------------------

    def _fetch(self, job: Job, slot: Slot) -> None:
        """Start fetching a chunk's parts into the slot, after the previous chunk's update and write-back."""
        flat, span = job.flat, job.span
        for transfer in slot.leaving:
            self._wait_for_host(transfer)
            transfer.wait()
        if slot.used is not None:
            slot.used.wait()
        slot.leaving, slot.arriving, slot.parts, slot.used = [], [], {}, None
        if not job.parts:
            return
        if "record" in job.passing:
            assert flat.record is not None
            memory = self._take(job, slot, "record", UNIT, flat.record.units(span.start, span.stop))
            slot.arriving.append(flat.record.fetch(span.start, span.stop, memory))
        if "grad" in job.passing:
            assert flat.gradient.store is not None
            memory = self._take(job, slot, "grad", flat.gradient.store.dtype, span.numel)
            slot.arriving.append(flat.gradient.store.fetch(span.start, memory))
        if "master" in job.passing:  # fp32: the parameters are the master
            assert flat.param_store is not None
            memory = self._take(job, slot, "master", torch.float32, span.numel)
            slot.arriving.append(flat.param_store.fetch(span.start, memory))
        if "parameters" in job.passing and flat.split:
            assert flat.param_store is not None
            memory = self._take(job, slot, "parameters", flat.dtype, span.numel)
            slot.arriving.append(flat.param_store.fetch(span.start, memory))

    def _wait_for_host(self, transfer: Transfer) -> None:
        """Block the host until its part of a transfer has ended: a slow disk is no slow optimizer."""
        if transfer.holds_host:
            with self._waits.waiting("transfers"):
                transfer.wait_for_host()

    def _take(self, job: Job, slot: Slot, name: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        place = self._place(job.flat)
        held = slot.buffers.get((name, place.type))
        if held is None or held.numel() < numel or held.dtype != dtype:
            held = None
            slot.buffers.pop((name, place.type), None)  # freed before the larger one is made
            held = slot.buffers[name, place.type] = self._allocate(numel, dtype, place)
        slot.parts[name] = held[:numel]
        return slot.parts[name]

    def _allocate(self, numel: int, dtype: torch.dtype, place: torch.device) -> torch.Tensor:
        # Only copies from and to pinned memory run beside the host.
        pin = place.type == "cpu" and self._device.type == "cuda"
        return torch.empty(numel, dtype=dtype, device=place, pin_memory=pin)

    def _update(self, job: Job, slot: Slot) -> None:
        """Update a chunk once its parts have arrived, and start writing them back."""
        if not job.parts:
            return
        flat, span, place = job.flat, job.span, self._place(job.flat)
        self.before_update(flat)
        for transfer in slot.arriving:
            self._wait_for_host(transfer)
            # The CPU computes at once; no stream orders it after the transfer.
            transfer.wait() if place == self._device else transfer.synchronize()
        if not flat.offloaded and not job.arrays:
            job.arrays, job.target = self._arrays(job, slot), self._target(job, slot)
            mark_own(*job.arrays.values(), *(() if job.target is None else (job.target,)))
        arrays = job.arrays or self._arrays(job, slot)
        target = job.target if job.arrays else self._target(job, slot)
        grad = self._grad(job, slot)
        if "parameters" in slot.parts and MASTER in arrays and sum(part.numel for part, _, _ in job.parts) < span.numel:
            assert target is not None  # the whole chunk is written back, including parameters that are not updated
            target.copy_(narrow(arrays[MASTER], flat.dtype))
        values = self._values[place.type]
        if self._fused is not None and self._fuses(flat):
            assert target is not None
            if job.kernel_parts is None:
                job.kernel_parts = self._fused.parts(job.parts)
            master = arrays[REMAINDER] if REMAINDER in arrays else arrays[MASTER]
            self._fused.update(target, master, grad, arrays, values, job.kernel_parts)
        else:
            # Pieces that fit the cache save memory traffic. A GPU updating offloaded states waits for the host link
            # anyway, so there the chunk is updated whole, with fewer launches.
            cached = place.type == "cpu" or not flat.offloaded
            if self._is_compiled(grad, target, values):  # no scratch memory, unless to copy from another device
                cached = any(each.device != place for each in (target, arrays.get(MASTER)) if each is not None)
            for part, group, history in job.parts:
                at = values.at(history)
                for piece in part.pieces(self._chunk(flat.dtype, place) if cached else span.numel):
                    where = slice(piece.start, piece.stop)
                    self.update_piece(where, arrays, grad, target, values, values.groups[group], at)
        self._send_back(job, slot)

    def _send_back(self, job: Job, slot: Slot) -> None:
        """Start writing back the parts in the slot; parts updated in place are only marked as changed."""
        flat, span = job.flat, job.span
        if flat.record is not None and "record" in slot.parts:
            slot.leaving.append(flat.record.put(span.start, span.stop, slot.parts["record"]))
        elif flat.record is not None:
            flat.record.changed(span.start, span.stop)
        changed = slot.parts.get("parameters", slot.parts.get("master"))
        if self._into is not None and self._into[0] is flat and changed is not None:
            self._into[1][span.start : span.stop].copy_(changed)
        if flat.param_store is not None and changed is not None:
            slot.leaving.append(flat.param_store.put(span.start, changed))
        elif flat.param_store is not None:
            flat.param_store.changed(span.start, span.stop)
        if slot.parts and not slot.leaving:  # only gradients passed through it
            slot.used = StreamEvent(self._device)

    def update_piece(
        self,
        part: slice,
        arrays: dict[str, torch.Tensor],
        grad: torch.Tensor,
        target: torch.Tensor | None,
        values: StepValues,
        group: Group,
        at: At,
    ) -> None:
        """Update a piece: its master, states and parameters; it fits the cache unless its update is compiled."""
        states = {name: arrays[name][part] for name in self._rule.state_names}
        device = grad.device
        split = REMAINDER in arrays
        # Another memory if the CPU updates states whose parameters, fp32 ones or those to be written, are on a GPU.
        master = arrays[REMAINDER if split else MASTER][part].to(device)
        parameters = target[part] if target is not None else None
        if parameters is not None and parameters.device != device:
            parameters = parameters.to(device) if split else torch.empty_like(parameters, device=device)
        if self._is_compiled(grad, target, values):
            self._update_compiled(parameters, master, grad[part], states, values, group, at)
        else:
            self._update_plain(parameters, master, grad[part], states, values, group, at)
        if not split and master.device != arrays[MASTER].device:
            arrays[MASTER][part].copy_(master)
        if target is not None and parameters is not None and parameters.device != target.device:
            target[part].copy_(parameters, non_blocking=not split)

    def _is_compiled(self, grad: torch.Tensor, target: torch.Tensor | None, values: StepValues) -> bool:
        """Whether the compiled kernel makes the update; a step that changes nothing is left to torch's operations."""
        return self.compiled is not None and self.compiled.takes(grad, target) and not values.skip

    def _update_compiled(
        self,
        parameters: torch.Tensor | None,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: dict[str, torch.Tensor],
        values: StepValues,
        group: Group,
        at: At,
    ) -> None:
        assert self.compiled is not None
        factor = self._factor(values)
        number = 1.0 if factor is None else factor.item()
        done = self.compiled.update(parameters, master, grad, states, number, group, at)
        if done < grad.numel():
            left = {name: state[done:] for name, state in states.items()}
            rest = None if parameters is None else parameters[done:]
            self._update_plain(rest, master[done:], grad[done:], left, values, group, at)

    def _update_plain(
        self,
        parameters: torch.Tensor | None,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: dict[str, torch.Tensor],
        values: StepValues,
        group: Group,
        at: At,
    ) -> None:
        """Update a piece by torch's operations; as int16, `master` is the remainder of a split one."""
        if master.dtype != torch.int16:
            self._rule.update(master, *self._fp32(grad, values), states, group, at)
            if parameters is not None:
                parameters.copy_(narrow(master, parameters.dtype))
            return
        assert parameters is not None
        joined, bits = (self._scratch_of(use, grad.device, grad.numel()) for use in ("master", "bits"))
        join(parameters, master, joined, bits)
        self._rule.update(joined, *self._fp32(grad, values), states, group, at)
        split_(joined, parameters, master, bits)

    def _arrays(self, job: Job, slot: Slot) -> dict[str, torch.Tensor]:
        """Return the chunk's master and states, in the memory where they are updated."""
        flat, span = job.flat, job.span
        part = slice(span.start, span.stop)
        arrays = {name: array[part] for name, array in flat.states.items()}
        if flat.record is not None:
            memory = slot.parts.get("record")
            if memory is None:
                memory = flat.record.local(span.start, span.stop)
            assert memory is not None
            arrays |= flat.record.split(span.start, span.stop, memory)
        if flat.remainder is not None:
            arrays[REMAINDER] = flat.remainder[part]
        elif MASTER not in arrays and not flat.split:
            arrays[MASTER] = flat.master[part] if flat.master is not None else slot.parts["master"]
        return arrays

    def _grad(self, job: Job, slot: Slot) -> torch.Tensor:
        flat, span = job.flat, job.span
        if flat.gradient.held is not None:
            whole = span.numel == flat.gradient.held.numel() and not self.on_cpu
            return flat.gradient.held if whole else flat.gradient.held[span.start : span.stop].to(self._place(flat))
        assert flat.gradient.store is not None
        if "grad" in slot.parts:
            return slot.parts["grad"]
        local = flat.gradient.store.local(span.start, span.stop)
        assert local is not None
        return local

    def _target(self, job: Job, slot: Slot) -> torch.Tensor | None:
        """Return the memory of the chunk's parameters (compute dtype); None if the master is the parameters."""
        flat, span = job.flat, job.span
        if flat.dtype == torch.float32:
            return None
        if flat.param_store is None:
            assert flat.held_parameters is not None
            return flat.held_parameters[span.start : span.stop]
        if "parameters" not in job.passing:
            local = flat.param_store.local(span.start, span.stop)
            assert local is not None
            return local
        if "parameters" in slot.parts:  # fetched: they are a part of the master
            return slot.parts["parameters"]
        return self._take(job, slot, "parameters", flat.dtype, span.numel)

    def _chunk(self, dtype: torch.dtype, place: torch.device) -> int:
        """Return the elements of parameters that are updated at a time in memory of this device."""
        return self._sizing.update_chunk(dtype.itemsize, place.type)

    def _scratch_of(self, use: str, device: torch.device, numel: int) -> torch.Tensor:
        """Return `numel` elements of fp32 scratch memory, in which narrower parameters are updated."""
        scratch = self._scratch.get((use, device.type))
        if scratch is None or scratch.numel() < numel:
            scratch = self._allocate(max(numel, self._chunk(torch.bfloat16, device)), torch.float32, device)
            self._scratch[use, device.type] = scratch
        return scratch[:numel]

    def _fp32(self, grad: torch.Tensor, values: StepValues) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradient in fp32, copied if necessary, and the scale that the kernel has to divide it by."""
        if grad.dtype != torch.float32:
            grad = self._scratch_of("grad", grad.device, grad.numel()).copy_(grad)
        if grad.is_cuda:
            return grad, values.grad_scale
        factor = self._factor(values)
        return (grad if factor is None else grad.mul_(factor)), None

    def _factor(self, values: StepValues) -> torch.Tensor | None:
        """Return what gradients on the CPU are multiplied by, instead of a division by the step's scale.

        The CPU kernel is 20% slower when it scales, and division costs more than multiplication. The piece is in
        cache, and the scale is in host memory.
        """
        if self._inverse is None or self._inverse[0] is not values:
            self._inverse = values, None if values.grad_scale == 1 else 1 / values.grad_scale
        return self._inverse[1]
