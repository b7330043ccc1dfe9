"""Preemption: a run that is told to stop, or is close to its time limit, saves a checkpoint first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from zerocli.run.processes.job import SAVING_SIGNALS

MARGIN_SECONDS = 10.0
"""Margin between the expected end of the last save and the time limit."""


class Preemption:
    """Decides whether this rank wants to stop; ranks exchange this every step, so they agree on the step."""

    def __init__(self, time_limit: float, save_seconds: Callable[[], float]) -> None:
        self._began = time.monotonic() - process_seconds()
        self._limit, self._save_seconds = time_limit, save_seconds
        self._longest_step = 0.0
        self._last_asked: float | None = None
        self._signal: int | None = None

    def __enter__(self) -> Preemption:
        self._before = {number: signal.signal(number, self._note) for number in SAVING_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def wants_stop(self) -> bool:
        """Return whether to stop; called once per step."""
        now = time.monotonic()
        if self._last_asked is not None:
            self._longest_step = max(self._longest_step, now - self._last_asked)
        self._last_asked = now
        return self._signal is not None or self._is_near(now)

    def _is_near(self, now: float) -> bool:
        """Return whether two more steps and a save, each as slow as the slowest so far, could exceed the limit."""
        if not self._limit:
            return False
        needed = 2 * self._longest_step + 2 * self._save_seconds() + min(MARGIN_SECONDS, self._limit / 10)
        return now - self._began + needed > self._limit

    @property
    def reason(self) -> str:
        """Why this rank wants to stop, or that another rank does."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        return f"the time limit of {self._limit:g} s is near" if self._limit else "another rank was told to stop"


def process_seconds() -> float:
    """Return how long this process has been running; a job's time limit includes imports and loading."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0  # not Linux
