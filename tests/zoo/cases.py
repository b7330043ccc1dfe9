"""All cases of the zoo; those that need further packages import them when they run."""

from __future__ import annotations

from zoo import (  # noqa: F401 (each module enters its cases)
    aliases,
    buffers,
    calls,
    copies,
    dtypes,
    edits,
    engines,
    entering,
    graphs,
    guards,
    hooks,
    identity,
    later,
    loops,
    memory,
    modules,
    odd_modules,
    optimizers,
    published,
    reached,
    reading,
    recomputed,
    reuse,
    shapes,
    stale,
    statedicts,
    uneven,
)
from zoo.case import CASES, Case


def load(name: str) -> Case:
    return CASES[name]
