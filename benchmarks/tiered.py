"""One GPU, states on other tiers: seconds a step, device peak, host peak. `python benchmarks/tiered.py --help`."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import zerocli  # noqa: E402
from zerocli.config import ModelConfig  # noqa: E402
from zerocli.models import build  # noqa: E402

SHAPES = {"1.41b": (24, 2048, 16), "2.77b": (32, 2560, 20), "tiny": (4, 256, 4)}


@click.command(context_settings={"show_default": True})
@click.option("--shape", type=click.Choice([*SHAPES]), default="2.77b", help="Layers x hidden x heads; vocab 50304.")
@click.option("--offload", default="cpu", help="Placement.")
@click.option("--update", default="auto", help="auto, cpu or stream.")
@click.option("--nvme-path", multiple=True, help="Folder of the nvme tier.")
@click.option("--staging", default="512MiB", help="Memory that states are streamed through.")
@click.option("--read-ahead", default="512MiB", help="Host memory for parameters read ahead from disks.")
@click.option("--batch", default=16, help="Sequences.")
@click.option("--seq", default=1024, help="Tokens each.")
@click.option("--steps", default=6, help="Timed steps.")
@click.option("--warmup", default=2, help="Steps before those.")
@click.option("--json", "json_path", type=click.Path(), help="Write the result here.")
def main(shape: str, offload: str, update: str, nvme_path: tuple[str, ...], staging: str, read_ahead: str,
         batch: int, seq: int, steps: int, warmup: int, json_path: str | None) -> None:  # fmt: skip
    """Train a GPT-2 shape in bf16 at stage 3 with recomputation and clipping at 1.0, and time its steps."""
    from zerocli.layout.sizes import parse_bytes

    layers, hidden, heads = SHAPES[shape]
    config = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=50304, tie=False)
    model = build(config, seq, "meta")
    began = time.perf_counter()
    engine = zerocli.shard(
        model, lr=1e-4, stage=3, precision="bf16", clip=1.0, recompute=True, weight_decay=0.1, offload=offload,
        update=update, nvme_path=nvme_path, staging_nbytes=parse_bytes(staging),
        read_ahead_nbytes=parse_bytes(read_ahead), units=model.unit_modules(), defer_update=True,
    )  # fmt: skip
    built = time.perf_counter() - began
    tokens = torch.randint(0, 50304, (batch, seq), device=engine.device)
    seconds, losses = [], []
    for step in range(warmup + steps):
        if step == warmup and torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())  # the host follows the device, one forward and backward behind the update
        seconds.append(time.perf_counter() - start)
    timed = seconds[warmup:]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    result = {
        "schema": 1,
        "shape": shape,
        "parameters": engine.numel,
        "offload": offload,
        "update": "cpu" if engine.updater.on_cpu else "stream",
        "reason": engine.update.reason,
        "median_seconds": statistics.median(timed),
        "seconds": timed,
        "hbm_gib": peak / 2**30,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "build_seconds": built,
        "losses": losses,
        "waits": engine.waits.take().seconds(),
        "tiers": engine.tiers.notes,
    }
    engine.close()
    print(json.dumps(result))
    if json_path:
        Path(json_path).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
