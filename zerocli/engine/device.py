"""The compute device of an engine."""

from __future__ import annotations

import os

import torch
from torch import nn


def choose_device(asked: torch.device | str | None, model: nn.Module) -> torch.device:
    """Return the device to train on, and make it current: as asked, or the model's own, or this process's GPU."""
    if asked is not None:
        device = torch.device(asked)
        if device.type == "cuda" and device.index is None:  # this process's own GPU
            device = torch.device("cuda", torch.cuda.current_device())
    elif own := [p.device for p in model.parameters() if p.device.type not in ("meta", "cpu")]:
        device = own[0]
    elif torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    else:
        device = torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
