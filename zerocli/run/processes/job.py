"""The processes of a run: start them, watch them, signal them, and find the cause when one fails.

Rank 0's stdout and stderr reach the terminal; every rank's stderr is also in RUN/logs/rank<k>.log. A rank that fails
writes its message and the time into an error file instead of the terminal. The earliest error is taken as the cause and
shown; the others are consequences and stay in the logs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from zerocli import machine
from zerocli.console import quoted, say
from zerocli.errors import DOES_NOT_FIT, FAILURE, INTERRUPTED, OK, PREEMPTED, USAGE, UserError
from zerocli.ranks.worker import STORE_FD
from zerocli.regular_files import open_regular, read_regular, remove
from zerocli.run.folders.folder import standing

POLL_SECONDS = 0.2
TAIL_LINES, TAIL_NBYTES = 60, 256 << 10
"""The most of a rank's log that is shown when it failed without a message."""
MAX_ERROR_NBYTES = 16 << 20
SAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals on which a run with checkpoints saves one."""
FAILED = signal.SIGUSR2
"""Sent before SIGTERM to the ranks of such a run when another has failed: one that starts has no handler and ends at
once; one that trains goes on until it has said what it lost."""


class Rank:
    """One worker process, its log, and how it ended."""

    def __init__(self, index: int, command: list[str], environ: dict[str, str], logs: Path, fds: tuple[int, ...] = ()):
        self.index = index
        self.code: int | None = None
        self.peak_nbytes = 0
        self.kept: dict[str, Any] | None = None
        self.log = logs / f"rank{index}.log"
        self.error_file = logs / f"rank{index}.error"
        remove(self.error_file)
        own = {"RANK": str(index), "LOCAL_RANK": str(index), "TORCHELASTIC_ERROR_FILE": str(self.error_file)}
        log = os.fdopen(open_regular(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)
        self.log_start = os.fstat(log.fileno()).st_size
        self.tee = Tee(log) if index == 0 else None
        self.process = subprocess.Popen(
            command,
            env=environ | own,
            stdin=subprocess.DEVNULL,
            stdout=log if index else None,
            stderr=self.tee.writer if self.tee else log,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C reaches only the parent; one signal ends a rank's children too
        )
        if self.tee:
            self.tee.start()
        else:
            log.close()

    def poll(self) -> bool:
        """Return whether the process has ended; record its exit code and peak host memory."""
        if self.code is None:
            pid, status, usage = os.wait4(self.process.pid, os.WNOHANG)
            if pid:
                self.code = self.process.returncode = os.waitstatus_to_exitcode(status)
                self.peak_nbytes = usage.ru_maxrss * (1024 if sys.platform == "linux" else 1)
        return self.code is not None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def record(self) -> dict[str, Any] | None:
        """Return the failure from this rank's error file, None if there is none."""
        if self.kept:
            return self.kept
        try:
            record: dict[str, Any] | None = json.loads(read_regular(self.error_file, MAX_ERROR_NBYTES))
        except (OSError, ValueError, UserError):
            return None
        return record

    def keep_record(self) -> None:
        """Move the error file's message into the log, where users look for it later."""
        if record := self.record():
            self.kept = record
            with contextlib.suppress(OSError, UserError):  # the run folder may be gone by now
                with os.fdopen(open_regular(self.log, os.O_WRONLY | os.O_APPEND), "ab") as log:
                    log.write(f"{record['message']}\n".encode())
                self.error_file.unlink(missing_ok=True)

    def tail(self) -> str:
        """Return the last lines that this rank wrote to its log in this run."""
        try:
            with os.fdopen(open_regular(self.log, os.O_RDONLY), "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_start, end - TAIL_NBYTES))
                lines = log.read(TAIL_NBYTES).decode(errors="replace").splitlines()
        except (OSError, UserError) as error:
            return f"{self.log} cannot be read ({error})"
        return "\n".join(lines[-TAIL_LINES:])


class Tee(threading.Thread):
    """Copies rank 0's stderr to ours and to its log; the rank sees a terminal if ours is one."""

    def __init__(self, log: IO[bytes]):
        super().__init__(daemon=True)
        self.log = log
        if os.isatty(2):
            self.reader, self.writer = pty.openpty()
            tty.setraw(self.writer)  # pass bytes unchanged; our own terminal processes them
            with contextlib.suppress(termios.error):
                termios.tcsetwinsize(self.writer, termios.tcgetwinsize(2))
        else:
            self.reader, self.writer = os.pipe()

    def start(self) -> None:
        os.close(self.writer)  # the rank's copy must be the last writer, or the reader sees no end
        super().start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # at the end a pty raises EIO, a pipe returns no bytes
            while chunk := os.read(self.reader, 65536):
                with contextlib.suppress(OSError):  # on a full disk, still write to the terminal
                    self.log.write(chunk)
                with contextlib.suppress(OSError):
                    os.write(2, chunk)
        self.log.close()
        os.close(self.reader)


class Job:
    """The ranks of one run on this machine, until the last one ends."""

    def __init__(
        self, command: list[str], num_ranks: int, run_dir: Path, saves: bool = False, environ: Mapping[str, str] = {}
    ):
        self.command, self.environ = command, environ
        self.saves = saves
        self.num_ranks = num_ranks
        self.run_dir = run_dir
        self.grace_seconds = float(os.environ.get("ZEROCLI_GRACE_SECONDS", "5"))
        self.ranks: list[Rank] = []
        self.failed: list[Rank] = []
        self.signals: list[int] = []

    def run(self) -> int:
        """Start all ranks, wait until they end, and return the run's exit code; no process outlives this call."""
        with self._catching_signals():
            try:
                self._start()
                self._watch()
            finally:
                self._end()
        return self._exit_code()

    def report(self) -> None:
        """Print how the run failed, if it did, starting with the message of the rank that caused it."""
        cause = self._cause()
        if self._was_interrupted():
            say("interrupted: all ranks have ended")
            if self.saves:
                fact, hint = standing(self.run_dir, {})
                say(f"{fact}\ntry: {hint}")
        elif cause:
            say(describe_failure(cause))
            if cause.code is not None and cause.code < 0 and cause.record() is None:
                fact, hint = standing(self.run_dir, {})
                say(f"{fact}\ntry: {hint}")
            if self._exit_code() == FAILURE:
                say(f"logs of all ranks: {quoted(self.run_dir / 'logs')}")

    def failure(self) -> str:
        """Return the message for the first failure, an empty text if there is none."""
        cause = self._cause()
        return describe_failure(cause) if cause else ""

    def _start(self) -> None:
        environ = {
            **os.environ,
            "WORLD_SIZE": str(self.num_ranks),
            "LOCAL_WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "ZEROCLI_RUN_DIR": str(self.run_dir),
            "ZEROCLI_PARENT": str(os.getpid()),
            **self.environ,
        }
        environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.cores() // self.num_ranks)))
        # On ARM torch's allocator gives freed pages back after 10 ms, and the next step faults them in again.
        environ.setdefault("MIMALLOC_PURGE_DELAY", "1000")
        environ.setdefault("PYTHONFAULTHANDLER", "1")
        # Rank 0 inherits the socket, so no other process can take the port; no other machine reaches it.
        with socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as store:
            environ |= {"MASTER_PORT": str(store.getsockname()[1]), STORE_FD: str(store.fileno())}
            # Ranks that save inherit the mask, until they have handlers of their own: see preempt.py.
            with blocked(SAVING_SIGNALS if self.saves else ()):
                for index in range(self.num_ranks):
                    fds = (store.fileno(),) if index == 0 else ()
                    self.ranks.append(Rank(index, self.command, environ, self.run_dir / "logs", fds))
                    environ.pop(STORE_FD, None)

    def _watch(self) -> None:
        """Return when all ranks have ended, one has failed, or a signal asks to stop."""
        deadline = math.inf
        while not self.signals:
            running = [rank for rank in self.ranks if not rank.poll()]
            self.failed = [
                rank for rank in self.ranks if rank.code not in (None, OK, PREEMPTED) or rank.error_file.exists()
            ]
            if self.failed or not running or time.monotonic() > deadline:
                return
            if deadline == math.inf and any(rank.code == PREEMPTED for rank in self.ranks):
                deadline = time.monotonic() + self.grace_seconds
            time.sleep(POLL_SECONDS)

    def _end(self) -> None:
        """End every running rank: SIGTERM, a grace period, SIGKILL; a second Ctrl-C ends the grace period."""
        running = [rank for rank in self.ranks if not rank.poll()]
        stop = self.signals[0] if self.saves and self.signals else signal.SIGTERM
        for rank in running:
            if self.saves and not self.signals:
                rank.signal(FAILED)
            rank.signal(stop)
        deadline = time.monotonic() + self.grace_seconds
        num_signals = len(self.signals) or 1
        if stop in SAVING_SIGNALS and self.saves and self.signals and running:
            say(f"{signal.Signals(stop).name}: saving, then ending; a second signal ends at once")
            deadline = math.inf
        while not all([rank.poll() for rank in running]):
            if time.monotonic() > deadline or len(self.signals) > num_signals:
                break
            time.sleep(POLL_SECONDS / 10)
        if self.saves and self.signals:  # ranks that failed while saving
            self.failed = [rank for rank in self.ranks if (rank.code or 0) > 0 and rank.code != PREEMPTED]
        for rank in self.ranks:
            rank.signal(signal.SIGKILL)  # the rank's own children too
        while not all([rank.poll() for rank in self.ranks]):
            time.sleep(POLL_SECONDS / 10)
        for rank in self.ranks:
            if rank.tee:
                rank.tee.join(timeout=2)
            rank.keep_record()

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        previous = {}
        caught = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *([signal.SIGUSR1] if self.saves else [])]
        for number in caught:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup: SIGHUP stays ignored
                previous[number] = signal.signal(number, lambda number, frame: self.signals.append(number))
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _cause(self) -> Rank | None:
        """Return the rank that failed first: one killed without a message, else that of the earliest error file."""
        if self._was_interrupted():
            return None
        suspects = [rank for rank in self.ranks if rank in self.failed or rank.record()]

        def order(rank: Rank) -> tuple[bool, float, int]:
            record = rank.record()
            died_silently = record is None and rank in self.failed and (rank.code or 0) < 0
            return (not died_silently, record["timestamp"] if record else math.inf, rank.index)

        return min(suspects, key=order, default=None)

    def _was_interrupted(self) -> bool:
        """Return whether a signal stopped the run, and no rank had failed by itself before."""
        ended_alike = all(rank.code in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP) for rank in self.failed)
        return bool(self.signals) and ended_alike and not any(rank.code == PREEMPTED for rank in self.ranks)

    def _exit_code(self) -> int:
        if self._was_interrupted():
            return INTERRUPTED
        if cause := self._cause():
            code = (cause.record() or {}).get("exit_code", cause.code)
            return code if code in (USAGE, DOES_NOT_FIT, INTERRUPTED) else FAILURE
        return PREEMPTED if any(rank.code == PREEMPTED for rank in self.ranks) else OK


@contextlib.contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals while the body runs; processes that it starts keep them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_failure(rank: Rank) -> str:
    """Return the message for a rank's failure: its own message if there is one, and what the kernel reports."""
    record = rank.record()
    if record:
        code = record.get("exit_code", rank.code)
        text: str = record["message"]
        blame = "" if code in (USAGE, DOES_NOT_FIT) else f"rank {rank.index} failed, exit code {code}:\n"
        return blame + text
    # Rank 0's output is on the terminal already.
    text = rank.tail() if rank.index else ""
    if rank.code in (USAGE, DOES_NOT_FIT):
        return text or f"rank {rank.index} ended with exit code {rank.code}"
    if rank.code == -signal.SIGKILL:
        fact = (
            f"error: rank {rank.index} was killed by the kernel (SIGKILL); "
            f"it had reached {_gib(rank.peak_nbytes)} of host memory\n"
            f"try: fewer --ranks, a smaller --batch or --offload optimizer=nvme: it is likely that host memory ran out "
            f"({_gib(machine.memory().allowed)} in all)"
        )
    elif rank.code is not None and rank.code < 0:
        fact = f"error: rank {rank.index} was ended by {signal.Signals(-rank.code).name}"
    else:
        fact = f"rank {rank.index} failed, exit code {rank.code}"
    return f"{fact}:\n{text}" if text and rank.code != -signal.SIGKILL else fact


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
