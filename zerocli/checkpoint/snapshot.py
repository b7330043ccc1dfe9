"""The snapshot: a step's states, read out through a bounded buffer while the next step trains.

[Note: copy before update] Only the optimizer's update changes masters and optimizer states, and it changes a unit's at
a time. So a snapshot copies nothing beforehand. A thread reads the states in the order of the next update into slots
of a fixed buffer, from which they are written to disk; before an update touches a unit, `hold_update` makes it wait
until that unit has been read. With a buffer as large as what is written, reading runs at the speed of memory and the
update finds everything read; with a smaller one the rest of the wait is the disk's. Small states that change at other
times (buffers of the model, random states, counters) are copied when the snapshot is taken.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from tiers.base import PAGE_NBYTES, round_up
from tiers.pages import Pages, Registrar
from zerocli.checkpoint.boxes import PIECE_NUMEL
from zerocli.checkpoint.parts import Part
from zerocli.checkpoint.sources import Wait
from zerocli.lanes import Lane, Mark

ALIGN = 64
"""Pieces start at multiples of this many bytes within a slot."""
SLOT_NBYTES = round_up(8 * PIECE_NUMEL, PAGE_NBYTES)
"""Bytes of a slot: a piece of any dtype fits."""


@dataclass
class Slot:
    """Host memory that pieces are read into and written to disk from, at once."""

    pages: Pages
    used: int = 0
    waits: list[Wait] = field(default_factory=list)
    """Reads that may still be filling it."""

    def take(self, nbytes: int) -> torch.Tensor:
        """Return room for a piece."""
        start = round_up(self.used, ALIGN)
        self.used = start + nbytes
        return self.pages.bytes[start : self.used]

    def settle(self) -> None:
        """Stop the host until everything asked for has come, or failed; raise the first failure then."""
        failures: list[Exception] = []
        for wait in self.waits:
            try:
                wait()
            except Exception as error:
                failures.append(error)  # the others still arrive in this memory
        self.waits.clear()
        if failures:
            raise failures[0]


class Slots:
    """At most `nbytes` of slots (and never fewer than two), made when first needed and then reused."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._left = max(2, nbytes // SLOT_NBYTES)
        self._pin = device.type == "cuda"
        self._registrar = Registrar()
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._made: list[Slot] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the slots made so far."""
        return sum(slot.pages.nbytes for slot in self._made)

    def take(self) -> Slot:
        """Return an empty slot; wait for one where all are in use."""
        try:
            slot = self._free.get_nowait()
        except queue.Empty:
            if self._left:
                self._left -= 1
                slot = Slot(Pages(SLOT_NBYTES))
                if self._pin:
                    slot.pages.pin(self._registrar)  # refused: copies are slower, nothing else
                self._made.append(slot)
            else:
                slot = self._free.get()
        slot.used = 0
        slot.waits.clear()
        return slot

    def give(self, slot: Slot) -> None:
        self._free.put(slot)

    def close(self) -> None:
        for slot in self._made:
            slot.pages.release(self._registrar)
        self._made = []


class Snapshot:
    """The parts of one step and how much of each unit's is still to be read; see [Note: copy before update]."""

    def __init__(self, parts: Iterable[Part], device: torch.device) -> None:
        self.parts = {part.name: part for part in parts}
        self._lane = Lane(device)
        self._start = Mark(device)
        self._changed = threading.Condition()
        self._left: Counter[int] = Counter()
        self._waits: dict[int, list[Wait]] = {}
        self._marks: dict[int, Mark] = {}
        self._device = device
        for part in self.parts.values():
            if part.owner is not None:
                self._left[id(part.owner)] += len(part.boxes)

    def expect(self, names: Iterable[str]) -> None:
        """Take the boxes that this rank is really to read, by part: a replica's may have gone to another rank."""
        with self._changed:
            self._left = Counter()
            for name in names:
                if (owner := self.parts[name].owner) is not None:
                    self._left[id(owner)] += 1
            self._changed.notify_all()

    def read(self, part: Part, start: int, target: torch.Tensor) -> Wait:
        """Start reading a box of a part; afterwards it counts as read."""
        with self._lane.run(after=self._start):
            wait = part.source.read(start, target)
            mark = Mark(self._device)
        owner = part.owner
        if owner is not None:
            with self._changed:
                # Another tier's transfer has to be waited for; a copy of the device's is ordered by its mark.
                self._waits.setdefault(id(owner), []).append(wait)
                self._marks[id(owner)] = mark
                self._left[id(owner)] -= 1
                if not self._left[id(owner)]:
                    self._changed.notify_all()
        return wait

    def hold_update(self, owner: object) -> None:
        """Let the caller's current stream change a flat's states only after they have been read."""
        if id(owner) not in self._left:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._left.get(id(owner), 0) <= 0)
            self._left.pop(id(owner), None)
            waits, mark = self._waits.pop(id(owner), []), self._marks.pop(id(owner), None)
        on_device = getattr(owner, "record", None) is None and getattr(owner, "param_store", None) is None
        if on_device and mark is not None and self._device.type == "cuda":
            mark.wait()
            return
        for wait in waits:
            wait()

    def let_go(self) -> None:
        """Hold no update any longer: the writer is through, or has failed."""
        with self._changed:
            self._left.clear()
            self._changed.notify_all()
