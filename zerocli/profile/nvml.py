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
    handle, found, count = ctypes.c_void_p(), (_Process * _MAX_PROCESSES)(), ctypes.c_uint(_MAX_PROCESSES)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
            if library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0:
                return None
            if library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found) != 0:
                return None
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or one too old for these functions
        return None
    mine = [process.nbytes for process in found[: count.value] if process.pid == os.getpid()]
    return sum(mine) if mine and _UNKNOWN not in mine else None
