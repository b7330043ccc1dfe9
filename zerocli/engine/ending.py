"""The end of a process that has used collectives: what runs on in other threads no longer needs the interpreter.

[Note: gloo at the interpreter's end]
A gloo group runs its collectives in threads of its own. Such a thread lets go of a collective's tensors after the
collective is over, so after `wait` has returned in the main thread. Letting go of a tensor that Python knows takes the
interpreter's lock. Where Python has begun to end meanwhile, a thread that waits for the lock is ended in the midst of
a C++ destructor, and the process aborts: a rank that had trained to its end is called failed. Destroying the group does
not help while anything (an engine, a device mesh, a user's variable) still refers to it: its threads live on.

So before the interpreter ends, a reference from C++ is added to each tensor, for good. The thread's own is then never
the last one, and it needs no lock. The groups are kept as well: taking one apart waits for collectives under way, which
after an exception may be forever. The memory goes back with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_SECONDS = 2.0
"""How long a thread that is inside a store's call may take to come back."""

_armed = False


def arm() -> None:
    """Have this process end well: call it before the first collective; further calls change nothing."""
    global _armed
    _armed = True


def _end() -> None:
    join_threads()
    if _armed:
        keep_forever([keep_tensors(), gloo_groups()])


def join_threads() -> None:
    """Wait, within bounds, for this package's own threads: one inside a store's call must not come back too late."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("zerocli-") and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def keep_tensors() -> list[torch.Tensor]:
    """Return tensors that refer to every tensor Python knows from C++: as its gradient, which must be of its shape."""
    gc.unfreeze()  # or those passed over by the collector would not be found
    keepers = []
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        for found in gc.get_objects():
            # Not isinstance, which asks the object itself for its class.
            if issubclass(type(found), torch.Tensor):
                with contextlib.suppress(Exception):  # of a kind that has no gradient: gloo knows none of these
                    keeper = found.detach()
                    keeper.grad = found
                    keepers.append(keeper)
    return keepers


def gloo_groups() -> list[Any]:
    """Return the open process groups of gloo; NCCL's take themselves apart, without waiting."""
    if not dist.is_available():
        return []
    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", {})
    return [group for group, about in groups.items() if about and "gloo" in str(about[0])]


def keep_forever(value: object) -> None:
    """Give `value` a reference that nobody takes back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


# At import, so that it runs after what a script registers later: that may use collectives too.
atexit.register(_end)
