"""Faults inside a rank: at the n-th event of a run, at the n-th line of this project's code, or at a call to a disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from torture import ROOT

if TYPE_CHECKING:
    from torture.processes import Place

PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("zerocli", "offload", "tiers"))


@dataclass(frozen=True)
class Fault:
    """What happens to a run, to which ranks, and when."""

    kind: str = "none"
    """Its row of the tally."""
    act: str = ""
    """kill, signal, stop, cut, delete; or of a disk: error, short, slow, stuck."""
    where: str = ""
    """event, line; run, nvme, dram; of the command: launcher, one rank, all ranks, everything, launcher's line."""
    ranks: tuple[int, ...] = ()
    at: int = 0
    """The number of the event, line, call or line of metrics at which it happens."""
    span: int = 1
    """For how many calls a disk fails; 0 is from then on."""
    only: str = ""
    """Count events or calls only whose name starts with this."""
    number: int = 0
    """A signal, or an error's number."""
    seconds: float = 0.0
    damages: bool = False
    """Whether the newest checkpoint is damaged before the resume."""
    on_resume: bool = False
    """Whether it happens to the resume, of a run that was killed before."""
    harmless: bool = False
    """Whether the run must go on to its end as if nothing were."""

    def __str__(self) -> str:
        names = ("act", "where", "ranks", "at", "span", "only", "number", "seconds")
        about = ", ".join(f"{name}={value!r}" for name in names if (value := getattr(self, name)))
        return f"{self.kind} ({about})"


class Lines:
    """Counts the lines of this project's code that the calling thread runs, and acts at the `at`-th."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.count, self._at, self._act = 0, at, act

    def start(self) -> None:
        sys.settrace(self._call)

    def stop(self) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(PACKAGES) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
            if self.count == self._at:
                sys.settrace(None)
                self._act()
        return self._line


class Striker:
    """A rank's side of a fault: `probe` hears of the run's events, `run` runs the rank."""

    def __init__(self, fault: Fault, rank: int, place: Place, count: bool) -> None:
        self.fault, self.rank, self._place = fault, rank, place
        self._here = rank in fault.ranks
        self._events = 0
        self._training = False
        counts_lines = count or (self._here and fault.where == "line")
        self._lines = Lines(fault.at if fault.where == "line" else 0, self.strike) if counts_lines else None

    def run(self, act: Callable[[], int]) -> int:
        if self._lines is None:
            return act()
        self._lines.start()
        try:
            return act()
        finally:
            self._lines.stop()
            (self._place.notes / f"lines{self.rank}").write_text(str(self._lines.count))

    def probe(self, name: str) -> None:
        if not self._training:
            self._training = True
            (self._place.notes / f"training{self.rank}").touch()
        fault = self.fault
        if self._here and fault.where == "event" and name.startswith(fault.only):
            self._events += 1
            if self._events == fault.at:
                self.strike()

    def note(self) -> None:
        """Leave word that the fault has happened."""
        (self._place.notes / f"struck{self.rank}").touch()

    def strike(self) -> None:
        self.note()
        if self.fault.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault.act == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault.act == "signal":
            os.kill(os.getpid(), self.fault.number)
        elif self.fault.act == "cut":
            cut_links(self.fault.only)
        elif self.fault.act == "delete":
            shutil.rmtree(self._place.run, ignore_errors=True)


def install(fault: Fault, rank: int, place: Place, count: bool = False) -> Striker:
    """Put a rank's part of a fault in place; its probe subscribes to the run's events."""
    striker = Striker(fault, rank, place, count)
    if rank in fault.ranks and fault.where in ("run", "nvme", "dram"):
        from torture import disks

        disks.install(fault, place, striker.note)
    return striker


def cut_links(which: str) -> None:
    """Shut this process' established TCP connections down: all, the store's alone (`store`) or all others (`gloo`)."""
    port = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            link = socket.socket(fileno=os.dup(fd))
            with link:
                if link.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                ends = {link.getsockname()[1], link.getpeername()[1]}  # one that listens has no peer: OSError
                if which == "" or (port in ends) == (which == "store"):
                    link.shutdown(socket.SHUT_RDWR)
