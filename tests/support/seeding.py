"""Loaded once in a test process, and before ranks are forked: without a GPU, `torch.manual_seed` seeds the CPU alone.

Torch notes the seed for devices that may yet be opened, three times with the stack of the caller as text. That was a
tenth of the time of a rank of a small run.
"""

from __future__ import annotations

import os

import torch

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # does not open the driver, which forked ranks could not use then
if not torch.cuda.is_available():
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None
del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
