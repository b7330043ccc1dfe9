"""Python's garbage collection during training. (No torch.)"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def long_lived() -> Iterator[None]:
    """Exclude all existing objects (the model, all of torch) from garbage collection while the body runs.

    A full collection takes a tenth of a second or more. Each rank runs it at a different time, and all others wait.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage while the body runs; for code that makes millions of objects and frees none of them, such as
    imports: a fifth of torch's and transformers' time is that each full collection looks at all of them again.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
