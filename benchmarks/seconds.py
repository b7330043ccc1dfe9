"""Compares the planned seconds of a step with measured ones, on this machine, for configurations drawn by a seed.

    python benchmarks/seconds.py --random 20 --seed 7 --nvme-path DIR

Rates are those that `zerocli env --bench --nvme-path DIR` has measured; run it first. Each configuration trains a
built-in model in one process on one GPU (without a GPU: tiny models, and only the table's form is of interest).
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import zerocli  # noqa: E402
from zerocli.config import ModelConfig  # noqa: E402
from zerocli.garbage import long_lived  # noqa: E402
from zerocli.models import build  # noqa: E402
from zerocli.plan.blocks.inputs import shape_of  # noqa: E402
from zerocli.plan.memory.build import plan_model  # noqa: E402
from zerocli.plan.search.automatic import hardware_here  # noqa: E402
from zerocli.plan.search.recompute import room_here  # noqa: E402
from zerocli.plan.setup import Setup  # noqa: E402
from zerocli.plan.time.compute import computed  # noqa: E402
from zerocli.plan.time.hardware import Hardware  # noqa: E402
from zerocli.plan.time.seconds import Estimate, estimate  # noqa: E402

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One configuration: a model and its setup, in words that `shard` takes too."""

    model: ModelConfig
    batch: int
    seq: int
    offload: str = ""
    recompute: Any = False
    accumulate: int = 1
    compiled: bool = False
    optimizer: str = "adamw"

    def setup(self, device: str) -> Setup:
        names = ("batch", "seq", "offload", "recompute", "accumulate", "compiled", "optimizer")
        fields = {name: getattr(self, name) for name in names}
        precision = "bf16" if device == "cuda" else "fp32"
        return Setup(**fields, stage=3, ranks=1, ranks_per_node=1, device=device, precision=precision, clip=1.0)

    def __str__(self) -> str:
        model = self.model
        words = [f"{model.family} {model.layers}x{model.hidden}", f"{self.batch}x{self.seq}"]
        words += [f"x{self.accumulate}"] if self.accumulate > 1 else []
        words += [str(self.recompute)] if self.recompute else []
        words += [str(model.vocab)] if model.vocab % 8 else []
        words += [self.optimizer] if self.optimizer != "adamw" else []
        return " ".join([*words, self.offload, "compiled" if self.compiled else ""]).strip()


def machine_here(nvme_path: tuple[str, ...], gpu_memory: int = 0) -> Hardware:
    """Return this machine with the rates that were measured on it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    setup = Setup(ranks=1, ranks_per_node=1, device=device)
    return hardware_here(nvme_path, setup, room_here(device, 1, gpu_memory))


def predict(case: Case, hardware: Hardware) -> tuple[Estimate, int]:
    """Return the estimate, and the bytes that the plan needs on the device."""
    setup = case.setup("cuda" if torch.cuda.is_available() else "cpu")
    shape = shape_of(case.model, case.seq)
    plan = plan_model(shape, setup)
    return estimate(plan, computed(shape, setup, hardware.host), hardware), plan.needed("hbm")


def measure(case: Case, nvme_path: tuple[str, ...], steps: int, warmup: int, cap: int = 0) -> dict[str, Any]:
    """Train the case; return seconds per step, the device's peak and the seconds that building took."""
    cuda = torch.cuda.is_available()
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total) if cap else 1.0)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_allocated() < 1 << 30, "the configuration before it left memory behind"
    began = time.perf_counter()
    setup = case.setup("cuda" if cuda else "cpu")
    model = build(case.model, case.seq, "meta")
    engine = zerocli.shard(
        *(model, case.optimizer, 1e-4), stage=3, precision=setup.precision, clip=1.0, recompute=case.recompute,
        weight_decay=0.1, offload=case.offload, accumulate=case.accumulate, nvme_path=nvme_path,
        compile=case.compiled, steps=1000, units=model.unit_modules(),
        defer_update=True,
    )  # fmt: skip
    built = time.perf_counter() - began
    try:
        tokens = torch.randint(0, case.model.vocab, (case.batch, case.seq), device=engine.device)
        seconds, losses, phases = [], [], []
        with long_lived():
            for _ in range(warmup + steps):
                start = time.perf_counter()
                marks = [_mark(cuda)]
                for _ in range(case.accumulate):
                    loss = engine(tokens, tokens)
                    marks.append(_mark(cuda))
                    engine.backward(loss)
                    marks.append(_mark(cuda))
                engine.step()
                losses.append(loss.item())  # the host follows the device, one forward and backward behind the update
                seconds.append(time.perf_counter() - start)
                phases.append(_between(marks))
        peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    finally:
        engine.close()
        loss = tokens = None  # the graph refers to the parameters
        del engine, model
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    timed = seconds[warmup:]
    took = {"seconds": statistics.median(timed), "fastest": min(timed), "slowest": max(timed)}
    took["measured_phases"] = phases[-1]
    took |= {"peak": peak, "reserved": reserved, "built": built, "first_step": seconds[0]}
    return took | {"last_loss": losses[-1]}


def _mark(cuda: bool) -> Any:
    """Return a moment of the device."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(marks: list[Any]) -> list[float]:
    """Return the seconds between moments: of the forward and backward of each micro-step, in turn."""
    pairs = itertools.pairwise(marks)
    if isinstance(marks[0], float):
        return [after - before for before, after in pairs]
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def draw(rng: random.Random, tiny: bool, wide: bool = False) -> Case:
    """Draw a configuration; most of those on a GPU have 0.1 to 2 billion parameters.

    With `wide` some have a vocabulary that is no multiple of 8, compiled blocks or Muon.
    """
    family = rng.choice(["gpt2", "llama"])
    if tiny:
        heads, hidden, layers, vocab, seq, batch = 2, 64, rng.randint(2, 4), 256, 32, 2
    else:
        heads = rng.choice([8, 12, 16, 20, 24, 32])
        hidden = heads * rng.choice([64, 128])
        vocab, seq = rng.choice([32000, 50304, 128256]), rng.choice([512, 1024, 2048, 4096])
        each = 12 * hidden * hidden
        layers = max(2, min(40, int((rng.uniform(0.15e9, 1.6e9) - 2 * vocab * hidden) / each)))
        batch = max(1, rng.choice([8192, 16384, 32768]) // seq)
    kv_heads = rng.choice([0, heads // 4]) if family == "llama" and heads % 4 == 0 else 0
    model = ModelConfig(
        family=family, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab, tie=rng.random() < 0.3
    )
    size = rng.randint(1, 8)
    offload = rng.choice(
        [
            "",
            "",
            "",
            "optimizer=cpu",
            "cpu",
            f"optimizer=hbm:{size}GiB+cpu",
            "optimizer=cpu,grads=cpu",
            "activations=cpu",
        ]
        + ["optimizer=hbm:2GiB+cpu,activations=cpu", "params=cpu,optimizer=hbm:1GiB+nvme", "optimizer=nvme"]
    )
    if "nvme" in offload:  # a step on a slow disk takes its time
        model = dataclasses.replace(model, layers=max(2, layers // 4))
    recompute = rng.choice([False, True, True, "selective", layers // 2])
    if recompute == layers // 2 and model.layers != layers:
        recompute = True
    case = Case(model, batch, seq, offload, recompute, rng.choice([1, 1, 1, 2]))
    if not wide:
        return case
    vocab = rng.choice([model.vocab, model.vocab + rng.randint(1, 7)])
    optimizer = rng.choice(["adamw", "adamw", "muon"])
    compiled = rng.random() < 0.3
    return dataclasses.replace(
        case, model=dataclasses.replace(model, vocab=vocab), optimizer=optimizer, compiled=compiled
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--random", "number", type=click.IntRange(1), default=20, help="Configurations.")
@click.option("--seed", type=int, default=0, help="Of the draw.")
@click.option("--first", type=click.IntRange(0), default=0, help="Begin with this one.")
@click.option("--compiled", is_flag=True, help="Compile the blocks of every configuration.")
@click.option("--wide", is_flag=True, help="Draw odd vocabularies, compiled blocks and Muon too.")
@click.option("--only", default="", metavar="WORD", help="Skip configurations without this word, such as muon.")
@click.option("--nvme-path", multiple=True, metavar="DIR", help="Folder of the nvme tier.")
@click.option("--steps", type=click.IntRange(1), default=4, help="Timed steps.")
@click.option("--warmup", type=click.IntRange(1), default=3, help="Steps before those.")
@click.option("--limit", type=float, default=1e9, help="Begin no configuration after so many seconds.")
@click.option("--json", "path", type=click.Path(), help="Write the rows here.")
def main(
    number: int, seed: int, first: int, compiled: bool, wide: bool, only: str, nvme_path: tuple[str, ...], steps: int,
    warmup: int, limit: float, path: str | None,
) -> None:  # fmt: skip
    """Print planned and measured seconds, and how far apart they are."""
    began, rng = time.perf_counter(), random.Random(seed)
    hardware = machine_here(nvme_path)
    rates = f"products {hardware.products:.0f} TFLOPS, memory {hardware.hbm:.0f}, link {hardware.pcie:.1f}"
    click.echo(f"{hardware.name}, {hardware.source}: {rates}, disk {hardware.disk:.2f} GB/s")
    rows: list[dict[str, Any]] = []
    for index in range(number):
        case = draw(rng, not torch.cuda.is_available(), wide)
        case = dataclasses.replace(case, compiled=compiled or case.compiled)
        if index < first or only not in str(case):
            continue
        if time.perf_counter() - began > limit:
            click.echo(f"the time is over: {number - index} of {number} configurations were not run")
            break
        planned, needed = predict(case, hardware)
        row: dict[str, Any] = {"case": str(case), "planned": planned.seconds, "bound": planned.bound, "needed": needed}
        try:
            row |= measure(case, nvme_path, steps, warmup)
            row["error"] = planned.seconds / row["seconds"] - 1
            took = f"{row['seconds']:8.4f} ({row['fastest']:.4f} to {row['slowest']:.4f})"
            click.echo(f"{index:3} {row['planned']:8.4f} {took} {row['error']:+7.1%} {planned.bound:12} {case}")
        except Exception as error:  # a failed configuration is a row of the table, not the end of it
            row["failed"] = repr(error)[:300]
            click.echo(f"{index:3} {row['planned']:8.4f}   failed {planned.bound:12} {case}: {row['failed'][:150]}")
        rows.append(row | {"parts": planned.parts, "phases": planned.phases})
        if path:  # after each, so that a run that is ended leaves what it has measured
            found = {"schema": 1, "hardware": dataclasses.asdict(hardware), "rows": rows}
            Path(path).write_text(json.dumps(found, indent=2))
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        sizes = sorted(map(abs, errors))
        summary = f"{statistics.median(sizes):.1%} in the median, {sizes[-1]:.1%} at worst"
        click.echo(f"{len(errors)} configurations: {summary}; from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main()
