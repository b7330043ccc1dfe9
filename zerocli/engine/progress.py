"""Progress: how far this rank's save has come; the saver's threads write it, a watchdog's reads it."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from zerocli.engine.comm import Issued

SHARED_STAGES = 2
"""Stages of a save that all ranks go through together: planning and commit."""


class Progress:
    """A save is a chain of stages, some of which the ranks go through together; to a watchdog it is one more axis."""

    def __init__(self) -> None:
        self.issued = 0
        """Stages that all ranks go through together, begun by this one."""
        self.open: deque[Issued] = deque(maxlen=1)
        """The one in which this rank waits for the others."""
        self.moved = time.monotonic()
        """When something was last read, written or begun."""
        self.alone = ""
        """What this rank does by itself: it is stuck if nothing moves."""
        self._title, self._num_saves = "", 0

    def begin(self, step: int) -> None:
        """Begin a save; ranks that did not come through all stages of the last one count alike again."""
        self._title = f"checkpoint of step {step}"
        self.issued = self._num_saves * SHARED_STAGES
        self._num_saves += 1
        self.move()

    def _name(self, stage: str) -> str:
        return f"{self._title}, {stage}"

    def move(self) -> None:
        """Note that something came through."""
        self.moved = time.monotonic()

    @contextlib.contextmanager
    def by_itself(self, stage: str) -> Iterator[None]:
        """Go through a stage that waits for no other rank, for the disk at most."""
        self.move()
        outer, self.alone = self.alone, self._name(stage)
        try:
            yield
        finally:
            self.move()
            self.alone = outer

    def together(self, stage: str) -> None:
        """Begin to wait for the other ranks to come to a stage."""
        self.arrived()
        self.issued += 1
        self.open.append(Issued(self.issued, "", self._name(stage)))
        self.move()

    def arrived(self) -> None:
        """End the wait for the others."""
        for entry in self.open:
            entry.end()
        self.open.clear()
        self.move()
