"""Activation checkpoints on one GPU: what moving them off the device costs and saves.

    python benchmarks/checkpoints.py cost            step time, checkpoints on the device against host memory
    python benchmarks/checkpoints.py policies        step time and peak: kept, recomputed selectively and whole
    python benchmarks/checkpoints.py policies --shape host --vocab 64 --batch 1 --seq 8    host time alone, on a CPU
    python benchmarks/checkpoints.py longest         longest sequence in a memory budget, either way
    python benchmarks/checkpoints.py fragmentation   reserved against allocated memory after many steps

Model states stay on the device (stage 3, one rank); GPT-2 shapes, untied, vocab 50304, bf16, clipping at 1.0.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import zerocli  # noqa: E402
from zerocli.config import ModelConfig  # noqa: E402
from zerocli.layout.sizes import parse_bytes  # noqa: E402
from zerocli.models import build  # noqa: E402

SHAPES = {"1.41b": (24, 2048, 16), "2.77b": (32, 2560, 20), "tiny": (4, 256, 4), "host": (16, 32, 4)}
WAYS: dict[str, dict[str, Any]] = {
    "device": {"recompute": True},
    "cpu": {"offload": "activations=cpu"},
    "keep": {},
    "selective": {"recompute": "selective"},
}
CUDA = torch.cuda.is_available()


def make(shape: str, seq: int, way: str, vocab: int = 50304) -> zerocli.Engine:
    layers, hidden, heads = SHAPES[shape]
    torch.manual_seed(0)
    model = build(ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=vocab, tie=False), seq, "meta")
    settings: dict[str, Any] = {"stage": 3, "precision": "bf16", "clip": 1.0, "weight_decay": 0.1}
    return zerocli.shard(model, lr=1e-4, units=model.unit_modules(), **settings, **WAYS[way])


def step(engine: zerocli.Engine, tokens: torch.Tensor) -> torch.Tensor:
    loss = engine(tokens, tokens)
    engine.backward(loss)
    engine.step()
    return loss


def clean() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def peak() -> tuple[int, int]:
    """Return the most bytes allocated and reserved."""
    return (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if CUDA else (0, 0)


@click.group()
def main() -> None:
    """Measure activation checkpoints."""


@main.command()
@click.option("--shape", type=click.Choice([*SHAPES]), default="2.77b", show_default=True)
@click.option("--batch", default=16, show_default=True)
@click.option("--seq", default=1024, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--steps", default=6, show_default=True)
def cost(shape: str, batch: int, seq: int, rounds: int, steps: int) -> None:
    """Train with checkpoints on the device and on the host by turns; compare step time and peak."""
    turns: dict[str, list[dict[str, Any]]] = {"device": [], "cpu": []}
    for number in range(rounds):
        for way in list(turns)[:: 1 if number % 2 == 0 else -1]:
            clean()
            engine = make(shape, seq, way)
            tokens = torch.randint(0, 50304, (batch, seq), device=engine.device)
            for _ in range(2):
                step(engine, tokens)
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            seconds = []
            for _ in range(steps):
                began = now()
                loss = step(engine, tokens)
                seconds.append(now() - began)
            turn = {"seconds": statistics.median(seconds), "peak_gib": peak()[0] / 2**30, "loss": loss.item()}
            turn["checkpoints_on_device_gib"] = engine.activations.peak_nbytes / 2**30
            turns[way].append(turn)
            print(way, turn, file=sys.stderr)
            engine.close()
            del engine, loss, tokens
    ratios = [c["seconds"] / d["seconds"] for c, d in zip(turns["cpu"], turns["device"], strict=True)]
    print(json.dumps({"schema": 1, "shape": shape, "turns": turns, "cpu_over_device": statistics.median(ratios)}))


@main.command()
@click.option("--shape", type=click.Choice([*SHAPES]), default="1.41b", show_default=True)
@click.option("--batch", default=16, show_default=True)
@click.option("--seq", default=1024, show_default=True)
@click.option("--vocab", default=50304, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--steps", default=10, show_default=True)
def policies(shape: str, batch: int, seq: int, vocab: int, rounds: int, steps: int) -> None:
    """Train with activations kept, recomputed selectively and recomputed whole by turns; the least step time counts."""
    names = {"keep": "keep", "selective": "selective", "device": "recompute"}
    clock = now if CUDA else time.process_time
    best: dict[str, float] = {}
    peaks, losses = {}, set()
    for number in range(rounds):
        for way, name in list(names.items())[:: 1 if number % 2 == 0 else -1]:
            clean()
            engine = make(shape, seq, way, vocab)
            torch.manual_seed(1)
            tokens = torch.randint(0, vocab, (batch, seq), device=engine.device)
            losses.add(step(engine, tokens).item())
            for _ in range(steps):
                began = clock()
                step(engine, tokens)
                best[name] = min(best.get(name, 1e9), clock() - began)
            peaks[name] = peak()[0] / 2**30
            engine.close()
            del engine
    assert len(losses) == 1, losses
    layers = SHAPES[shape][0]
    for name, seconds in best.items():
        more = (seconds - best["keep"]) / layers * 1e6
        print(f"{name:10}{seconds:10.4f} s a step, {more:8.0f} us a block more than keep, peak {peaks[name]:.2f} GiB")


@main.command()
@click.option("--shape", type=click.Choice([*SHAPES]), default="1.41b", show_default=True)
@click.option("--gpu-memory", default="40GiB", show_default=True, help="Cap on what the allocator may take.")
@click.option("--probe", default=32768, show_default=True, help="Sequence from which, with its double, to extrapolate.")
@click.option("--tries", default=3, show_default=True, help="Attempts to narrow the edge down on the device.")
def longest(shape: str, gpu_memory: str, probe: int, tries: int) -> None:
    """Find the longest sequence at batch 1 that runs: on the device by bisection, then on the host twice as long.

    Attention takes time in the square of the sequence: beyond twice the device's longest only the estimate is given.
    """
    cap = parse_bytes(gpu_memory)
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    found: dict[str, Any] = {}
    for way in ("device", "cpu"):
        short, long = (attempt(shape, seq, way) for seq in (probe, 2 * probe))
        assert short and long, f"{2 * probe} tokens do not fit already"
        slope = (long - short) / probe
        estimate = probe + int((cap - short) / slope)
        ran, failed = 2 * probe, round_to(estimate * 1.06)
        for _ in range(tries if way == "device" else 1):
            seq = round_to(
                (ran + 2 * failed) / 3 if way == "device" else min(2 * found["device"]["ran"], 0.95 * estimate)
            )
            used = attempt(shape, seq, way)
            print(way, seq, f"{used / 2**30:.2f} GiB" if used else "out of memory", file=sys.stderr)
            ran, failed = (seq, failed) if used else (ran, seq)
        found[way] = {"bytes_per_token": slope, "estimate": estimate, "ran": ran, "failed_or_untried": failed}
    found["ratio"] = found["cpu"]["ran"] / found["device"]["ran"]
    print(json.dumps({"schema": 1, "shape": shape, "cap": cap, **found}))


def round_to(seq: float, multiple: int = 256) -> int:
    return int(seq) // multiple * multiple


def attempt(shape: str, seq: int, way: str) -> int | None:
    """Train one step at batch 1; return the peak allocated bytes, or None if memory ran out."""
    clean()
    engine = None
    try:
        engine = make(shape, seq, way)
        step(engine, torch.randint(0, 50304, (1, seq), device=engine.device))
        torch.cuda.synchronize()
        return peak()[0]
    except torch.OutOfMemoryError:
        return None
    finally:
        if engine is not None:
            engine.close()


@main.command()
@click.option("--shape", type=click.Choice([*SHAPES]), default="1.41b", show_default=True)
@click.option("--batch", default=16, show_default=True)
@click.option("--seq", default=1024, show_default=True)
@click.option("--steps", default=50, show_default=True)
def fragmentation(shape: str, batch: int, seq: int, steps: int) -> None:
    """Train many steps; compare what the allocator took from the device with what was used at the peak."""
    result: dict[str, Any] = {"schema": 1, "shape": shape, "steps": steps}
    for way in ("device", "cpu"):
        clean()
        engine = make(shape, seq, way)
        tokens = torch.randint(0, 50304, (batch, seq), device=engine.device)
        for _ in range(steps):
            step(engine, tokens)
        now()
        allocated, reserved = peak()
        share = (reserved - allocated) / max(reserved, 1)
        result[way] = {"allocated_gib": allocated / 2**30, "reserved_gib": reserved / 2**30, "share": share}
        engine.close()
        del engine, tokens
    print(json.dumps(result))


if __name__ == "__main__":
    main()
