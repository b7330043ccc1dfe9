"""Compares planned seconds and bytes of a step of transformers' own models, by their traces, with measured ones.

    python benchmarks/traced_seconds.py --random 8 --seed 3

Families, sizes, batches, recomputation and placements are drawn by the seed. Rates are those that `zerocli env --bench`
has measured. Needs transformers; without a GPU the models are tiny, and only the table's form is of interest.
"""

from __future__ import annotations

import functools
import gc
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).parent))

from seconds import machine_here  # noqa: E402

import zerocli  # noqa: E402
from zerocli.config import hub  # noqa: E402
from zerocli.garbage import long_lived  # noqa: E402
from zerocli.plan.blocks import hugging  # noqa: E402
from zerocli.plan.models import resolve  # noqa: E402
from zerocli.plan.models.traced import trace  # noqa: E402
from zerocli.plan.search.candidates import weigh  # noqa: E402
from zerocli.plan.setup import Setup  # noqa: E402

FAMILIES = ("llama", "qwen3", "gpt_neox", "opt", "gemma2", "olmo2", "starcoder2", "phi", "bloom", "stablelm", "gpt2")


def draw(rng: random.Random, tiny: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a config.json would say, and the fields of a setup."""
    family = rng.choice(FAMILIES)
    heads = 2 if tiny else rng.choice([8, 12, 16, 24])
    hidden = heads * (16 if tiny else rng.choice([64, 128]))
    layers = 2 if tiny else rng.randint(6, 20)
    config = {
        "model_type": family, "vocab_size": 128 if tiny else rng.choice([32000, 50304]),
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": 4 * hidden, "head_dim": hidden // heads,
        "max_position_embeddings": 4096, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden,
    }  # fmt: skip
    if family in ("gpt2", "bloom"):
        config |= {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 4096}
    seq = 32 if tiny else rng.choice([512, 1024, 2048])
    batch = 1 if tiny else max(1, rng.choice([4096, 8192, 16384]) // seq)
    offload = rng.choice(["", "", "", "optimizer=cpu", "cpu"])
    return config, {"batch": batch, "seq": seq, "offload": offload, "recompute": rng.choice([False, True, "selective"])}


def measure(config: Any, setup: Setup, steps: int, warmup: int) -> tuple[float, int]:
    """Train the model; return the seconds of a step, and the most bytes that tensors took on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    make = functools.partial(hugging.build, config)
    engine = zerocli.shard(
        make(), "adamw", 1e-5, stage=setup.stage, precision=setup.precision, clip=1.0, recompute=setup.recompute,
        offload=setup.offload, defer_update=True, steps=1000,
    )  # fmt: skip
    try:
        batch = hugging.batch_of(engine.model, setup.batch, setup.seq)
        batch = {name: each.to(engine.device) if hasattr(each, "to") else each for name, each in batch.items()}
        seconds = []
        with long_lived():
            for _ in range(warmup + steps):
                began = time.perf_counter()
                loss = hugging.loss_of(engine(**batch))
                engine.backward(loss)
                engine.step()
                loss.item()
                seconds.append(time.perf_counter() - began)
    finally:
        engine.close()
    del engine, loss, batch
    gc.collect()
    most = 0
    if torch.cuda.is_available():
        most = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
    return statistics.median(seconds[warmup:]), most


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--random", "number", type=click.IntRange(1), default=8, help="Models.")
@click.option("--seed", type=int, default=0, help="Of the draw.")
@click.option("--steps", type=click.IntRange(1), default=4, help="Timed steps.")
@click.option("--warmup", type=click.IntRange(1), default=3, help="Steps before those.")
@click.option("--limit", type=float, default=1e9, help="Begin no model after so many seconds.")
@click.option("--json", "path", type=click.Path(), help="Write the rows here.")
def main(number: int, seed: int, steps: int, warmup: int, limit: float, path: str | None) -> None:
    """Print planned and measured seconds, and how far apart they are."""
    cuda, began, rng = torch.cuda.is_available(), time.perf_counter(), random.Random(seed)
    hardware, rows = machine_here(()), []
    for index in range(number):
        written, given = draw(rng, not cuda)
        if time.perf_counter() - began > limit:
            click.echo(f"the time is over: {number - index} of {number} models were not run")
            break
        about = f"{written['model_type']} {written['num_hidden_layers']}x{written['hidden_size']} {given}"
        try:
            setup = Setup(
                **given, stage=3, ranks=1, ranks_per_node=1, device="cuda" if cuda else "cpu", clip=1.0,
                precision="bf16" if cuda else "fp32",
            )  # fmt: skip
            config = hub.read_config(hub.ConfigFile(written, {}, "drawn"))
            with hub.offline():
                traced = trace("drawn", functools.partial(hugging.build, config), setup, resolve.loss)
            candidate = weigh(traced, setup, hardware)
            planned = candidate.estimate
            assert planned is not None
            took, most = measure(config, setup, steps, warmup)
        except Exception as error:  # a failed model is a row of the table, not the end of it
            rows.append({"case": about, "failed": repr(error)[:300]})
            click.echo(f"{index:3}   failed {about}: {rows[-1]['failed'][:160]}")
            continue
        row = {"case": about, "planned": planned.seconds, "seconds": took, "parts": planned.parts}
        bytes_planned = candidate.plan.allocated if most else 0
        rows.append(row | {"error": planned.seconds / took - 1, "bytes": [bytes_planned, most]})
        beside = f"{bytes_planned / most - 1:+7.2%} bytes" if most else ""
        error = rows[-1]["error"]
        click.echo(f"{index:3} {planned.seconds:8.4f} {took:8.4f} {error:+7.1%} {beside} {planned.bound:10} {about}")
        if path:
            Path(path).write_text(json.dumps({"schema": 1, "rows": rows}, indent=1))
    sizes = sorted(abs(row["error"]) for row in rows if "error" in row)
    if sizes:
        click.echo(f"{len(sizes)} models: {statistics.median(sizes):.1%} in the median, {sizes[-1]:.1%} at worst")


if __name__ == "__main__":
    main()
