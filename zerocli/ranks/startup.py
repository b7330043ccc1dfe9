"""The stages of a run's startup, for a watchdog: opening the process group, building, loading.

A process starts once, and its startup stages are spread over the code, so there is one global record of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from zerocli.ranks.loss import severed
from zerocli.ranks.progress import Progress


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
