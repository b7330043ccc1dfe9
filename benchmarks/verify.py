"""What `offload.verify` costs: seconds a step with and without it, in turn. `python benchmarks/verify.py --help`."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiered import SHAPES  # noqa: E402

import zerocli  # noqa: E402
from zerocli.config import ModelConfig  # noqa: E402
from zerocli.layout.sizes import parse_bytes  # noqa: E402
from zerocli.models import build  # noqa: E402


@click.command(context_settings={"show_default": True})
@click.option("--shape", type=click.Choice([*SHAPES]), default="1.41b", help="Layers x hidden x heads; vocab 50304.")
@click.option("--offload", default="cpu", help="Placement.")
@click.option("--update", default="auto", help="auto, cpu or stream.")
@click.option("--nvme-path", multiple=True, help="Folder of the nvme tier.")
@click.option("--staging", default="512MiB", help="Memory that states are streamed through.")
@click.option("--read-ahead", default="512MiB", help="Host memory for parameters read ahead from disks.")
@click.option("--batch", default=16, help="Sequences.")
@click.option("--seq", default=1024, help="Tokens each.")
@click.option("--steps", default=8, help="Timed steps of each.")
@click.option("--warmup", default=2, help="Steps of each before those.")
@click.option("--deterministic", is_flag=True, help="Use torch's deterministic kernels, so that losses can be equal.")
def main(shape: str, offload: str, update: str, nvme_path: tuple[str, ...], staging: str, read_ahead: str,
         batch: int, seq: int, steps: int, warmup: int, deterministic: bool) -> None:  # fmt: skip
    """Train one model twice in one process, a step of each in turn, in bf16 at stage 3 with recomputation."""
    torch.use_deterministic_algorithms(deterministic)
    layers, hidden, heads = SHAPES[shape]
    config = ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=50304, tie=False)
    engines = {}
    for verify in (False, True):
        model = build(config, seq, "meta")
        engines[verify] = zerocli.shard(
            model, lr=1e-4, stage=3, precision="bf16", clip=1.0, recompute=True, weight_decay=0.1, offload=offload,
            update=update, nvme_path=nvme_path, staging_nbytes=parse_bytes(staging),
            read_ahead_nbytes=parse_bytes(read_ahead), units=model.unit_modules(),
            verify=verify,
        )  # fmt: skip
    device = engines[True].device
    tokens = torch.randint(0, 50304, (batch, seq), device=device)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    processor: dict[bool, list[float]] = {False: [], True: []}
    losses: dict[bool, list[float]] = {False: [], True: []}
    for step in range(warmup + steps):
        for verify in (False, True) if step % 2 else (True, False):
            engine = engines[verify]
            start, used = time.perf_counter(), time.process_time()
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
            engine.synchronize()  # the update to its end: the next step is the other engine's
            losses[verify].append(loss.item())
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[verify].append(time.perf_counter() - start)
            processor[verify].append(time.process_time() - used)
    timed = {verify: values[warmup:] for verify, values in seconds.items()}
    medians = {verify: statistics.median(values) for verify, values in timed.items()}
    result = {
        "schema": 1,
        "shape": shape,
        "parameters": engines[True].numel,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "offload": offload,
        "update": "cpu" if engines[True].updater.on_cpu else "stream",
        "median_seconds": {"plain": medians[False], "verified": medians[True]},
        "ratio": medians[True] / medians[False],
        "ratio_of_fastest": min(timed[True]) / min(timed[False]),
        "ratio_of_processor_time": statistics.median(processor[True][warmup:])
        / statistics.median(processor[False][warmup:]),
        "seconds": {"plain": timed[False], "verified": timed[True]},
        "losses_equal": losses[False] == losses[True],
    }
    for engine in engines.values():
        engine.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
