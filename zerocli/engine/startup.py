"""The start of a run, stage by stage, for a watchdog: opening the process group, building, loading.

A process starts once, and what goes on in its start lies far apart in the code: so there is one record of it, as there
is one list of the transfers that are waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zerocli.engine.comm import severed
from zerocli.engine.events import Subscribers
from zerocli.engine.progress import Progress


class Startup(Progress):
    """What this rank's start is doing; a stage is gone through alone, or waiting for the other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.events = Subscribers()
        """Who hears of each stage, within it."""

    def _name(self, stage: str) -> str:
        return stage

    @contextlib.contextmanager
    def by_itself(self, stage: str) -> Iterator[None]:
        """Go through a stage that waits for no other rank, other than in an engine's collectives."""
        with super().by_itself(stage):
            try:
                self.events.start(stage)
                yield
            finally:
                self.restart_wait()

    @contextlib.contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """Go through a stage in which this rank waits for the others; the loss of one of them is raised as Severed."""
        outer, self.alone = self.alone, ""
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

    def restart_wait(self) -> None:
        """Count the wait for the others from now on: this rank was busy itself until now."""
        for entry in self.open:
            entry.restart()


STARTUP = Startup()
"""This process' own."""
