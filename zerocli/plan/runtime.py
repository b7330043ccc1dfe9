"""Memory of a process beyond the model: measured constants in bytes; `--set runtime.NAME` overrides each."""

from __future__ import annotations

from collections.abc import Mapping

MIB = 2**20

RUNTIME: Mapping[str, int] = {
    "context": 832 * MIB,
    "nccl": 400 * MIB,
    "workspace": 67 * MIB,
    "fragments": 0,
    "python": 1664 * MIB,
}
"""On a GPU: CUDA context and loaded kernels, NCCL's buffers, cuBLAS's workspaces (one for each thread that computes),
and fragmentation (0: as `fragments` computes it). On the host: Python with torch."""

SENTENCES = {
    "context": "CUDA context and kernels, per process",
    "nccl": "NCCL's own buffers",
    "workspace": "cuBLAS workspaces of the two threads that compute",
    "fragments": "fragmentation: 1 % of what torch allocates, and the last pages of its segments",
    "python": "Python and torch, per process",
}


def constant(name: str, given: Mapping[str, int]) -> int:
    """Return one constant: the given value, else the measured one."""
    return given.get(name, RUNTIME[name])


def fragments(allocated: int) -> int:
    """Return the bytes lost to fragmentation with expandable segments (`zerocli.allocator`), which grow by 20 MiB."""
    return allocated // 100 + 40 * MIB
