"""Preemption: a run that is told to stop, or is close to its time limit, saves a checkpoint first.

Before all ranks have come there is nothing to save, and who was told may be all that there is: a rank that is told then
ends at once. From then on all ranks go on to the step after which they stop together.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from zerocli.errors import PREEMPTED
from zerocli.ranks.words import stopped
from zerocli.run.processes.job import FAILED, SAVING_SIGNALS

MARGIN_SECONDS = 10.0
"""Margin between the expected end of the last save and the time limit."""


_noted: list[int] = []
"""The saving signals that this process has received."""
_ends_at_once = False
"""Whether they end it: nobody waits for it yet."""


def _note(number: int, frame: FrameType | None) -> None:
    _noted.append(number)
    if _ends_at_once:
        if os.environ.get("LOCAL_RANK") == "0":
            os.write(2, f"{stopped(int(os.environ['RANK']), signal.Signals(number).name)}\n".encode())
        os._exit(PREEMPTED)  # an exception could be raised anywhere, even in torch's callbacks


def told() -> str:
    """Return the name of the last saving signal that was noted, if one was; from now on they do not end the process."""
    global _ends_at_once
    _ends_at_once = False
    return signal.Signals(_noted[-1]).name if _noted else ""


def was_told() -> bool:
    """Return whether a saving signal was noted."""
    return bool(_noted)


def note_signals(saves: bool) -> dict[int, Any]:
    """From now on note SAVING_SIGNALS, if the run `saves`; return the handlers that were replaced.

    A rank does so as soon as it knows its config. One of several ends with PREEMPTED until it is about to meet the
    others; a signal later in its start is obeyed after the first step. Our launcher starts ranks with these signals
    blocked; until now none could be lost.
    """
    global _ends_at_once
    replaced: dict[int, Any] = {}
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is not _note:
        _noted.clear()
        _ends_at_once = saves and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    if saves and main and signal.getsignal(signal.SIGTERM) is not _note:
        replaced = {number: signal.signal(number, _note) for number in SAVING_SIGNALS}
        replaced[FAILED] = signal.getsignal(FAILED)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SAVING_SIGNALS)
    return replaced


def outlive_failures() -> None:
    """From now on let this rank go on when another has failed, until it has said what it lost."""
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(FAILED, signal.SIG_IGN)


def ignore_signals() -> None:
    """From now on ignore signals that were noted: the run is over, and Python's end would restore the default actions.

    srun may send SIGTERM to the last tasks of a run that ends with another code than 0.
    """
    for number in SAVING_SIGNALS:
        if signal.getsignal(number) is _note:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def noting_signals(saves: bool) -> Iterator[None]:
    """Note the signals while the body runs."""
    replaced = note_signals(saves)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


class Preemption:
    """Decides whether this rank wants to stop; ranks exchange this every step, so they agree on the step."""

    def __init__(self, time_limit: float, save_seconds: Callable[[], float]) -> None:
        self._began = time.monotonic() - process_seconds()
        self._limit, self._save_seconds = time_limit, save_seconds
        self._longest_step = 0.0
        self._last_asked: float | None = None

    def wants_stop(self) -> bool:
        """Return whether to stop; called once per step.

        Two more steps and a save, each as slow as the slowest so far, must not exceed the time limit.
        """
        now = time.monotonic()
        if self._last_asked is not None:
            self._longest_step = max(self._longest_step, now - self._last_asked)
        self._last_asked = now
        needed = 2 * self._longest_step + 2 * self._save_seconds() + min(MARGIN_SECONDS, self._limit / 10)
        return bool(_noted) or (self._limit > 0 and now - self._began + needed > self._limit)

    @property
    def reason(self) -> str:
        """Why this rank wants to stop, or that another rank does."""
        if name := told():
            return name
        return f"the time limit of {self._limit:g} s is near" if self._limit else "another rank was told to stop"


def process_seconds() -> float:
    """Return how long this process has been running; a job's time limit includes imports and loading."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0  # not Linux
