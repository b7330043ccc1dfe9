"""The residual-state layer: pieces of training state, which tier holds each, and when it moves."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.placement import (
    ACTIVATIONS,
    HBM,
    KINDS,
    Placement,
    PlacementError,
    Share,
    Spill,
    parse_placement,
    per_rank,
)

if TYPE_CHECKING:
    from offload.record import Record as Record
    from offload.store import Store as Store

__all__ = [
    "ACTIVATIONS",
    "HBM",
    "KINDS",
    "Placement",
    "PlacementError",
    "Record",
    "Share",
    "Spill",
    "Store",
    "parse_placement",
    "per_rank",
]

_HOMES = {"Record": "offload.record", "Store": "offload.store"}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that planning a placement does not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
