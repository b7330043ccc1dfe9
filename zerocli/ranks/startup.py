"""The stages of a run's startup and of its saves, in which a rank works by itself or waits for others; for a watchdog.

A process starts once, and its startup stages (opening the process group, building, loading) are spread over the code,
so there is one global record of them. That of a save is written by the saver's threads.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from zerocli.ranks.issued import Issued
from zerocli.ranks.loss import severed

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


class Startup(Progress):
    """The current startup stage of this rank; in a stage it works by itself or waits for the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: tuple[Any, ...] = ()
        """Each stage is reported to their `start`, as that of `Events`, from within it."""

    def report(self, stage: str) -> None:
        for listener in self._listeners:
            listener.start(stage)

    @contextlib.contextmanager
    def reporting_to(self, listeners: Iterable[Any]) -> Iterator[None]:
        """Report stages to these too, while the body runs."""
        before, self._listeners = self._listeners, (*self._listeners, *listeners)
        try:
            yield
        finally:
            self._listeners = before

    @contextlib.contextmanager
    def by_itself(self, stage: str) -> Iterator[None]:
        """Run a stage that waits for no other rank, except in an engine's collectives."""
        with super().by_itself(stage):
            try:
                self.report(stage)
                yield
            finally:
                self.restart_wait()

    @contextlib.contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """Run a stage in which this rank waits for the others; the loss of one of them is raised as Severed.

        A wait around this one goes on after it.
        """
        outer, self.alone = self.alone, ""
        around = [str(entry) for entry in self.open]
        self.together(stage)
        try:
            yield
        except RuntimeError as error:
            if (lost := severed(error, stage)) is not None:
                raise lost from error
            raise
        finally:
            self.arrived()
            self.alone = outer
            for each in around:
                self.together(each)

    def restart_wait(self) -> None:
        """Restart the clock of the wait for the others: this rank was busy itself until now."""
        for entry in self.open:
            entry.restart()


STARTUP = Startup()
"""The startup record of this process."""
