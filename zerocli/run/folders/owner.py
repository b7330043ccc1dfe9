"""The owner file of a run folder, for file systems without locks: it names the process that holds the folder.

It is created atomically, so only one of several processes succeeds. It is stale, and taken over, only if its process is
certainly gone: it ran on this machine, and has ended or the machine has rebooted since. A process on another machine
cannot be checked: the user is told to remove the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerocli.errors import UserError
from zerocli.regular_files import read_regular

OWNER = "lock.owner"
MOST_NBYTES = 4096
"""More bytes than any owner file has."""
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)
"""Errors with which a file system refuses to make hard links."""


@contextlib.contextmanager
def owned(run_dir: str | os.PathLike[str], patience: float = 0.0) -> Iterator[str]:
    """Hold the owner file, waiting up to `patience` seconds for it; yields who else holds it, or an empty text."""
    path, mine = Path(run_dir, OWNER), json.dumps(this_process()).encode()
    deadline = time.monotonic() + patience
    while not (taken := _take(path, mine)) and time.monotonic() < deadline:
        time.sleep(patience / 30)
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
