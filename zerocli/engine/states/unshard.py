"""Unsharding: an independent, unsharded copy of a sharded model, with the user's own classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zerocli.errors import Refused


@torch.no_grad()
def unsharded_model(
    model: nn.Module,
    values: Callable[[], Mapping[int, torch.Tensor]],
    tp: int,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> nn.Module:
    """See `Engine.unsharded_model`; `values` gathers parameters by id, `tp` is the tensor-parallel world size."""
    if tp > 1:
        raise Refused(
            f"the layers of this model are split over {tp} tensor-parallel ranks: a whole copy has other shapes; build "
            "the model again and load engine.state_dict() into it"
        )
    return copy_module(model, values(), torch.device(device), dtype)


def copy_module(
    model: nn.Module, values: Mapping[int, torch.Tensor], device: torch.device, dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a deep copy of `model` with these parameters, given by id, and without what sharding added to it.

    No parameter's memory is copied: each is replaced by its new one. Ties, requires_grad and hooks are kept. `dtype`
    applies to floating-point parameters and buffers. By default all parameters are fp32, also frozen ones that are kept
    in bf16 or fp16, so that the copy computes in one dtype; buffers keep their dtype.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        value = values.get(id(p), p)  # one that was added after shard is whole
        # Always a copy: the values belong to the caller.
        new = value.detach().to(device, _dtype(value, dtype or torch.float32), copy=True)
        memo[id(p)] = nn.Parameter(new, requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = b.detach().to(device, _dtype(b, dtype), copy=True)
    return copy.deepcopy(model, memo)  # a sharded module's copy has its original class


def _dtype(value: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and value.is_floating_point() else value.dtype
