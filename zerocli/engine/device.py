"""The compute device of an engine."""

from __future__ import annotations

import os

import torch
from torch import nn


def choose_device(asked: torch.device | str | None, model: nn.Module) -> torch.device:
    """Return the device to train on, and make it current: as asked, or the model's own, or this process's GPU."""
    device = _indexed(asked) if asked is not None else _default_device(model)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _indexed(device: torch.device | str) -> torch.device:
    """Return the device; a bare `cuda` is this process's own GPU."""
    chosen = torch.device(device)
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return chosen


def _default_device(model: nn.Module) -> torch.device:
    for p in model.parameters():
        if p.device.type not in ("meta", "cpu"):
            return p.device
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")
