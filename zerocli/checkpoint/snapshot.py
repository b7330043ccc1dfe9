"""The snapshot: a step's states, copied through a bounded buffer while the next step trains.

[Note: copy before update] Only the optimizer's update changes masters and optimizer states, one unit at a time. So a
snapshot copies nothing in advance. The states are read, in the order of the next update, into slots of a fixed buffer,
and written to disk from there; before an update changes a unit, `hold_update` makes it wait until that unit has been
read. The writer's thread issues copies from a GPU first, as many as the buffer has room for, and in few long ones: they
overlap with compute, but every call of that thread takes the GIL from training. With a buffer as large as the
checkpoint, updates do not wait for the disk; with a smaller one they may. Small states that change at other times
(buffers of the model, random states, counters) are copied when the snapshot is taken.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from tiers.base import round_up
from tiers.pages import Pages, Registrar
from zerocli.checkpoint.boxes import Box
from zerocli.checkpoint.sources import Part, Wait
from zerocli.engine.streams import SideStream, StreamEvent
from zerocli.layout.constants import save_slot

ALIGN = 64
"""Pieces start at multiples of this many bytes within a slot."""
NUM_UNDER_WAY = 8
"""Maximum slots with copies in flight: with a full queue the driver would block every thread's launches."""


@dataclass
class Slot:
    """Host memory into which a batch is read, and from which it is written to disk."""

    bytes: torch.Tensor
    waits: list[Wait] = field(default_factory=list)
    """Reads that may still be filling it."""

    def wait(self) -> None:
        """Wait on the host for all reads; then raise the first failure."""
        failures: list[Exception] = []
        for wait in self.waits:
            try:
                wait()
            except Exception as error:
                failures.append(error)  # the other reads still write to this memory
        self.waits.clear()
        if failures:
            raise failures[0]


class Slots:
    """At most `nbytes` of slots (but at least two), allocated on first use and then reused.

    They also own the stream of the copies: torch has few streams, and each save would use another.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.side = SideStream(device)
        self.slot_nbytes = save_slot(nbytes)
        self._left = max(2, nbytes // self.slot_nbytes)
        self._pin = device.type == "cuda"
        self._registrar = Registrar()
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._made: list[Pages] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the slots allocated so far."""
        return sum(pages.nbytes for pages in self._made)

    def prepare(self, nbytes: int) -> None:
        """Allocate the slots for `nbytes` now, up to the limit: pinning memory is slow."""
        self._make(min(self._left, -(-nbytes // self.slot_nbytes)))

    def _make(self, count: int) -> None:
        if count:
            self._left -= count
            pages = Pages(count * self.slot_nbytes)
            if self._pin:
                pages.pin(self._registrar)  # if that is refused, copies are only slower
            self._made.append(pages)
            for part in pages.bytes.split(self.slot_nbytes):
                self._free.put(Slot(part))

    def take(self) -> Slot:
        """Return a slot; wait for one if all are in use."""
        return self.try_take() or self._free.get()

    def try_take(self) -> Slot | None:
        """Return a slot, None if all are in use."""
        if self._free.empty():
            self._make(min(self._left, 1))
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return None

    def give(self, slot: Slot) -> None:
        self._free.put(slot)

    def close(self) -> None:
        self._free = queue.SimpleQueue()
        for pages in self._made:
            pages.release()
        self._made = []


@dataclass(eq=False)
class Batch:
    """Boxes that share one slot: each with its part, and the offset of its bytes in the slot."""

    boxes: list[tuple[Part, Box, int]] = field(default_factory=list)
    nbytes: int = 0
    slot: Slot | None = None
    """Its slot, from the read until it is written."""

    def owners(self) -> set[int]:
        return {id(part.owner) for part, _, _ in self.boxes if part.owner is not None}

    def runs(self) -> Iterator[tuple[Part, int, int, int]]:
        """Yield (part, first element, begin, end in the slot) of boxes contiguous in array and slot."""
        run: tuple[Part, int, int, int] | None = None
        for part, box, at in self.boxes:
            end = at + box.numel * part.dtype.itemsize
            if run is not None:
                first, start, begin, _ = run
                if part.source is first.source and (box.start - start) * part.dtype.itemsize == at - begin:
                    run = (first, start, begin, end)
                    continue
                yield run
            run = (part, box.start, at, end)
        if run is not None:
            yield run


def batches_of(parts: Iterable[Part], slot_nbytes: int) -> Iterator[Batch]:
    """Yield the parts' boxes in their order, packed into slots."""
    batch = Batch()
    for part in parts:
        for box in part.boxes:
            at, nbytes = round_up(batch.nbytes, ALIGN), box.numel * part.dtype.itemsize
            if batch.boxes and at + nbytes > slot_nbytes:
                yield batch
                batch, at = Batch(), 0
            batch.boxes.append((part, box, at))
            batch.nbytes = at + nbytes
    if batch.boxes:
        yield batch


class Snapshot:
    """The parts of one step, and how much of each unit is not read yet; see [Note: copy before update]."""

    def __init__(self, parts: Iterable[Part], device: torch.device, slots: Slots) -> None:
        self.parts = {part.name: part for part in parts}
        self.batches = list(batches_of(self.parts.values(), slots.slot_nbytes))
        self._slots = slots
        self._start = StreamEvent(device)
        self._changed = threading.Condition()
        self._left: Counter[int] = Counter(owner for batch in self.batches for owner in batch.owners())
        self._waits: dict[int, list[Wait]] = {}
        self._marks: dict[int, StreamEvent] = {}
        self._device = device
        self.held_seconds = 0.0
        """Seconds that updates have waited for reads."""

    @property
    def wanted_nbytes(self) -> int:
        """Bytes of buffer with which no update would wait for the disk."""
        return len(self.batches) * self._slots.slot_nbytes

    def start(self) -> None:
        """Issue the copies from the GPU for which there is a slot, a few ahead of those that are done."""
        under_way: deque[Slot] = deque()
        for batch in self.batches:
            slot = self._slots.try_take() if all(part.source.on_gpu for part, _, _ in batch.boxes) else None
            if slot is None:
                return
            self._read(batch, slot)
            under_way.append(slot)
            if len(under_way) > NUM_UNDER_WAY:
                under_way.popleft().wait()

    def fill(self, batch: Batch) -> Slot:
        """Return the slot that a batch is read into; wait for one if all are in use."""
        if batch.slot is None:
            self._read(batch, self._slots.take())
        assert batch.slot is not None
        return batch.slot

    def _read(self, batch: Batch, slot: Slot) -> None:
        batch.slot = slot
        with self._slots.side.run(after=self._start):
            # One by one: if a read fails, the earlier ones are still tracked.
            for part, start, begin, end in batch.runs():
                slot.waits.append(part.source.read(start, slot.bytes[begin:end].view(part.dtype)))
            mark = StreamEvent(self._device)
        with self._changed:
            for owner in batch.owners():
                # A transfer from another tier must be waited for; a copy from the device is ordered by its event.
                self._waits.setdefault(owner, []).extend(slot.waits)
                self._marks[owner] = mark
                self._left[owner] -= 1
            self._changed.notify_all()

    def written(self, batch: Batch) -> None:
        """Free the batch's slot."""
        slot, batch.slot = batch.slot, None
        if slot is not None:
            self._slots.give(slot)

    def hold_update(self, owner: object) -> None:
        """Let the caller's current stream change a flat's states only after they have been read."""
        if id(owner) not in self._left:
            return
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._left.get(id(owner), 0) <= 0)
            self.held_seconds += time.monotonic() - began
            self._left.pop(id(owner), None)
            waits, mark = self._waits.pop(id(owner), []), self._marks.pop(id(owner), None)
        on_device = getattr(owner, "record", None) is None and getattr(owner, "param_store", None) is None
        if on_device and mark is not None and self._device.type == "cuda":
            mark.wait()
            return
        for wait in waits:
            with contextlib.suppress(Exception):  # a failure of the save, not of the update: the writer reports it
                wait()

    def stop_holding(self) -> None:
        """Stop holding updates: the writer has finished or failed."""
        with self._changed:
            self._left.clear()
            self._changed.notify_all()
        for batch in self.batches:
            if batch.slot is not None:
                with contextlib.suppress(Exception):  # a failed read was reported where its data were needed
                    batch.slot.wait()
                self.written(batch)
