"""The times of `hardware.HostTimes` on this machine: models so small that only the launching of kernels takes time.

The loops are those of training, so the figures have Python's, torch's and the engine's part, as this machine runs them.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

from zerocli.config import ModelConfig, read_placement
from zerocli.engine import api
from zerocli.engine.engine import Engine
from zerocli.garbage import long_lived
from zerocli.models import build
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import num_chunks
from zerocli.plan.time.hardware import HOST
from zerocli.plan.time.seconds import num_transfers

LAYERS, WIDTH, TOKENS = 16, 128, 32
TURNS, STEPS = 8, 3
"""Each kind has at most this many turns of this many steps."""
LEAST_TURNS, SECONDS = 2, 3.0
"""After this many turns no other begins once a family has taken so long."""
LOOP = 10_000
"""Passes of the loop that gives the host's pace; half a millisecond."""


def loop_seconds() -> float:
    """Return what a fixed loop of Python takes at this moment: on a virtual machine's core, whose other half another
    machine may use, up to twice as long from one second to the next; and launching takes as much longer.
    """
    began, total = time.perf_counter(), 0
    for number in range(LOOP):
        total += number * number
    return time.perf_counter() - began


@dataclass(frozen=True)
class Kind:
    """One kind of training step."""

    recompute: bool | str = False
    offload: str = ""
    staging: int = 512 << 20

    def counts(self, model: ModelConfig, precision: str) -> dict[str, float]:
        """Return how often each of the times of `Hardware` is in a step."""
        layers, units = model.layers, model.layers + 2  # embedding and head are launched too
        offload = read_placement(self.offload)
        setup = Setup(stage=3, ranks=1, precision=precision, offload=offload, staging_nbytes=self.staging)
        chunks = num_chunks(shape_of(model, TOKENS).units, setup) if "optimizer" in self.offload else 0
        gradients, parameters = "grads" in self.offload, "params" in self.offload
        return {
            "host_block": units,
            "host_whole": layers * (self.recompute is True),
            "host_selective": layers * (self.recompute == "selective"),
            "host_moved": 2 * units * parameters,
            "host_reduced": units * gradients,
            "host_kept": layers * ("activations" in self.offload),
            "host_streamed": units * bool(chunks),
            "host_chunk": chunks,
            "host_transfer": chunks * num_transfers(setup, 1, gradients, parameters),
        }


EVERYTHING, MANY = "optimizer=cpu,grads=cpu,params=cpu", 4 << 20
KINDS = (
    *(Kind(), Kind(True), Kind("selective"), Kind(True, "activations=cpu")),
    *(Kind(offload="optimizer=cpu"), Kind(offload="optimizer=cpu,grads=cpu"), Kind(offload=EVERYTHING)),
    *(Kind(offload="optimizer=cpu", staging=MANY), Kind(offload=EVERYTHING, staging=MANY)),  # many chunks
)
"""As many as there are times, so that their steps give these; the first of them give the first times."""
FAMILIES = {"gpt2": KINDS, "llama": KINDS[:3]}
"""What offloading adds depends on no family."""


def measure_host(device: torch.device, meanwhile: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Return the seconds by the names of `Hardware`: the mean of both families, at the host's mean pace.

    `meanwhile` is called between the families, so that they see more of the host's phases.
    """
    precision = "bf16" if device.type == "cuda" else "fp32"
    found, loops = defaultdict[str, list[float]](list), []
    for number, (family, kinds) in enumerate(FAMILIES.items()):
        if number:
            meanwhile()
        model = ModelConfig(family=family, layers=LAYERS, hidden=WIDTH, heads=2, vocab=512, tie=False)
        took, here = _steps(model, kinds, precision, device)
        gc.collect()  # engines and models refer to each other
        for name, relative in solve({kind: kind.counts(model, precision) for kind in kinds}, took).items():
            found[name].append(relative)
        loops += here
    pace = statistics.fmean(loops)
    return {name: max(0.0, pace * statistics.fmean(each)) for name, each in found.items()}


def solve(counts: Mapping[Kind, Mapping[str, float]], took: Mapping[Kind, float]) -> dict[str, float]:
    """Return the times of which each kind's step consists: the first of `HOST`, as many as there are kinds."""
    names = HOST[: len(counts)]
    rows = [[each[name] for name in names] for each in counts.values()]
    times = numpy.linalg.solve(numpy.array(rows), numpy.array([took[kind] for kind in counts]))
    return dict(zip(names, map(float, times), strict=True))


def _steps(
    model: ModelConfig, kinds: Sequence[Kind], precision: str, device: torch.device
) -> tuple[dict[Kind, float], list[float]]:
    """Return the time of a step of each kind relative to that of the loops just before and after it, and these.

    They take turns: a host is slower at times, and differences count. A turn's first step is not counted, since it
    finds the host's caches full of what the other kinds use; nor is the first turn, which finds nothing built.
    """
    relative: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    loops: list[float] = []
    tokens = torch.zeros((1, TOKENS), dtype=torch.int64, device=device)
    with contextlib.ExitStack() as closing:
        engines = {}
        for kind in kinds:
            engines[kind] = _engine(model, kind, precision, device)
            closing.callback(engines[kind].close)
        closing.enter_context(long_lived())  # as in training
        began = time.perf_counter()
        for turn in range(1 + TURNS):
            if turn > LEAST_TURNS and time.perf_counter() - began > SECONDS:
                break
            for kind in kinds:
                _step(engines[kind], tokens)
                loops.append(loop_seconds())
                for _ in range(1, STEPS):
                    took = _step(engines[kind], tokens)
                    loops.append(loop_seconds())
                    relative[kind] += [2 * took / sum(loops[-2:])] if turn else []
    return {kind: statistics.median(each) for kind, each in relative.items()}, loops


def _engine(config: ModelConfig, kind: Kind, precision: str, device: torch.device) -> Engine:
    model = build(config, TOKENS, "meta")
    return api.shard(
        *(model, "adamw", 1e-4), stage=3, precision=precision, clip=1.0, recompute=kind.recompute,
        offload=kind.offload, staging_nbytes=kind.staging, device=str(device), units=model.unit_modules(),
        defer_update=True, update="stream",
    )  # fmt: skip


def _step(engine: Engine, tokens: torch.Tensor) -> float:
    began = time.perf_counter()
    loss = engine(tokens, tokens)
    engine.backward(loss)
    engine.step()
    loss.item()
    return time.perf_counter() - began
