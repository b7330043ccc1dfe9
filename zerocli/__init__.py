"""zerocli: ask whether a model fits, see where its memory goes, train it."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

__version__ = "0.1.0"

TYPE_CHECKING = False  # as typing's, without importing it: the program handles an interrupt only after this file
if TYPE_CHECKING:
    from typing import Any

    from offload.verify import Corrupted as Corrupted
    from zerocli.engine.engine import Engine as Engine
    from zerocli.engine.events import Events as Events
    from zerocli.engine.events import ProfilerRanges as ProfilerRanges
    from zerocli.engine.optimizer.groups import ParamGroup as ParamGroup
    from zerocli.engine.optimizer.optim import FlatOptimizer as FlatOptimizer
    from zerocli.engine.states.ema import EMA as EMA
    from zerocli.errors import Refused as Refused
    from zerocli.layout.recompute import Recompute as Recompute
    from zerocli.models.lora import lora as lora
    from zerocli.run.own_loop import shard as shard

_LAZY = {
    "shard": "zerocli.run.own_loop",
    "Engine": "zerocli.engine.engine",
    "EMA": "zerocli.engine.states.ema",
    "Events": "zerocli.engine.events",
    "FlatOptimizer": "zerocli.engine.optimizer.optim",
    "ParamGroup": "zerocli.engine.optimizer.groups",
    "ProfilerRanges": "zerocli.engine.events",
    "Recompute": "zerocli.layout.recompute",
    "lora": "zerocli.models.lora",
    "Refused": "zerocli.errors",
    "Corrupted": "offload.verify",
}


class _OwnPackages:
    """Finds `offload` and `tiers` beside this package, whatever a working directory has by these names."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [_ROOT]) if name in ("offload", "tiers") else None


_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if not any(finder.__class__.__name__ == _OwnPackages.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _OwnPackages())


def __getattr__(name: str) -> Any:
    # torch is imported only by those who use it: `zerocli --help` answers at once.
    import importlib

    if name in ("plan", "check"):  # packages that are also functions: see their ends
        return importlib.import_module(f"zerocli.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'zerocli' has no attribute {name!r}")
