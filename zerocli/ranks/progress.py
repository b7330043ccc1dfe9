"""Progress of this rank's save; written by the saver's threads and read by a watchdog's."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from zerocli.ranks.issued import Issued

SHARED_STAGES = 2
"""Number of stages of a save in which ranks wait for each other: planning and commit."""


class Progress:
    """The stages of a save, some of which wait for other ranks; a watchdog treats it like one more axis of ranks."""

    def __init__(self) -> None:
        self.issued = 0
        """Number of shared stages that this rank has begun."""
        self.open: deque[Issued] = deque(maxlen=1)
        """The shared stage in which this rank is waiting for the others."""
        self.moved = time.monotonic()
        """When something was last read, written or begun."""
        self.alone = ""
        """The stage that this rank runs by itself; without progress it is stuck."""
        self._title, self._num_saves = "", 0

    def begin(self, step: int) -> None:
        """Begin a save; `issued` becomes equal on all ranks again, even if some did not finish the last save."""
        self._title = f"checkpoint of step {step}"
        self.issued = self._num_saves * SHARED_STAGES
        self._num_saves += 1
        self.move()

    def _name(self, stage: str) -> str:
        return f"{self._title}, {stage}" if self._title else stage

    def move(self) -> None:
        """Record progress."""
        self.moved = time.monotonic()

    @contextlib.contextmanager
    def by_itself(self, stage: str) -> Iterator[None]:
        """Run a stage that waits for no other rank, at most for the disk."""
        self.move()
        outer, self.alone = self.alone, self._name(stage)
        try:
            yield
        finally:
            self.move()
            self.alone = outer

    def together(self, stage: str) -> None:
        """Begin to wait for the other ranks to reach a stage."""
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
