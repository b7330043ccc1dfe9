"""How offloaded states are updated: on the CPU or through the device, compiled or not, by measuring each."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.placement import HBM, KINDS, Placement
from tiers.pages import Pages, Registrar
from tiers.streams import record_event
from zerocli.engine.optimizer.compiled_update import (
    TRIED_NUMEL,
    CompiledAdam,
    Unavailable,
    Values,
    open_beside,
    open_compiled,
    trials,
)
from zerocli.engine.optimizer.optim import FlatOptimizer, FusedAdam, Group, StepValues
from zerocli.engine.optimizer.piece import PieceUpdate, fused_update
from zerocli.engine.settings import Settings
from zerocli.engine.units.master import REMAINDER, narrow
from zerocli.engine.units.master import split as master_parts
from zerocli.engine.units.unit import MASTER
from zerocli.layout.buffers import share_of_cpu
from zerocli.layout.flats import FP32, Sizing
from zerocli.layout.shards import Span
from zerocli.layout.sizes import format_count
from zerocli.layout.stage import STAGES

LEAST_NUMEL = 4_000_000
"""Parameters that a rank updates on the CPU from which compiling is worth it: fewer take torch's operations 20 ms."""
MOST_NUMEL = 48_000_000
"""Parameters with which a CPU's part is timed, at most: their states do not fit a cache."""
LINK_NBYTES, NUM_COPIES = 64 << 20, 40
"""Bytes of a copy over the link, and how many copies go each way while the CPU's part is timed: 50 ms on PCIe 5."""
PLACES = ("auto", "cpu", "stream", "both")
"""Values of `offload.update`."""
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
    if type(rule) is not FusedAdam:
        return None, "only Adam and AdamW have a kernel"
    if asked == "auto" and numel < LEAST_NUMEL:
        return None, f"fewer than {format_count(LEAST_NUMEL)} parameters per rank"
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


@dataclass(frozen=True)
class UpdatePlace:
    """Where offloaded states are updated."""

    on_cpu: bool = False
    """Whether the CPU updates all of them."""
    share: float = 0.0
    """Else the part of them that the CPU updates, while they pass through the device, which updates the others."""
    kernel: CompiledAdam | None = None
    """With which it does so."""
    reason: str = "as asked"


def choose_update(
    settings: Settings,
    rule: FlatOptimizer,
    device: torch.device,
    placement: Placement,
    numel: int,
    sizing: Sizing,
    dtype: torch.dtype,
) -> UpdatePlace:
    """Return where the states of `numel` offloaded parameters of this dtype are updated, and why.

    `auto` has the CPU take a part only where that gives the same bits as the device alone: it changes no number.
    """
    asked = settings.update
    if asked not in PLACES:
        raise ValueError(f"update {asked!r} is not one of {', '.join(PLACES)}")
    away = {kind: [share.tier for share in placement.of(kind) if share.tier != HBM] for kind in KINDS}
    if device.type == "cpu" and asked in ("auto", "both"):
        return UpdatePlace(True, reason="the device is the CPU")
    if asked in ("cpu", "stream") or not away["optimizer"]:
        return UpdatePlace(asked == "cpu")
    if asked == "auto" and numel < LEAST_NUMEL:
        return UpdatePlace(reason=f"fewer than {format_count(LEAST_NUMEL)} parameters per rank")
    try:
        kernel = open_same(settings, rule, device, sizing, dtype, away["optimizer"])
    except Unavailable as error:
        return UpdatePlace(reason=f"the CPU takes no part: {error}")
    stream, cpu = measure_both(kernel, device, sizing, dtype, min(numel, MOST_NUMEL))
    share = share_of_cpu(stream, cpu, dtype.itemsize, [kind for kind, tiers in away.items() if tiers], sizing)
    facts = f"{stream * 1e9:.2f} s for a billion parameters through the GPU, {cpu * 1e9:.2f} s on the CPU, measured"
    if not share:
        return UpdatePlace(reason=f"the CPU takes no part: {facts}")
    return UpdatePlace(share=share, kernel=kernel, reason=f"{share:.0%} on the CPU: {facts}")


def open_same(
    settings: Settings,
    rule: FlatOptimizer,
    device: torch.device,
    sizing: Sizing,
    dtype: torch.dtype,
    tiers: Sequence[str],
) -> CompiledAdam:
    """Return the kernel for the CPU's part; raises Unavailable if there is none that gives the device's bits."""
    if settings.compile_update is False:
        raise Unavailable("its update may not be compiled, as asked")
    if settings.verify:
        raise Unavailable("what it changes in place would have to be verified there")
    if any(tier != "dram" for tier in tiers):
        raise Unavailable(f"states are on {', '.join(dict.fromkeys(tiers))}, not in host memory alone")
    if not sizing.fused_update or dtype == torch.float32 or not isinstance(rule, FusedAdam):
        raise Unavailable("only Adam and AdamW of bf16 and fp16 parameters have equal kernels")
    kernel = open_beside(rule)
    if not _same_bits(kernel, rule, device, dtype, sizing.split_master):
        raise Unavailable("its compiler rounds otherwise than the GPU")
    return kernel


def _same_bits(kernel: CompiledAdam, rule: FusedAdam, device: torch.device, dtype: torch.dtype, split: bool) -> bool:
    """Whether the kernel gives the bits of the device's, for masters and states."""
    fused = fused_update(rule)
    for (group, values), scale in zip(trials(rule), (1.0, 3.0, 0.7), strict=True):
        step = StepValues((group,), torch.tensor([3.0]), torch.tensor(scale), torch.tensor(0.0)).to(device)
        master, grad = values(), values().to(dtype)
        parameters, master = master_parts(master) if split else (narrow(master, dtype), master)
        ours = [parameters, master, grad, values(), values().square_()]
        theirs = [each.to(device) for each in ours]
        fused.begin(step)
        states = dict(zip(rule.state_names, theirs[3:], strict=True))
        fused.update(theirs[0], theirs[1], theirs[2], states, step, fused.parts([(Span(0, TRIED_NUMEL), 0, 0)]))
        states = dict(zip(rule.state_names, ours[3:], strict=True))
        call = kernel.call(TRIED_NUMEL, ours[0], ours[1], ours[2], states)
        *row, sign = fused.table.flatten().tolist()
        call.values, call.factor = Values(*row), fused.factor.item() * sign
        kernel.run([call], torch.get_num_threads())
        there = [each.cpu() for each in theirs]
        if not all(torch.equal(*(each.view(torch.int16) for each in pair)) for pair in zip(ours, there, strict=True)):
            return False
    return True


def measure_both(
    kernel: CompiledAdam, device: torch.device, sizing: Sizing, dtype: torch.dtype, numel: int
) -> tuple[float, float]:
    """Return the seconds per parameter to copy the states of a parameter in both directions, pinned, and those of its
    update on the host, while both go on.

    torch would round its own pinned memory up to a power of two and keep it.
    """
    pages = [Pages(LINK_NBYTES), Pages(LINK_NBYTES)]
    for each in pages:
        each.pin(Registrar())
    there = [torch.empty(LINK_NBYTES, dtype=torch.uint8, device=device) for _ in pages]
    streams = [torch.cuda.Stream(device) for _ in pages]
    rest = torch.int16 if sizing.split_master else torch.float32
    dtypes = {"parameters": dtype, "master": rest, "grad": dtype, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    memory = {name: Pages(numel * each.itemsize) for name, each in dtypes.items()}
    for each in memory.values():
        each.prefault()
    arrays = {name: memory[name].bytes.view(each)[:numel] for name, each in dtypes.items()}
    call = kernel.call(numel, arrays["parameters"], arrays["master"], arrays["grad"], arrays)
    call.values, call.factor = Values(0.0, 1.0, 0.1, 0.999, 0.001, -1e-3, 1.0, 1e-8), 1.0
    threads = max(1, sizing.threads - 1)  # the program's own one issues the device's work

    def copy(times: int) -> list[tuple[torch.Event, torch.Event]]:
        ends = []
        for stream, source, target in zip(streams, (pages[0].bytes, there[1]), (there[0], pages[1].bytes), strict=True):
            with torch.cuda.stream(stream):
                began = record_event(device, stream, True)
                for _ in range(times):
                    target.copy_(source, non_blocking=True)
                ends.append((began, record_event(device, stream, True)))
        return ends

    copy(1)
    kernel.run([call], threads)
    torch.cuda.synchronize(device)
    ends, began, updates = copy(NUM_COPIES), time.perf_counter(), 0
    while not updates or not all(end.query() for _, end in ends):
        kernel.run([call], threads)
        updates += 1
    update = (time.perf_counter() - began) / (updates * numel)
    torch.cuda.synchronize(device)
    moving = max(before.elapsed_time(end) for before, end in ends) / 1e3
    for each in (*pages, *memory.values()):
        each.release()
    return moving / NUM_COPIES / LINK_NBYTES * (2 * FP32 + rest.itemsize), update


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
    pieces = PieceUpdate(rule, cpu, sizing, compiled)
    piece = numel if compiled is not None else sizing.update_chunk(dtype.itemsize, "cpu")
    values = StepValues((group,), torch.ones(1), one, torch.zeros(()))
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for span in Span(0, numel).pieces(piece):
            pieces.update(slice(span.start, span.stop), arrays, grad, out, values, group, values.at(0))
        best = min(best, time.perf_counter() - began)
    return best / numel
