"""Seconds of a step against device memory: what `--auto` chooses under caps, beside a grid of placements by hand.

    python benchmarks/frontier.py --caps 8,12,16,24,32,48 --json frontier.json --plot frontier.svg

The model is GPT-2's with 32 x 2560 (2.77B parameters), batch 16 x 1024, bf16, clipping, on one GPU. A cap limits the
allocator. Each placement of the grid is measured once, without a cap; under a cap the best of those is compared with
`--auto` whose peak is within it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as `zerocli train` does for itself
import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

from seconds import GIB, Case, machine_here, measure  # noqa: E402

from zerocli import config as configs  # noqa: E402
from zerocli.config import ModelConfig  # noqa: E402
from zerocli.config.options import AUTOMATIC  # noqa: E402
from zerocli.layout.recompute import read_recompute  # noqa: E402
from zerocli.plan.blocks.inputs import shape_of  # noqa: E402
from zerocli.plan.models.formula import Formula  # noqa: E402
from zerocli.plan.search.automatic import choose_setup, flags  # noqa: E402

GRID = (
    ("", "keep"),
    ("optimizer=hbm:18GiB+cpu", "selective"),
    ("", "recompute"),
    ("optimizer=hbm:24GiB+cpu", "recompute"),
    ("optimizer=hbm:20GiB+cpu", "recompute:16"),
    ("optimizer=hbm:16GiB+cpu", "recompute"),
    ("optimizer=hbm:8GiB+cpu", "recompute"),
    ("optimizer=cpu", "selective"),
    ("optimizer=cpu", "recompute"),
    ("optimizer=cpu,grads=cpu", "recompute"),
    ("cpu", "recompute"),
    ("params=hbm:3GiB+cpu,grads=cpu,optimizer=cpu,activations=cpu", "recompute"),
    ("params=cpu,grads=cpu,optimizer=cpu,activations=cpu", "recompute"),
)
"""(placement, activations.policy) by hand."""
PEERS = {"DeepSpeed 2, optimizer": (17.4, 1.86), "FSDP2, CPU offload": (12.4, 2.99)}
"""GiB on the device and seconds per step of peers on one H200, measured with their own programs."""


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--model", default="32x2560x20", help="Layers x hidden x heads of a GPT-2, or a configuration's name.")
@click.option("--batch", type=int, default=16, help="Sequences.")
@click.option("--seq", type=int, default=1024, help="Tokens each.")
@click.option("--vocab", type=int, default=50304, help="Tokens that a GPT-2 knows.")
@click.option("--caps", default="8,12,16,24,32,48", help="GiB of the device.")
@click.option("--grid/--no-grid", default=True, help="Whether placements by hand are measured.")
@click.option("--steps", type=int, default=3, help="Timed steps.")
@click.option("--warmup", type=int, default=2, help="Steps before those.")
@click.option("--limit", type=float, default=1e9, help="Begin nothing after so many seconds.")
@click.option("--nvme-path", multiple=True, metavar="DIR", help="Folder of the nvme tier.")
@click.option("--json", "path", type=click.Path(), help="Write the rows here.")
@click.option("--plot", type=click.Path(), help="Draw the frontier here, as SVG.")
def main(
    model: str, batch: int, seq: int, vocab: int, caps: str, grid: bool, steps: int, warmup: int, limit: float,
    nvme_path: tuple[str, ...], path: str | None, plot: str | None,
) -> None:  # fmt: skip
    """Measure what `--auto` chooses under each cap, and the grid."""
    began = time.perf_counter()
    config = model_of(model, vocab)
    base = Case(config, batch, seq)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []

    def run(kind: str, case: Case, cap: int, planned: float | None) -> None:
        row: dict[str, Any] = {"kind": kind, "cap": cap / GIB, "case": f"{case.offload or '-'} {case.recompute}"}
        if time.perf_counter() - began > limit:
            return
        try:
            found = measure(case, nvme_path, steps, warmup, cap)
            row |= {
                "seconds": found["seconds"],
                "peak": found["peak"] / GIB,
                "planned": planned,
                "built": found["built"],
            }
        except Exception as error:  # one that does not run is a row too
            row["failed"] = repr(error)[:300]
        rows.append(row)
        click.echo(json.dumps(row))

    for text in (each for each in caps.split(",") if each):
        cap = int(float(text) * GIB)
        hardware = machine_here(nvme_path, cap)
        started = time.perf_counter()
        choice = choose_setup(Formula(shape_of(config, seq)), base.setup(device), hardware, frozenset(AUTOMATIC))
        if choice.best is None:
            click.echo(f"{text} GiB: nothing fits")
            continue
        best = choice.best
        click.echo(f"{text} GiB: {flags(best)} (chosen in {time.perf_counter() - started:.2f} s)")
        setup = best.setup
        chosen = dataclasses.replace(base, offload=str(setup.offload), recompute=setup.recomputed)
        run("auto", chosen, cap, best.estimate.seconds if best.estimate else None)
    for offload, policy in GRID if grid else ():
        run("grid", dataclasses.replace(base, offload=offload, recompute=read_recompute(policy)), 0, None)
    by_hand = [row for row in rows if row["kind"] == "grid" and "seconds" in row]
    for row in rows:
        within = [each["seconds"] for each in by_hand if each["peak"] <= row["cap"]]
        if row["kind"] == "auto" and "seconds" in row and within:
            click.echo(f"{row['cap']:.0f} GiB: auto {row['seconds']:.3f} s, best of the grid {min(within):.3f} s, "
                       f"ratio {row['seconds'] / min(within):.3f}")  # fmt: skip
    if path:
        Path(path).write_text(json.dumps({"schema": 1, "rows": rows}, indent=2))
    if plot:
        Path(plot).write_text(draw(rows))


def model_of(words: str, vocab: int) -> ModelConfig:
    """Return a GPT-2 of "32x2560x20", or the model of a configuration such as "llama3-8b"."""
    try:
        layers, hidden, heads = map(int, words.split("x"))
    except ValueError:
        return configs.load(words, []).model
    return ModelConfig(layers=layers, hidden=hidden, heads=heads, vocab=vocab, tie=False)


def draw(rows: list[dict[str, Any]]) -> str:
    """Return the frontier as SVG: device memory to the right, seconds upwards."""
    timed = [row for row in rows if "seconds" in row]
    points = [(row["peak"], row["seconds"], row["kind"]) for row in timed] + [(*at, "peer") for at in PEERS.values()]
    width, height, left, bottom = 720, 420, 60, 50
    right, top = max(x for x, _, _ in points) * 1.05, max(y for _, y, _ in points) * 1.1

    def place(x: float, y: float) -> tuple[float, float]:
        return left + x / right * (width - left - 20), height - bottom - y / top * (height - bottom - 20)

    colours = {"auto": "#0b6bcb", "grid": "#8a8a8a", "peer": "#c0392b"}
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
             'font-size="12"><rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for tick in range(0, int(right) + 1, 8):
        x, y = place(tick, 0)
        parts.append(f'<text x="{x:.0f}" y="{y + 18:.0f}" text-anchor="middle">{tick}</text>')
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{y:.0f}" y2="20" stroke="#eee"/>')
    for half in range(int(top * 2) + 1):
        x, y = place(0, half / 2)
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">{half / 2:g}</text>')
        parts.append(f'<line x1="{x:.0f}" x2="{width - 20}" y1="{y:.0f}" y2="{y:.0f}" stroke="#eee"/>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(place(x, y) for x, y, kind in points if kind == "auto"))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{colours["auto"]}"/>')
    for x, y, kind in points:
        at = place(x, y)
        parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" fill="{colours[kind]}"/>')
    for name, at in PEERS.items():
        x, y = place(*at)
        parts.append(f'<text x="{x + 8:.0f}" y="{y + 4:.0f}" fill="{colours["peer"]}">{name}</text>')
    x, y = place(right, 0)
    parts.append(f'<text x="{x:.0f}" y="{y + 38:.0f}" text-anchor="end">GiB on the device (peak)</text>')
    parts.append(f'<text x="{left - 45}" y="14">seconds per step (blue: --auto under caps, grey: by hand)</text></svg>')
    return "\n".join(parts)


if __name__ == "__main__":
    main()
