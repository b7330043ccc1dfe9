"""All cases of the zoo; those that need further packages import them when they run."""

from __future__ import annotations

from zoo import (  # noqa: F401 (each module enters its cases)
    copies,
    dtypes,
    edits,
    engines,
    entering,
    graphs,
    hooks,
    loops,
    memory,
    modules,
    published,
    reading,
    reuse,
    shapes,
    uneven,
)
from zoo.case import CASES, Case


def load(name: str) -> Case:
    return CASES[name]
