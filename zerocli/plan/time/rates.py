"""Rates of a device that decide how long a step takes: products, memory, and an update on the host's cores."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

import torch

from zerocli.engine.optimizer.compiled_update import Unavailable, open_beside
from zerocli.engine.optimizer.optim import FusedAdam
from zerocli.engine.optimizer.update_place import LEAST_NUMEL, MOST_NUMEL, choose_compiled, measure_both, measure_cpu
from zerocli.engine.precision import PRECISIONS
from zerocli.layout.flats import Sizing
from zerocli.layout.stage import STAGES

SECONDS = 1.0
"""Each rate is measured for about this long: a GPU lowers its clock after a while, as it does in training."""
CPU = torch.device("cpu")
SMALLEST = 128
"""Rows and columns of a product in half precision: a CPU without instructions for it takes 30 ms."""


def measure_rates(device: torch.device) -> dict[str, float]:
    """Return the TFLOPS of a large product (bf16 on a GPU, else fp32, and beside it those of bf16 and fp16), the GB/s
    of a copy in the device's memory (read and written), and the billions of parameters per second that the host's cores
    update, alone and, where a GPU is updated beside them, while its link is busy.
    """
    cuda = device.type == "cuda"
    source = torch.ones((1 << 30) if cuda else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    half = {} if cuda else {name: _half_rate(PRECISIONS[name].compute) for name in ("bf16", "fp16")}
    return {
        "products": _product_rate(16384, 4096, torch.bfloat16, device) if cuda else _product_rate(1024, 1024),
        **half,
        "memory": 2 * source.nbytes / _seconds(lambda: target.copy_(source), device) / 1e9,
        "adam": 1e-9 / measure_cpu(True, MOST_NUMEL, choose_compiled("auto", FusedAdam(True), LEAST_NUMEL, True)[0]),
        **({"adam_beside": beside} if cuda and (beside := _beside(device)) else {}),
    }


def _beside(device: torch.device) -> float:
    """Return the billions of parameters per second that the host's cores update while the link to the device is busy
    both ways; 0 if they take no part in updates there.
    """
    try:
        kernel = open_beside(FusedAdam(True))
    except Unavailable:
        return 0.0
    sizing = Sizing(STAGES[1], split_master=True, threads=torch.get_num_threads())
    took = [measure_both(kernel, device, sizing, torch.bfloat16, MOST_NUMEL)[1] for _ in range(3)]
    return 1e-9 / statistics.median(took)


def slower_than_fp32(dtype: torch.dtype) -> float:
    """Return how many times as long as in fp32 a product takes on this CPU: hundreds of times where it has no
    instructions for `dtype`. Takes a tenth of a second.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of the same thing
        half, full = (
            _seconds(_product(SMALLEST, SMALLEST, each), CPU, at_least=0.02) for each in (dtype, torch.float32)
        )
    return half / full


def _half_rate(dtype: torch.dtype) -> float:
    """Return the TFLOPS of a product on this CPU, as large a one as takes no more than a few milliseconds."""
    size = SMALLEST
    while size < 1024 and _seconds(_product(size, size, dtype), CPU, at_least=0.0) < 0.002:
        size *= 2
    return _product_rate(size, size, dtype)


def _product_rate(rows: int, width: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> float:
    return 2 * rows * width * width / _seconds(_product(rows, width, dtype, device), device) / 1e12


def _product(rows: int, width: int, dtype: torch.dtype, device: torch.device = CPU) -> Callable[[], object]:
    """Return what multiplies a matrix of `rows` and `width` by a square one."""
    generator = torch.Generator(device)  # its own: a run draws from torch's
    left = torch.randn(rows, width, dtype=dtype, device=device, generator=generator)
    right = torch.randn(width, width, dtype=dtype, device=device, generator=generator)
    out = torch.empty(rows, width, dtype=dtype, device=device)
    return lambda: torch.mm(left, right, out=out)


def _seconds(job: Callable[[], object], device: torch.device, at_least: float = SECONDS) -> float:
    """Return the seconds of one call, as the mean over calls of about `at_least` seconds, after a first one."""

    def calls(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    calls(1)
    number = max(1, int(at_least / max(1e-6, calls(1))))
    return calls(number) / number
