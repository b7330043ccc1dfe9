"""What a test leaves open: file handles and threads that were not there before it."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """Fail if handles or threads are there at the end that were not at the start; earlier tests' may go meanwhile."""
    gc.collect()
    handles, threads = _handles(), set(threading.enumerate())
    yield  # nothing is collected after it: what only the garbage collector would close counts as open
    assert not _handles() - handles and not set(threading.enumerate()) - threads


def _handles() -> set[tuple[str, str]]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one this listing was read by
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found
