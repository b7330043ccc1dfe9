"""How torch hands out a GPU's memory: in segments that grow, unless the user has chosen otherwise. (No torch.)

A segment that cannot grow is lost to any request larger than its holes: the same training then needs 3 to 13 % more
memory than it uses at its peak. Segments that grow are a handful, whose free pages go back when another needs them; so
what fits is what the plan counts, and no block has slack that nobody asked for.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

CHOICE = "expandable_segments:True"
_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def choose(environ: MutableMapping[str, str] = os.environ) -> None:
    """Choose for this process and its children; before torch first touches a GPU."""
    if not any(name in environ for name in _NAMES):
        environ[_NAMES[0]] = CHOICE
