"""GPU memory of one process, as the driver reports it: other processes may use the same GPU."""

from __future__ import annotations

import ctypes
import os

import torch

_MAX_PROCESSES = 1024
_UNKNOWN = 2**64 - 1


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("nbytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def process_nbytes(device: torch.device) -> int | None:
    """Return the device memory of this process, including its context; None if the driver does not report it.

    It does not without NVML, for a GPU split into instances (MIG), or if it knows this process by a pid other than its
    own (in a container).
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        try:
            return _of(library, f"GPU-{torch.cuda.get_device_properties(device).uuid}", os.getpid())
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or one too old for these functions
        return None


def _of(library: ctypes.CDLL, uuid: str, pid: int) -> int | None:
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None
    found, count = (_Process * _MAX_PROCESSES)(), ctypes.c_uint(_MAX_PROCESSES)
    if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found) != 0:
        return None
    mine = [process.nbytes for process in found[: count.value] if process.pid == pid]
    return sum(mine) if mine and _UNKNOWN not in mine else None
