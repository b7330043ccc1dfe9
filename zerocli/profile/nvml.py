"""What the driver says that one process holds of a GPU: a GPU may have other users, who are not this run's memory."""

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
    """Return the device memory of this process, context and all; None where the driver does not tell.

    It tells nothing without its management library, of a GPU cut into instances, or under another process number than
    the one we know ourselves by (a container's).
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() != 0:
            return None
        try:
            return _of(library, f"GPU-{torch.cuda.get_device_properties(device).uuid}", os.getpid())
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError):  # no such library, or one from before these functions
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
