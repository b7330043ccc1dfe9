"""The host memory of this process, as the kernel counts it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path


def resident(key: str = "VmRSS") -> int:
    """Return a figure of /proc/self/status in bytes: VmRSS now, VmHWM the most since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {key}")


@contextlib.contextmanager
def peak() -> Iterator[list[int]]:
    """While the body runs, count from zero; afterwards the list has [the most, what is left], beyond the beginning."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, found = resident(), []
    yield found
    found += [resident("VmHWM") - before, resident() - before]
