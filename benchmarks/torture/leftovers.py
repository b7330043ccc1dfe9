"""What a case must not leave behind: processes, files, shared memory, descriptors, threads."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from pathlib import Path

PATIENCE_SECONDS = 15.0
"""For what is ending anyway, on a machine that may be busy."""
RUN_FILES = {"checkpoints", "config.json", "job", "lock", "logs", "metrics.jsonl", "profile.json"}
TORCH = "torchinductor_"
"""A folder that torch makes for each user when its compiler is imported."""
LOG = re.compile(r"rank\d+\.log")
CHECKPOINT = re.compile(r"step-\d{8}")
IN_CHECKPOINT = re.compile(r"manifest\.json|rank-\d{5}\.bin")


# -- processes ---------------------------------------------------------------------------------------------------------


def state(pid: int) -> tuple[str, int]:
    """Return a process' state and session; ("", 0) if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[3])
    except (OSError, IndexError):
        return "", 0


def runs(pid: int) -> bool:
    return state(pid)[0] not in ("", "Z", "X")


def environment(pid: int) -> dict[str, str]:
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def with_marker(name: str, value: str) -> list[int]:
    """Return the processes that a variable of their environment marks."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if runs(pid) and environment(pid).get(name) == value]


def processes(sessions: list[int] | None = None, marker: tuple[str, str] | None = None) -> list[str]:
    """Return the processes of these sessions, or with this mark, that do not end within some time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        if marker is not None:
            found = with_marker(*marker)
        else:
            found = [int(e) for e in os.listdir("/proc") if e.isdigit() and state(int(e))[1] in (sessions or [])]
            found = [pid for pid in found if runs(pid)]
        if not found or time.monotonic() > deadline:
            return [f"process {pid} ({_command(pid)})" for pid in found]
        time.sleep(0.05)


def ranks_of(notes: Path) -> list[int]:
    """Return the forked ranks of a case that run now."""
    pids = [int(path.read_text() or 0) for path in sorted(notes.glob("pid*"))]
    return [pid for pid in pids if runs(pid)]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "?"


def continue_stopped(pids: list[int], seconds: float) -> None:
    """Let processes that stopped themselves go on after some time."""
    stopped = [pid for pid in pids if state(pid)[0] == "T"]
    if stopped:
        time.sleep(seconds)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


# -- files -------------------------------------------------------------------------------------------------------------


def files(case: Path, world: int, keep: int, finished: bool) -> list[str]:
    """Return what lies in a case's folders and should not; a run that did not finish may leave a half-written save."""
    found = [f"swap file {path.name}" for path in (case / "nvme").iterdir()]
    found += [f"temporary file {path}" for path in (case / "tmp").iterdir() if not path.name.startswith(TORCH)]
    found += [
        f"{path.name} beside the run" for path in case.iterdir() if path.name not in ("run", "nvme", "tmp", "notes")
    ]
    run = case / "run"
    if not finished or not run.is_dir():
        return found
    found += [f"{path.name} in the run folder" for path in run.iterdir() if path.name not in RUN_FILES]
    found += [f"logs/{path.name}" for path in run.glob("logs/*") if not LOG.fullmatch(path.name)]
    saved = list((run / "checkpoints").iterdir())
    found += [f"checkpoints/{path.name}" for path in saved if not CHECKPOINT.fullmatch(path.name)]
    if len(saved) > keep:
        found.append(f"{len(saved)} checkpoints where {keep} are kept")
    for path in saved:
        inside = sorted(os.listdir(path)) if path.is_dir() else []
        if len(inside) != world + 1 or not all(IN_CHECKPOINT.fullmatch(name) for name in inside):
            found.append(f"checkpoints/{path.name} holds {inside}")
    return found


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    with contextlib.suppress(OSError):
        return set(os.listdir("/dev/shm"))
    return set()


# -- this process ------------------------------------------------------------------------------------------------------


def descriptors() -> dict[str, str]:
    """Return what this process has open."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: name for fd, name in found.items() if not name.startswith(f"/proc/{os.getpid()}/fd")}


def thread_names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())
