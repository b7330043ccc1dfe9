"""The residual-state layer: pieces of training state, which tier holds each, and when it moves."""

from offload.placement import ACTIVATIONS, HBM, KINDS, Placement, Share, Spill, parse_placement, per_rank
from offload.record import Record
from offload.store import Store

__all__ = [
    "ACTIVATIONS",
    "HBM",
    "KINDS",
    "Placement",
    "Record",
    "Share",
    "Spill",
    "Store",
    "parse_placement",
    "per_rank",
]
