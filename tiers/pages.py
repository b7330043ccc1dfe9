"""Page-aligned host memory of exactly the requested size, optionally registered with CUDA.

PyTorch's pinned allocator rounds up to a power of two; an anonymous mapping does not, and works with O_DIRECT too.

[Note: unpinned before unmapped] CUDA identifies pinned memory by address. A span that is unmapped while registered
leaves its registration behind, and CUDA takes whatever the kernel maps there next for pinned memory: copies into it
fail or corrupt data. So the mapping unpins itself before its memory is unmapped, whoever held its last tensor. An owner
that was dropped instead of closed only costs a wait for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tiers.base import PAGE_NBYTES, round_up

_SMALL_NBYTES = 64 << 20  # too small for a thread pool to pay off


class Registrar:
    """Registers host memory with CUDA, so that copies are direct and asynchronous.

    Calls may come from any thread, and a new thread's current device is 0. So calls use the device of the thread that
    made the registrar; otherwise they would open a context on another rank's GPU.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._process = os.getpid()

    @property
    def available(self) -> bool:
        """Whether there is a GPU to register with."""
        return torch.cuda.is_available()

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin the memory; return None, or the reason for a failure."""
        torch.cuda.init()
        with torch.cuda.device(self._device):
            code = _code(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
            if code == 0:
                return None
            _clear_cuda_error()
        return f"cudaHostRegister gave error {code}"

    def unregister(self, address: int) -> None:
        """Unpin memory that `register` pinned, once no copy uses it; do nothing in a forked child."""
        if os.getpid() != self._process:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if _code(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                _clear_cuda_error()


class _Mapping(mmap.mmap):
    """Anonymous memory; see [Note: unpinned before unmapped]."""

    unpin: Callable[[], None] | None = None

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.unpin is not None and not is_finalizing():  # at process exit the driver unpins everything
            self.unpin()


class Pages:
    """A span of zeroed, page-aligned memory; `bytes` is all of it as a uint8 tensor."""

    def __init__(self, nbytes: int, huge: bool = False) -> None:
        """Take `huge` for memory that will be used whole: otherwise its first byte would take 2 MiB."""
        self.nbytes = round_up(nbytes, PAGE_NBYTES)
        mapping = _Mapping(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapping: _Mapping | None = mapping
        self._advise("MADV_DONTFORK")  # a child's copy-on-write would move pinned pages
        if huge:
            self._advise("MADV_HUGEPAGE")
        self.bytes: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self.address: int = self.bytes.data_ptr()

    @property
    def pinned(self) -> bool:
        """Whether it is registered with CUDA."""
        return self._mapping is not None and self._mapping.unpin is not None

    @property
    def memory(self) -> memoryview:
        """Return all of it as a memoryview, for system calls."""
        return memory_of(self.bytes)

    def _advise(self, advice: str) -> None:
        assert self._mapping is not None, "released"
        with contextlib.suppress(OSError, AttributeError):
            self._mapping.madvise(getattr(mmap, advice))

    def prefault(self) -> None:
        """Fault in all pages now, with several threads: the kernel zeroes them, which is slow on one core."""
        self._advise("MADV_HUGEPAGE")  # fewer faults, faster pinning
        num_threads = 1 if self.nbytes <= _SMALL_NBYTES else min(8, os.cpu_count() or 1)
        span = round_up(-(-self.nbytes // num_threads), PAGE_NBYTES)
        parts = [self.bytes[start : start + span : PAGE_NBYTES] for start in range(0, self.nbytes, span)]
        if num_threads == 1:
            parts[0].zero_()
            return
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(Tensor.zero_, parts))

    def pin(self, registrar: Registrar) -> str | None:
        """Register the memory with CUDA; return None, or the reason for a failure."""
        assert self._mapping is not None, "released"
        if self.pinned:
            return None
        self.prefault()
        refusal = registrar.register(self.address, self.nbytes)
        if refusal is None:
            self._mapping.unpin = functools.partial(registrar.unregister, self.address)
        return refusal

    def release(self) -> None:
        """Unpin and drop the memory; it is unmapped with the last tensor that views it."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None and mapping.unpin is not None:
            unpin, mapping.unpin = mapping.unpin, None
            unpin()
        # Never unmapped explicitly: tensors refer to the mapping without locking it, and would dangle.
        self.bytes = torch.empty(0, dtype=torch.uint8)


def resident_nbytes(memory: Tensor) -> int:
    """Return how many bytes of page-aligned host memory are in RAM; all of them if the system does not say.

    Pages of an unpinned mapping are there from their first use on.
    """
    pages = (ctypes.c_ubyte * (round_up(memory.nbytes, PAGE_NBYTES) // PAGE_NBYTES))()
    try:
        code = ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), pages)
    except (OSError, AttributeError):
        return memory.nbytes
    return sum(page & 1 for page in bytes(pages)) * PAGE_NBYTES if code == 0 else memory.nbytes


def memory_of(data: Tensor) -> memoryview:
    """Return a host tensor's bytes (flat, uint8) as a buffer for system calls; nothing is copied."""
    return memoryview(data.numpy())  # type: ignore[arg-type]


def _code(result: Any) -> int:
    code: Any = getattr(result, "value", result)
    return int(code)


def _clear_cuda_error() -> None:
    """Clear the failed call's error on this thread, or the next unrelated kernel launch would report it."""
    try:
        torch.ones(1, device="cuda").add_(1)
    except RuntimeError:
        pass
