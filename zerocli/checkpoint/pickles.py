"""What torch's checkpoints exchange between ranks may name: plans, results and errors, and nothing that runs code.

DCP gathers plans and failures as pickles over gloo, which has no passwords: whoever gets into that connection could
send a pickle that runs a program when it is read. torch has no way to give it another reader, so its own is replaced
by one that, in a thread within `guarded`, refuses all names but those below; elsewhere it reads as ever.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

PLACES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.storage",
    "zerocli.checkpoint.writer",
)
"""Modules whose classes plans and results are made of: data, whose making does nothing else."""
NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.api", "CheckpointException"),
    ("traceback", "StackSummary"),
    ("traceback", "FrameSummary"),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}
_within = threading.local()


class Reader(pickle.Unpickler):
    """Reads what torch's ranks exchange."""

    def find_class(self, module: str, name: str) -> Any:
        if getattr(_within, "guarded", False) and not is_data(module, name):
            raise pickle.UnpicklingError(f"another rank sent {module}.{name}, which no plan or result is made of")
        return super().find_class(module, name)


def is_data(module: str, name: str) -> bool:
    """Say whether a name is that of a class that is data alone; a dotted name leads elsewhere, and never is."""
    if (module, name) in NAMES:
        return True
    if "." in name or module not in sys.modules:  # a module that nobody imported is not imported for this
        return False
    found = getattr(sys.modules[module], name, None)
    if module == "torch":
        return isinstance(found, torch.dtype)
    if isinstance(found, type) and issubclass(found, BaseException):
        return True  # what failed on another rank
    return module in PLACES and isinstance(found, type) and found.__module__ == module


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """While the body runs, in this thread: read of other ranks' pickles what plans, results and errors are made of."""
    if c10d._unpickler is not Reader:
        c10d._unpickler = Reader
    before, _within.guarded = getattr(_within, "guarded", False), True
    try:
        yield
    finally:
        _within.guarded = before
