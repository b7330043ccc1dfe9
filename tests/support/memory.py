"""The host memory of this process, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path


def resident(key: str = "VmRSS") -> int:
    """Return a figure of /proc/self/status in bytes: VmRSS now, VmHWM the most since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {key}")


def free_unused() -> None:
    """Collect garbage, and return freed memory to the operating system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """While the body runs, count from zero; afterwards the list has [the most, what is left], beyond the beginning.

    What threads have freed is not left: glibc keeps it for them, more or less as they were scheduled.
    """
    free_unused()
    Path("/proc/self/clear_refs").write_text("5")
    before, found = resident(), []
    yield found
    most = resident("VmHWM")
    free_unused()
    found += [most - before, resident() - before]
