"""The fused update: one pass over parameters, master, states and gradient on a GPU, where triton is installed."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from zerocli.engine.optimizer.optim import FlatOptimizer, FusedAdam

if TYPE_CHECKING:  # needs triton
    from zerocli.engine.optimizer.update_kernels import FusedAdamUpdate


def can_fuse(rule: FlatOptimizer, device: torch.device) -> bool:
    """Whether the rule has a fused update on this device."""
    fits = type(rule) is FusedAdam and "max_exp_avg_sq" not in rule.state_names
    return device.type == "cuda" and fits and importlib.util.find_spec("triton") is not None


def fused_update(rule: FlatOptimizer) -> FusedAdamUpdate:
    """Return the rule's fused update; see `can_fuse`."""
    from zerocli.engine.optimizer.update_kernels import FusedAdamUpdate

    assert isinstance(rule, FusedAdam)
    return FusedAdamUpdate(rule.decoupled)
