"""Memory of a process beyond the model: measured constants in bytes; `--set runtime.NAME` overrides each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from offload.placement import HBM
from zerocli.layout.flats import FP32

if TYPE_CHECKING:
    from zerocli.plan.setup import Setup

MIB = 2**20

RUNTIME: Mapping[str, int] = {
    "context": 832 * MIB,
    "nccl": 400 * MIB,
    "workspace": 64 * MIB,
    "fragments": 0,
    "python": 1252 * MIB,
    "compiler": 12 * MIB,
    "kernels": 98 * MIB,
    "triton": 63 * MIB,
    "rotation": 16 * MIB,
    "optimizers": 21 * MIB,
    "adamax": 40 * MIB,
    "threads": 25 * MIB,
}
"""On a GPU: CUDA context and loaded kernels, NCCL's buffers, cuBLAS's workspaces (one for each thread that computes),
and fragmentation (0: what `arena` finds). On the host: Python with torch, the modules of torch's compiler
where something imports them, what kernels for half precision add (ours, which Triton compiles, and cuDNN's, which it
compiles too), what the compiler then imports of Triton, what torch's kernels for rotary positions and for its own
optimizers add, and for Adamax among them, and the threads of an update on the CPU. Measured with torch 2.11, CUDA 13,
in runs that find no compiled kernels in the caches of Triton and CUDA; where they do, they take 30 to 60 MiB less. Runs
of like configurations differ by up to 16 MiB."""
LAST_PAGES = 10 * MIB
"""What the allocator's small pages and the order of its frees cost beyond the arenas of a plan (measured)."""
DISK_THREADS = 3 * MIB // 2
"""Host memory of a disk tier's 33 threads. It was 1.9 to 2.5 MiB where all of them had work; most runs have less."""

SENTENCES = {
    "context": "CUDA context and kernels, per process",
    "nccl": "NCCL's own buffers",
    "workspace": "cuBLAS workspaces of the two threads that compute",
    "fragments": "fragmentation: reserved by torch's allocator beyond what is live at the peak",
    "python": "Python, torch and its compiled kernels, per process",
}


def constant(name: str, given: Mapping[str, int]) -> int:
    """Return one constant: the given value, else the measured one."""
    return given.get(name, RUNTIME[name])


def process_nbytes(setup: Setup, rotary: bool = True) -> int:
    """Return the host memory of a process with a GPU, without what the tiers hold.

    torch imports its compiler for recomputation, for its own optimizers, and for the tables of a `rotary` model, which
    are computed on the meta device too.
    """
    half = setup.width < FP32
    compiler = rotary or setup.recomputes or any(setup.num_temporaries)
    taken = {
        "python": True,
        "compiler": compiler,
        "kernels": half,
        "triton": half and compiler,
        "rotation": rotary,
        "optimizers": any(setup.num_temporaries),
        "adamax": setup.optimizer.lower() == "adamax",
        "threads": setup.updates_on_both
        or (setup.updates_on_cpu and any(share.tier != HBM for share in setup.placement().of("optimizer"))),
    }
    return sum(constant(name, setup.runtime) for name, is_there in taken.items() if is_there)


def usual_fragments(allocated: int) -> int:
    """Return what fragmentation usually costs, for a model whose allocations are not replayed."""
    return allocated // 100 + 40 * MIB
