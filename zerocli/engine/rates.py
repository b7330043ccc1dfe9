"""Rates of a device that decide how long a step takes: products, memory, and an update on the host's cores."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from zerocli.engine.update_place import measure_cpu

SECONDS = 1.0
"""Each rate is measured for about so long: a GPU lowers its clock after a while, as it does in training."""


def measure_rates(device: torch.device) -> dict[str, float]:
    """Return the TFLOPS of a large product (bf16 on a GPU, else fp32), the GB/s of a copy in the device's memory (read
    and written), and the billions of parameters per second that the host's cores update.
    """
    cuda = device.type == "cuda"
    rows, width = (16384, 4096) if cuda else (1024, 1024)
    dtype = torch.bfloat16 if cuda else torch.float32
    left = torch.randn(rows, width, dtype=dtype, device=device)
    right = torch.randn(width, width, dtype=dtype, device=device)
    out = torch.empty(rows, width, dtype=dtype, device=device)
    source = torch.ones((1 << 30) if cuda else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "products": 2 * rows * width * width / _seconds(lambda: torch.mm(left, right, out=out), device) / 1e12,
        "memory": 2 * source.nbytes / _seconds(lambda: target.copy_(source), device) / 1e9,
        "adam": 1e-9 / measure_cpu(split=True),
    }


def _seconds(job: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, as the mean over calls of about `SECONDS`, after a first one."""

    def calls(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    calls(1)
    number = max(1, int(SECONDS / max(1e-6, calls(1))))
    return calls(number) / number
