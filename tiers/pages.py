"""Page-aligned host memory of exactly the size asked for, registered with CUDA where that is wanted.

PyTorch's own pinned allocator rounds up to a power of two; an anonymous mapping does not, and suits O_DIRECT as well.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tiers.base import PAGE_NBYTES, round_up

_SMALL_NBYTES = 64 << 20  # not worth a pool of threads


class Registrar:
    """Makes host memory known to CUDA, so that copies are direct and asynchronous."""

    @property
    def available(self) -> bool:
        """Whether there is a GPU to register with."""
        return torch.cuda.is_available()

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin the memory; return why not, or None when it is pinned."""
        torch.cuda.init()
        code = _code(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if code == 0:
            return None
        _clear_cuda_error()
        return f"cudaHostRegister gave error {code}"

    def unregister(self, address: int) -> None:
        """Unpin memory that `register` pinned, once no copy uses it."""
        torch.cuda.synchronize()
        if _code(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
            _clear_cuda_error()


class Pages:
    """A span of zeroed, page-aligned memory of its own; `bytes` is all of it as a uint8 tensor."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(nbytes, PAGE_NBYTES)
        self.pinned = False
        mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages: fewer faults, faster pinning. Not inherited: a child's copy-on-write would move pinned pages.
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            try:
                mapping.madvise(getattr(mmap, advice))
            except (OSError, AttributeError):
                pass
        self.bytes: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()

    @property
    def memory(self) -> memoryview:
        """Return all of it as Python's own kind of buffer, for system calls."""
        return memory_of(self.bytes)

    def prefault(self) -> None:
        """Have the kernel supply all pages now, by several threads: it zeroes them, which takes one core long."""
        num_threads = 1 if self.nbytes <= _SMALL_NBYTES else min(8, os.cpu_count() or 1)
        span = round_up(-(-self.nbytes // num_threads), PAGE_NBYTES)
        parts = [self.bytes[start : start + span : PAGE_NBYTES] for start in range(0, self.nbytes, span)]
        if num_threads == 1:
            parts[0].zero_()
            return
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(Tensor.zero_, parts))

    def pin(self, registrar: Registrar) -> str | None:
        """Register the memory with CUDA; return why not, or None when it is pinned."""
        if self.pinned:
            return None
        self.prefault()
        refusal = registrar.register(self.address, self.nbytes)
        self.pinned = refusal is None
        return refusal

    def release(self, registrar: Registrar) -> None:
        """Unpin and let go; the memory is unmapped with the last tensor that views it."""
        if self.pinned:
            registrar.unregister(self.address)
            self.pinned = False
        # Never unmapped by hand: tensors refer to the mapping without locking it, and would dangle.
        self.bytes = torch.empty(0, dtype=torch.uint8)


def memory_of(data: Tensor) -> memoryview:
    """Return a host tensor's bytes (flat, uint8) as a buffer for system calls; nothing is copied."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _code(result: object) -> int:
    return int(getattr(result, "value", result))  # type: ignore[call-overload]


def _clear_cuda_error() -> None:
    """Take the refused call's error off the thread, or the next unrelated kernel launch would report it."""
    try:
        torch.ones(1, device="cuda").add_(1)
    except RuntimeError:
        pass
