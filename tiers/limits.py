"""How much host memory this process may still take, and how much of it may be locked, as the system reports."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiers.errors import format_nbytes

# A v1 cgroup without a limit reports 2^63 - 1 rounded down to a page, so values of that size mean no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class HostLimits:
    """The limits of this machine; None means no limit, or unknown."""

    available: int
    """Bytes that this process may still take: the minimum over the system and every cgroup."""
    cgroup_limit: int | None
    """The limit of the cgroup with the least room, in bytes."""
    memlock: int | None
    """RLIMIT_MEMLOCK in bytes (soft)."""

    def describe(self) -> str:
        """Return what was found: `94.2 GiB free (cgroup limit 120 GiB), memlock unlimited`."""
        cgroup = "no cgroup limit" if self.cgroup_limit is None else f"cgroup limit {format_nbytes(self.cgroup_limit)}"
        memlock = "unlimited" if self.memlock is None else format_nbytes(self.memlock)
        return f"{format_nbytes(self.available)} free ({cgroup}), memlock {memlock}"


def read_limits(root: Path = Path("/")) -> HostLimits:
    """Return the limits of this process; those of memory as /proc and /sys below `root` give them."""
    available = _mem_available(_text(root / "proc/meminfo"))
    cgroup_limit = None
    for limit, free in _cgroup_room(root):
        if free < available:
            available, cgroup_limit = free, limit
        elif cgroup_limit is None:
            cgroup_limit = limit
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostLimits(max(available, 0), cgroup_limit, None if memlock == resource.RLIM_INFINITY else memlock)


def _mem_available(meminfo: str) -> int:
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    for key in ("MemAvailable", "MemFree"):
        if key in fields:
            return int(fields[key].split()[0]) * 1024
    return _NO_LIMIT


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield this process's cgroup folders for a controller, v2 and v1, innermost first.

    Limits of parents apply too. Inside a container the path may exist only on the host; the top folder always exists.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        elif hierarchy == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        else:
            continue
        folder = top / path.strip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def _cgroup_room(root: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes left below it) for every limited memory cgroup around this process."""
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    rooms = [_room(folder, *each) for folder in cgroup_folders("memory", root) for each in names]
    return [room for room in rooms if room is not None]


def _room(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> tuple[int, int] | None:
    limit_text, usage_text = _text(folder / limit_name).strip(), _text(folder / usage_name).strip()
    if not limit_text.isdigit() or int(limit_text) >= _NO_LIMIT:  # absent, or `max`
        return None
    # The kernel drops inactive page cache before it kills a process, so it does not count as usage.
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    usage = int(usage_text or 0) - int(stat.get(cache_name, 0))
    return int(limit_text), int(limit_text) - max(usage, 0)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
