"""Process exit after collectives: makes sure that gloo's threads do not need the interpreter any more.

[Note: gloo at the interpreter's end]
A gloo group runs its collectives in its own threads. Such a thread releases a collective's tensors after the collective
is complete, possibly after `wait` has returned in the main thread. Releasing a tensor that has a Python object takes
the GIL. If the interpreter is already finalizing, a thread that waits for the GIL is terminated inside a C++
destructor, and the process aborts: a rank that finished training is reported as failed. Destroying the group does not
help while anything (an engine, a device mesh, a user's variable) still refers to it: its threads stay alive.

So before the interpreter exits, a permanent C++ reference is added to each tensor. The thread's reference is then never
the last one, and releasing it needs no GIL. The groups are kept alive as well: destroying one waits for collectives in
flight, which after an exception may never complete. The memory is freed with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_SECONDS = 2.0
"""How long to wait for a thread that is inside a store call."""

GLOO: weakref.WeakSet[Any] = weakref.WeakSet()
"""Gloo's own objects that torch does not list."""

_armed = False


def arm() -> None:
    """Enable the exit handler; called before the first collective. Further calls do nothing."""
    global _armed
    _armed = True


def _end() -> None:
    join_threads()
    if _armed:  # a reference that is never released
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([keep_tensors(), gloo_groups()]))


def join_threads() -> None:
    """Wait, with a timeout, for this package's own threads: none may return from a store call during finalization."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("zerocli-") and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def keep_tensors() -> list[torch.Tensor]:
    """Return tensors that hold a C++ reference to every tensor known to Python, as a gradient of the same shape."""
    gc.unfreeze()  # frozen objects would not be found otherwise
    keepers = []
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for found in gc.get_objects():
            # Not isinstance, which may call the object's own __class__ property.
            if issubclass(type(found), torch.Tensor):
                with contextlib.suppress(Exception):  # kinds of tensors without gradients, which gloo never uses
                    keeper = found.detach()
                    keeper.grad = found
                    keepers.append(keeper)
    return keepers


def gloo_groups() -> list[Any]:
    """Return the open gloo process groups; NCCL's are destroyed without waiting."""
    if not dist.is_available():
        return []
    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", {})
    return [*GLOO, *(group for group, about in groups.items() if about and "gloo" in str(about[0]))]


# Registered at import, so that it runs after handlers that a script registers later, which may use collectives too.
atexit.register(_end)
