"""The fused update: one pass over parameters, master, states and gradient on a GPU, where triton is installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Protocol

import torch

from zerocli.engine.optim import At, FlatOptimizer, FusedAdam, Group, StepValues


class FusedUpdate(Protocol):
    """Updates bf16 or fp16 parameters with their master, which is given whole or as a remainder, and their states."""

    def begin(self, values: StepValues) -> None:
        """Prepare a step; its values are on the device."""

    def update(
        self,
        parameters: torch.Tensor,
        master: torch.Tensor | None,
        remainder: torch.Tensor | None,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        scale: torch.Tensor,
        group: Group,
        at: At,
    ) -> None:
        """Update a piece in place. `grad`, of any dtype, is divided by `scale`; if `at.skip` is 1 nothing changes."""


def can_fuse(rule: FlatOptimizer, device: torch.device) -> bool:
    """Whether the rule has a fused update on this device."""
    fits = type(rule) is FusedAdam and "max_exp_avg_sq" not in rule.state_names
    return device.type == "cuda" and fits and _has_triton()


def fused_update(rule: FlatOptimizer) -> FusedUpdate:
    """Return the rule's fused update; see `can_fuse`."""
    from zerocli.engine.update_kernels import FusedAdamUpdate

    assert isinstance(rule, FusedAdam)
    return FusedAdamUpdate(rule.decoupled)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
