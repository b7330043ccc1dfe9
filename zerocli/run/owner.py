"""The owner file of a run folder, for file systems without locks: it says which process has the folder.

It is made whole and at once, so of several processes one makes it. It is stale, and taken over, only where its process
certainly is gone: it was on this machine, and has ended or the machine has been started anew since. Nobody here can say
so of another machine's process: the user is told to remove the file.
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
"""More than an owner file of ours has."""
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK)
"""How a file system says that it cannot make hard links."""


@contextlib.contextmanager
def owned(run_dir: str | os.PathLike[str], patience: float = 0.0) -> Iterator[str]:
    """Have the owner file to oneself, waiting `patience` seconds for it; yields who has it instead, or nothing."""
    path, mine = Path(run_dir, OWNER), json.dumps(this_process()).encode()
    deadline = time.monotonic() + patience
    while not (taken := _take(path, mine)) and time.monotonic() < deadline:
        time.sleep(patience / 30)
    try:
        yield "" if taken else describe(_read(path))
    finally:
        if taken and _read(path) == json.loads(mine):  # unless a user has removed it, and another run is there
            with contextlib.suppress(OSError):
                path.unlink()


def this_process() -> dict[str, Any]:
    """Return what tells this process from every other, of this machine and of others, now and later."""
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "namespace": _namespace(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
    }


def is_gone(owner: Any) -> bool:
    """Say whether the process that an owner file names certainly is no more."""
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
    except OSError:  # another user's; it is there
        return False
    started = _started(pid)
    return started != owner.get("started") and started != ""


def describe(owner: Any) -> str:
    """Return who has the folder, in words."""
    if isinstance(owner, dict) and isinstance(owner.get("pid"), int) and isinstance(owner.get("host"), str):
        return f"process {owner['pid']} on {owner['host'][:200]!r}".replace("'", "")
    return "another process"


def _take(path: Path, mine: bytes) -> bool:
    """Say whether the owner file is ours now; one whose process is gone is removed before."""
    if _make(path, mine):
        return True
    with _guard(path) as guarded:  # or two that find the same stale file would remove each other's
        if guarded and is_gone(_read(path)):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return _make(path, mine)
    return False


def _make(path: Path, mine: bytes) -> bool:
    """Make the owner file unless there is one; it is never there without its bytes, where links can be made."""
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
    """Return what the owner file says, None where it says nothing that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError, UserError):
        return json.loads(read_regular(path, MOST_NBYTES))
    return None


@contextlib.contextmanager
def _guard(path: Path) -> Iterator[bool]:
    """Say whether this process alone, on this machine, may remove the owner file; the kernel lets go at its end.

    Only processes of this machine ever remove it, so a name in the kernel's own space of sockets will do.
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
    """Return when a process began, in the kernel's ticks; "ended" for one that only its parent still knows."""
    with contextlib.suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "ended" if words[0] in "ZX" else words[19]
    return ""
