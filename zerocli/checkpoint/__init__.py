"""Checkpoints: sharded, crash-safe, independent of world size, stage and placement; see docs/reliability.md."""

import importlib
from typing import Any

_PLACES = {
    "Damaged": "manifest",
    "Folder": "folder",
    "Mismatch": "state",
    "Resumed": "loader",
    "Saver": "saver",
    "Unfinished": "manifest",
    "Unreadable": "manifest",
    "load": "loader",
    "resume": "loader",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(name)
    return getattr(importlib.import_module(f"zerocli.checkpoint.{_PLACES[name]}"), name)
