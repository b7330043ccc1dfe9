"""Restrict what DCP unpickles from other ranks to plans, results and errors: nothing that runs code.

DCP gathers plans and failures as pickles over gloo, which has no authentication: anyone who gets into that connection
could send a pickle that runs a program when it is read. torch cannot be given another unpickler, so its own is replaced
by one that, in a thread inside `guarded`, refuses all names but those below; elsewhere it behaves as before.
"""

from __future__ import annotations

import contextlib
import enum
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
"""Modules of the classes in plans and results: data classes whose construction has no side effects."""
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
    """The unpickler for what ranks exchange."""

    def find_class(self, module: str, name: str) -> Any:
        if not getattr(_within, "guarded", False):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return member
        if not is_data(module, name):
            raise pickle.UnpicklingError(f"another rank sent {module}.{name}, which no plan or result is made of")
        return super().find_class(module, name)


def member(kind: Any, name: Any) -> enum.Enum:
    """Return a member of an enum; stands for `getattr`, with which early releases of Python 3.11 pickle one."""
    if not (isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__):
        raise pickle.UnpicklingError(f"another rank sent attribute {name!r} of {kind!r}, which is no member of an enum")
    found: enum.Enum = kind.__members__[name]
    return found


def is_data(module: str, name: str) -> bool:
    """Return whether a name is that of a class of plain data; a dotted name never is."""
    if (module, name) in NAMES:
        return True
    if "." in name or module not in sys.modules:  # do not import a module for this
        return False
    found = getattr(sys.modules[module], name, None)
    if module == "torch":
        return isinstance(found, torch.dtype)
    if isinstance(found, type) and issubclass(found, BaseException):
        return True  # a failure on another rank
    return module in PLACES and isinstance(found, type) and found.__module__ == module


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """While the body runs, unpickle in this thread only the classes of plans, results and errors."""
    if c10d._unpickler is not Reader:
        c10d._unpickler = Reader
    before, _within.guarded = getattr(_within, "guarded", False), True
    try:
        yield
    finally:
        _within.guarded = before
