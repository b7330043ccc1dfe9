"""Lock a run folder for one run at a time: a second would remove the first one's unfinished checkpoint as stale.

[Note: owner] Where a file system has no locks, an owner file names the process that holds the folder. It is created
atomically, so only one of several processes succeeds. It is stale, and taken over, only if its process is certainly
gone: it ran on this machine, and has ended or the machine has rebooted since. A process on another machine cannot be
checked: the user is told to remove the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerocli.console import quoted
from zerocli.errors import UserError
from zerocli.regular_files import open_regular, read_regular

LOCK, OWNER = "lock", "lock.owner"
"""In the run folder; the kernel releases the lock when its process ends, however it ends, but not the owner file."""
MOST_NBYTES = 4096
"""More bytes than any owner file has."""
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)
"""Errors with which a file system refuses to make hard links."""
PATIENCE_SECONDS = 3.0
"""How long to wait for a run that is just ending to release the lock."""


@contextlib.contextmanager
def lock_run_folder(run_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the run folder exclusively; raise UserError that names the holder if another run has it."""
    fd = open_regular(Path(run_dir, LOCK), os.O_RDWR | os.O_CREAT)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        locked, other, lock = _locked(fd), "", Path(run_dir, LOCK)
        if locked is None:
            other, lock = stack.enter_context(owned(run_dir)), Path(run_dir, OWNER)
        if locked or (locked is None and not other):
            with contextlib.suppress(OSError):  # failing to record who we are must not fail the run
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        else:
            who = other or os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{run_dir}: a run is under way there ({who})",
                hint="another --run-dir; or end that run first, by SIGTERM if it is to be saved; "
                f"if its machine is gone, rm {quoted(lock)}",
            )
        yield


def _locked(fd: int) -> bool | None:
    """Return whether the lock is ours; None if the file system has no locks (ENOLCK, ENOSYS, EOPNOTSUPP)."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return None
        if time.monotonic() > deadline:
            return False
        time.sleep(PATIENCE_SECONDS / 30)


# -- the owner file: see [Note: owner] ---------------------------------------------------------------------------------


@contextlib.contextmanager
def owned(run_dir: str | os.PathLike[str]) -> Iterator[str]:
    """Hold the owner file, waiting for it as for the lock; yields who else holds it, or an empty text."""
    path, mine = Path(run_dir, OWNER), json.dumps(this_process()).encode()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (taken := _take(path, mine)) and time.monotonic() < deadline:
        time.sleep(PATIENCE_SECONDS / 30)
    try:
        yield "" if taken else describe(_read(path))
    finally:
        if taken and _read(path) == json.loads(mine):  # a user may have removed it, and another run made its own
            with contextlib.suppress(OSError):
                path.unlink()


def this_process() -> dict[str, Any]:
    """Return what identifies this process uniquely across machines and reboots."""
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "namespace": _namespace(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def is_gone(owner: Any) -> bool:
    """Return whether the process that an owner file names is certainly gone."""
    if not isinstance(owner, dict) or owner.get("host") != socket.gethostname():
        return False
    if owner.get("boot") != _boot():
        return bool(_boot()) and isinstance(owner.get("boot"), str)
    pid = owner.get("pid")
    if owner.get("namespace") != _namespace() or not isinstance(pid, int) or isinstance(pid, bool) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # another user's process: it exists
        return False
    started = _started(pid)
    return started != owner.get("started") and started != ""


def describe(owner: Any) -> str:
    """Return who holds the folder, in words."""
    if isinstance(owner, dict) and isinstance(owner.get("pid"), int) and isinstance(owner.get("host"), str):
        return f"process {owner['pid']} on {owner['host'][:200]!r}".replace("'", "")
    return "another process"


def _take(path: Path, mine: bytes) -> bool:
    """Return whether the owner file is ours now; a stale file is removed first."""
    if _make(path, mine):
        return True
    with _guard(path) as guarded:  # two processes that find the same stale file must not remove each other's
        if guarded and is_gone(_read(path)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return _make(path, mine)
    return False


def _make(path: Path, mine: bytes) -> bool:
    """Make the owner file unless there is one; where hard links work, it never exists without its contents."""
    aside = path.with_name(f"{OWNER}.{os.getpid()}.{secrets.token_hex(4)}")
    _write_new(aside, mine)
    try:
        os.link(aside, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
    finally:
        aside.unlink()
    try:
        _write_new(path, mine)
        return True
    except FileExistsError:
        return False


def _write_new(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path) -> Any:
    """Return the contents of the owner file, None if they cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError, UserError):
        return json.loads(read_regular(path, MOST_NBYTES))
    return None


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[bool]:
    """Yield whether this process holds the right to remove the owner file; the kernel releases it if the process ends.

    Only processes of this machine ever remove the file, so an abstract socket name is a sufficient lock.
    """
    about = os.stat(path.parent)
    name = hashlib.sha256(f"{about.st_dev}:{about.st_ino}:{_namespace()}".encode()).hexdigest()
    with socket.socket(socket.AF_UNIX) as guard:
        try:
            guard.bind(f"\0zerocli-owner-{name}")
        except OSError:
            yield False
        else:
            yield True


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _started(pid: int) -> str:
    """Return when a process began, in the kernel's ticks; "ended" for a zombie."""
    with contextlib.suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if words[0] in "ZX" else words[19]
    return ""
