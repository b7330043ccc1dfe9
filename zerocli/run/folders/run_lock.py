"""Lock a run folder for one run at a time: a second would remove the first one's unfinished checkpoint as stale."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from zerocli.console import quoted
from zerocli.errors import UserError
from zerocli.regular_files import open_regular
from zerocli.run.folders.owner import OWNER, owned

LOCK = "lock"
"""In the run folder; the kernel releases the lock when its process ends, however it ends."""
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
            other, lock = stack.enter_context(owned(run_dir, PATIENCE_SECONDS)), Path(run_dir, OWNER)
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
