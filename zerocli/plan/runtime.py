"""What a process takes beside the model: measured constants, in bytes, each of which can be given instead."""

from __future__ import annotations

from collections.abc import Mapping

MIB = 2**20

RUNTIME: Mapping[str, int] = {
    "context": 560 * MIB,
    "nccl": 400 * MIB,
    "workspace": 66 * MIB,
    "fragments": 0,
    "python": 2560 * MIB,
}
"""On a GPU: CUDA context and loaded kernels, NCCL's buffers, cuBLAS's workspaces (one for each thread that computes),
bytes lost between blocks (0: two in a hundred of what comes and goes); on the host: Python with torch, a process."""

SENTENCES = {
    "context": "CUDA context and kernels, a process",
    "nccl": "NCCL's own buffers",
    "workspace": "cuBLAS workspaces of the two threads that compute",
    "fragments": "lost between blocks of the allocator: 2 % of what comes and goes",
    "python": "Python and torch, a process",
}


def constant(name: str, given: Mapping[str, int]) -> int:
    """Return one constant, as given or as measured."""
    return given.get(name, RUNTIME[name])
