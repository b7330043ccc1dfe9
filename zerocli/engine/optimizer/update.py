"""The update: runs the optimizer on every chunk that this rank holds, on whichever tier it is.

One pipeline serves all placements. States that the update device can address are updated in place. Other chunks are
fetched into one of a few slots while earlier chunks are updated, and written back while later ones are. On a GPU this
uses side streams, so the host does not wait, and the next forward overlaps with updates that it does not need yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from zerocli.engine.events import SILENT, Events
from zerocli.engine.grouped import Shards
from zerocli.engine.optimizer.chunk import Chunk, ChunkUpdate, Slot
from zerocli.engine.optimizer.compiled_update import CompiledAdam
from zerocli.engine.optimizer.counts import Counts, within
from zerocli.engine.optimizer.cpu_part import CpuPart
from zerocli.engine.optimizer.optim import FlatOptimizer, StepValues, WholeRule
from zerocli.engine.optimizer.piece import PieceUpdate
from zerocli.engine.optimizer.whole_update import update_whole
from zerocli.engine.streams import SideStream, SleepEvent, StreamEvent, Waits
from zerocli.engine.units.unit import REPLICATED, Flat
from zerocli.errors import Refused
from zerocli.layout.buffers import Turns, slot_widths
from zerocli.layout.constants import NUM_SLOTS
from zerocli.layout.flats import Sizing
from zerocli.layout.shards import Span

LEAD = NUM_SLOTS // 2
"""Number of chunks prefetched ahead of the one being updated; the other slots are being written back."""

AT_ONCE = 2
"""Chunks that are issued ahead wherever the host comes by: it takes about as long for one as the link, and with more
the forward that it also launches would wait for it."""


class Updater:
    """Updates flats in order; offloaded states are updated in chunks of `sizing.chunk` elements."""

    def __init__(
        self,
        rule: FlatOptimizer,
        counts: Counts,
        collectives: Shards,
        device: torch.device,
        sizing: Sizing,
        waits: Waits,
        events: Events = SILENT,
        compiled: CompiledAdam | None = None,
        beside: CompiledAdam | None = None,
    ) -> None:
        """Take the rule's `compiled` kernel for updates on the CPU, and the one that rounds as the device does, with
        which the CPU takes its part of the update if `sizing` gives it one.
        """
        self._events = events
        self._rule, self._counts, self._collectives, self._device = rule, counts, collectives, device
        self._sizing, self.on_cpu, self.compiled = sizing, sizing.update_on_cpu, compiled
        self.pieces = PieceUpdate(rule, device, sizing, compiled)
        self.chunks = ChunkUpdate(rule, device, sizing, self.pieces, waits)
        self._cpu = None
        if sizing.cpu_share > 0:
            assert beside is not None
            self._cpu = CpuPart(beside, device, sizing, threads=max(1, sizing.threads - 1))
        self._turns = Turns(sizing)
        self._fetching, self._updating, self._closing = (SideStream(device) for _ in range(3))
        self._slots = [Slot() for _ in range(NUM_SLOTS)]
        self._inactive: frozenset[str] = frozenset()
        self._updated: Callable[[Flat], None] = lambda flat: None
        self._queue: list[Chunk] = []
        self._known: dict[int, list[Chunk]] = {}
        """Chunks by flat's id; they are made again when classes of counts change, or what is updated."""
        self._known_for: tuple[int, frozenset[str]] = (-1, frozenset())
        self.interrupted = False
        """Whether an error has left some states updated and others not, or they are being updated now."""
        self._left: dict[int, Flat] = {}
        """Flats by id whose update has not been fully issued, in order."""
        self._issued: dict[int, StreamEvent] = {}
        """By flat's id: the end of the device's part, from when that is issued until the flat is closed."""
        self._at = LEAD
        self._start = StreamEvent(device)

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of slots and scratch, on the device and on the host."""
        for slot in self._slots:
            for buffer in slot.buffers.values():
                yield "buffers", "update slots", buffer
        yield from self.pieces.holdings()
        if self._cpu is not None:
            yield from self._cpu.holdings()

    def close(self) -> None:
        """End the thread that makes the CPU's part, once it has made what it was given."""
        if self._cpu is not None:
            self._cpu.close()

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
        for flat in all_flats:
            if not self._rule.together and all(entry.name in inactive for entry in flat.layout.entries):
                flat.gradient.close()
            else:
                flats.append(flat)
        self.chunks.begin(values, flats)
        self._updated = updated
        if self._rule.has_scalars:
            for group, history in self._pairs(flats):
                self._rule.advance(values.groups[group], values.at(history))
        # A rule that needs whole parameters gathers them now, at the same point on all ranks.
        together = [flat for flat in flats if self._rule.whole and self._needs_whole(flat, values)]
        for each in [together] if self._rule.together and together else [[flat] for flat in together]:
            self._update_whole(each, values)
        flats = [flat for flat in flats if flat not in together]
        in_place = Slot()
        for flat in flats:
            if not flat.offloaded:
                with self._events.update(flat.unit):
                    for chunk in self._chunks_of(flat):
                        self.chunks.update(chunk, in_place)
                self._close(flat, StreamEvent(self._device))
        queued = [chunk for flat in flats if flat.offloaded for chunk in self._chunks_of(flat)]
        self._queue = [chunk for chunk in queued if not chunk.on_cpu]
        self._left = {id(chunk.flat): chunk.flat for chunk in self._queue}
        for chunk in self._queue:
            chunk.flat.gradient.awaited = True
        self._at = 0
        # Side streams begin here: gradients, the norm and the step's values are complete at this point of the stream.
        self._start = StreamEvent(self._device)
        if self._cpu is not None:
            self._start_cpu(all_flats, [chunk for chunk in queued if chunk.on_cpu], values)
        # Resident parameters may be read without the engine, so their updates are all issued now unless that is
        # `deferred`; others are only started.
        resident = [flat for flat in flats if flat.offloaded and flat.resident is not None and not deferred]
        # What is closed here is the same on all ranks: a rank alone may have found that its CPU takes no part.
        if resident:
            self.issue_updates(resident[-1])
        elif self.on_cpu and self._queue:
            self.issue_updates(self._queue[0].flat)
        self.run_ahead(NUM_SLOTS)

    def _start_cpu(self, flats: list[Flat], chunks: list[Chunk], values: StepValues) -> None:
        """Start the CPU's part, once checkpoints have read what it changes."""
        assert self._cpu is not None
        with self._updating.run(after=self._start):
            for flat in {id(chunk.flat): chunk.flat for chunk in chunks}.values():
                self.chunks.before_update(flat)
            ready = SleepEvent(self._device)
        if chunks:
            self._cpu.start(flats, chunks, *self.chunks.numbers(), values.skip, ready)

    def _update_whole(self, flats: list[Flat], values: StepValues) -> None:
        """Update one flat; or all in one step of the user's optimizer, if the rule takes them together."""
        for flat in flats:
            self.chunks.before_update(flat)
        with self._events.update(flats[0].unit):
            assert isinstance(self._rule, WholeRule)
            update_whole(flats, self._rule, values, self._counts, self._inactive, self._collectives)
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
        chunks = self._chunks_of(flat)
        passes = flat.held == flat.own and chunks[0].passing & {"parameters", "master"}
        if self._device.type != "cuda" or not passes or sum(chunk.span.numel for chunk in chunks) < flat.own.numel:
            self.issue_updates(flat)
            return False
        with self._updating.run(after=self._start):
            free.wait()
        self.chunks.into = flat, own
        try:
            self.issue_updates(flat)
        finally:
            self.chunks.into = None
        return True

    def issue_updates(self, flat: Flat | None = None) -> None:
        """Issue all updates up to and including this flat's, or all that are left if None."""
        if not self._left or (flat is not None and not self.has_pending_update(flat)):
            return
        if self.interrupted:
            raise Refused(
                "an update has failed before its end, so some states are updated and others are not: close this "
                "engine, make another, and load the last checkpoint into it"
            )
        self.interrupted = True
        while self._left:  # close all flats up to and including this one, in order
            first = next(iter(self._left.values()))
            while id(first) not in self._issued:
                self._issue_next()
            self._finish(first)
            if first is flat:
                break
        self.interrupted = False

    def run_ahead(self, most: int = AT_ONCE) -> None:
        """Issue chunks that the device can begin now, so that the link does not wait until the host needs them.

        Parameters that are gathered from a tier are left: their update writes them to the gather's memory, which must
        be known. Nothing here waits for a tier or takes part in a collective.
        """
        if not (self.on_cpu or self.interrupted) and self._at < len(self._queue) + LEAD:
            self.interrupted = True
            self._run_ahead(most)
            self.interrupted = False

    def _run_ahead(self, most: int = AT_ONCE) -> None:
        for _ in range(most):
            if self._at == len(self._queue) + LEAD or not self._can_begin():
                return
            self._issue_next()

    def _can_begin(self) -> bool:
        """Whether the next chunk's slot is free, and no part of the one that is updated next holds up the host."""
        if self._at < len(self._queue):
            slot = self._slots[self._at % NUM_SLOTS]
            if not all(each.done for each in slot.leaving) or not (slot.used is None or slot.used.done):
                return False
        if self._at < LEAD:
            return True
        at = self._at - LEAD
        waits = any(each.holds_host for each in self._slots[at % NUM_SLOTS].arriving)
        return self._queue[at].flat.param_store is None and not waits

    def _issue_next(self) -> None:
        """Fetch the next chunk, and update the one that was fetched `LEAD` chunks before."""
        i = self._at
        self._at += 1
        if i < len(self._queue):
            with self._fetching.run(after=self._start):
                if self._cpu is not None and self._cpu.copied is not None:
                    self._cpu.copied.wait()
                self.chunks.fetch(self._queue[i], self._slots[i % NUM_SLOTS])
        if i < LEAD:
            return
        chunk = self._queue[i - LEAD]
        with self._updating.run(after=self._start):
            with self._events.update(chunk.flat.unit):
                self.chunks.update(chunk, self._slots[(i - LEAD) % NUM_SLOTS])
            if chunk.last:
                self._issued[id(chunk.flat)] = StreamEvent(self._device)

    def _finish(self, flat: Flat) -> None:
        """Wait for the CPU's part of a flat whose other chunks are issued, and close it."""
        copied = self._cpu.finish(flat, meanwhile=self._run_ahead) if self._cpu is not None else None
        written = self._issued.pop(id(flat))
        into = self.chunks.into[1] if self.chunks.into is not None and self.chunks.into[0] is flat else None
        there = [chunk.span for chunk in self._chunks_of(flat) if chunk.on_cpu] if into is not None else []
        if copied is not None or there:
            # On a stream of its own: chunks of later flats may have been issued on the others.
            with self._closing.run(after=written):
                if copied is not None:
                    copied.wait()
                for span in there:
                    assert into is not None and flat.param_store is not None
                    flat.param_store.fetch(span.start, into[span.start : span.stop]).wait()
                written = StreamEvent(self._device)
        del self._left[id(flat)]
        self._close(flat, written, elsewhere=True)
        if not self._left:
            self._queue, self._at = [], LEAD

    def has_pending_update(self, flat: Flat) -> bool:
        """Whether the flat's update has not been fully issued."""
        return id(flat) in self._left

    def _close(self, flat: Flat, written: StreamEvent, elsewhere: bool = False) -> None:
        """Free the gradient of a flat that is updated once this event is reached, and hand the flat on."""
        flat.gradient.awaited = False
        flat.gradient.close(elsewhere)
        flat.written = written
        self._updated(flat)

    def _chunks_of(self, flat: Flat) -> list[Chunk]:
        """Return the chunks that have something to update; one empty chunk if this rank has none."""
        if self._known_for != (self._counts.version, self._inactive):
            self._known, self._known_for = {}, (self._counts.version, self._inactive)
            self._turns = Turns(self._sizing)
        chunks = self._known.get(id(flat))
        if chunks is None or chunks[0].flat is not flat:  # another flat may have had the id before
            chunks = self._known[id(flat)] = self._make_chunks(flat)
        return chunks

    def _make_chunks(self, flat: Flat) -> list[Chunk]:
        passing = frozenset(slot_widths(flat.spec, self._sizing))
        counted = self._counts.segments(flat.layout, self._inactive)
        parts = [
            (span.intersect(region), group % REPLICATED, at)
            for group, region in flat.layout.segments(flat.held)
            for span, at in counted
        ]
        together = self.chunks.fuses(flat) and not flat.offloaded  # one launch for the whole flat
        size = self._sizing.chunk if flat.offloaded else self._sizing.update_chunk(flat.spec.width, self._device.type)
        spans = flat.spec.chunks(max(1, flat.held.numel) if together else size)
        chunks = [(span, within(parts, span.shifted(flat.held.start))) for span in spans]
        chunks = [chunk for chunk in chunks if chunk[1]] or [(Span(0, 0), ())]
        first = self._turns.take(flat.spec, len(chunks)) if chunks[0][1] else 0
        if first == len(chunks):
            chunks.append((Span(0, 0), ()))  # the device has nothing to do but to close the flat
        last = len(chunks) - 1
        return [Chunk(flat, span, parts, i == last, passing, i < first) for i, (span, parts) in enumerate(chunks)]
