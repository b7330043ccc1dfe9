"""How offloaded states are updated: on the CPU or through the device, compiled or not, by measuring each."""

from __future__ import annotations

import functools
import time

import torch

from tiers.pages import Pages, Registrar
from zerocli.engine.comm import Collectives
from zerocli.engine.optimizer.compiled_update import CompiledAdam, Unavailable, has_compiled, open_compiled
from zerocli.engine.optimizer.counts import Counts
from zerocli.engine.optimizer.optim import FlatOptimizer, FusedAdam, Group, StepValues
from zerocli.engine.optimizer.update import Updater
from zerocli.engine.units.master import REMAINDER
from zerocli.engine.units.unit import MASTER
from zerocli.layout.flats import Sizing
from zerocli.layout.shards import Span
from zerocli.layout.sizes import format_count
from zerocli.layout.stage import STAGES

LEAST_NUMEL = 4_000_000
"""Parameters that a rank updates on the CPU from which compiling is worth it: fewer take torch's operations 20 ms."""
TRIAL_NUMEL = 1 << 20
"""Parameters with which both ways are timed: they take half of what `LEAST_NUMEL` in fp32 have as states."""


def choose_compiled(
    asked: bool | str, rule: FlatOptimizer, numel: int, split: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[CompiledAdam | None, str]:
    """Return the kernel for the update of `numel` parameters of this dtype on the CPU, or None, and why; never raises
    for a kernel that cannot be had.
    """
    if asked not in (True, False, "auto"):
        raise ValueError(f"compile_update {asked!r} is not one of auto, True, False")
    if asked is False:
        return None, "as asked"
    if not has_compiled(rule):
        return None, "only Adam and AdamW have a kernel"
    if asked == "auto" and numel < LEAST_NUMEL:
        return None, f"fewer than {format_count(LEAST_NUMEL)} parameters per rank"
    assert isinstance(rule, FusedAdam)
    try:
        kernel = open_compiled(rule)
    except Unavailable as error:
        return None, str(error)
    if asked is True:
        return kernel, "as asked"
    ratio = measure_cpu(split, TRIAL_NUMEL, dtype=dtype) / measure_cpu(split, TRIAL_NUMEL, kernel, dtype)
    if ratio <= 1:
        return None, "no faster than torch's operations, measured"
    return kernel, f"{ratio:.2g} times as fast as torch's operations, measured"


def choose_update(
    asked: str, device: torch.device, offloaded: bool, split: bool = False, compiled: CompiledAdam | None = None
) -> tuple[bool, str]:
    """Return whether offloaded states are updated on the CPU, and why."""
    if asked not in ("auto", "cpu", "stream"):
        raise ValueError(f"update {asked!r} is not one of auto, cpu, stream")
    if asked != "auto" or not offloaded:
        return asked == "cpu", "as asked"
    if device.type == "cpu":
        return True, "the device is the CPU"
    stream, cpu = measure_stream(device, 10 if split else 12), measure_cpu(split, compiled=compiled)
    facts = f"{stream * 1e9:.2f} s for a billion parameters through the GPU, {cpu * 1e9:.2f} s on the CPU, measured"
    return cpu < stream, facts


def measure_stream(device: torch.device, width: int, nbytes: int = 64 << 20) -> float:
    """Return the seconds per parameter to copy its `width` bytes of states in both directions at once, pinned.

    torch would round its own pinned memory up to a power of two and keep it.
    """
    pages = [Pages(nbytes), Pages(nbytes)]
    for each in pages:
        each.pin(Registrar())
    host = [each.bytes for each in pages]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    up, down = torch.cuda.Stream(device), torch.cuda.Stream(device)
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        with torch.cuda.stream(up):
            there[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(down):
            host[1].copy_(there[1], non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    for each in pages:
        each.release()
    return best / (nbytes / width)


def measure_cpu(
    split: bool, numel: int = 16 << 20, compiled: CompiledAdam | None = None, dtype: torch.dtype = torch.bfloat16
) -> float:
    """Return the seconds per parameter of an Adam update on this host, casts and memory reads included.

    That many parameters do not fit a cache, and take less memory (0.2 GiB) than the first step of any model.
    """
    random = functools.partial(torch.rand, numel, generator=torch.Generator())  # its own: a run draws from torch's
    arrays = {name: random() for name in ("exp_avg", "exp_avg_sq", *(() if split else (MASTER,)))}
    grad, out = random().to(dtype), random().to(dtype) if dtype != torch.float32 else None
    if split:
        arrays[REMAINDER] = torch.zeros(numel, dtype=torch.int16)
    one = torch.ones(())
    rule, cpu = FusedAdam(True), torch.device("cpu")
    group = Group(1e-4, 0.0, rule.defaults)
    threads = torch.get_num_threads()
    sizing = Sizing(STAGES[1], device="cpu", update_on_cpu=True, split_master=split, threads=threads)
    updater = Updater(rule, Counts(cpu), Collectives.alone(cpu), cpu, sizing, compiled=compiled)
    piece = numel if compiled is not None else sizing.update_chunk(dtype.itemsize, "cpu")
    values = StepValues((group,), torch.ones(1), one, torch.zeros(()))
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for span in Span(0, numel).pieces(piece):
            updater.update_piece(slice(span.start, span.stop), arrays, grad, out, values, group, values.at(0))
        best = min(best, time.perf_counter() - began)
    return best / numel
