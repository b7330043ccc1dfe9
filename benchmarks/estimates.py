"""Estimates of steps on many ranks: plain sharding beside groups of a node, and beside what others have measured.

    python benchmarks/estimates.py step llama3-8b    # 64 to 16,384 ranks
    python benchmarks/estimates.py published         # published runs on several nodes

Nothing runs on ranks: these are what `zerocli fit` answers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

PER_NODE = 8
SIZES = (64, 256, 1024, 4096, 16384)


def fit(*arguments: str) -> dict[str, Any]:
    """Return what `zerocli fit` answers."""
    from zerocli.cli.main import run

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        run(["fit", *arguments, "--json"])
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def step(model: str, sizes: tuple[int, ...], also: list[str]) -> None:
    """Print the seconds of a step with all ranks as one group, and with groups of a node."""
    print(f"fit {model} --stage 3 --hardware h100 {' '.join(also)}; groups of {PER_NODE}: --shard-ranks {PER_NODE}")
    print(f"{'ranks':>6} | {'plain':>8} {'hidden':>7} {'MFU':>5} | {'groups':>8} {'hidden':>7} {'MFU':>5}")
    for ranks in sizes:
        cells = []
        for words in ((), ("--shard-ranks", str(PER_NODE))):
            asked = (model, "--stage", "3", "--hardware", "h100", "--ranks", str(ranks), *words, *also)
            found = fit(*asked)["candidates"][0]["step"]
            cells.append(f"{found['seconds']:7.3f}s {found['hidden']:6.1%} {found['mfu']:5.1%}")
        print(f"{ranks:6} | {' | '.join(cells)}")


@dataclasses.dataclass(frozen=True)
class Published:
    """Runs that others have measured, of one model on several numbers of GPUs."""

    source: str
    hardware: str
    flags: str
    runs: dict[int, tuple[str, float]]
    """By GPUs: further flags, and what was measured."""
    what: str = "tokens/s per GPU"


MPT13 = "--set model.family=gpt2 --set model.layers=40 --set model.hidden=5120 --set model.heads=40"
MPT7 = "--set model.family=gpt2 --set model.layers=32 --set model.hidden=4096 --set model.heads=32"
MPT30 = "--set model.family=gpt2 --set model.layers=48 --set model.hidden=7168 --set model.heads=56"
MPT = "--set model.vocab=50368 --seq 2048 --stage 3"
WHOLE, KEEP = "--set activations.policy=recompute", "--set activations.policy=keep"
SPECTRUM = "--set hardware.network=25"
"""1600 Gbit/s per node of eight."""
ZERO = "--set model.family=gpt2 --set model.vocab=50304 --seq 1024 --stage 2 --tp 16 --ranks-per-node 16"
DGX2 = "--set hardware.network=6.25 --set activations.policy=recompute"
"""Sixteen GPUs that share eight adapters of 100 Gbit/s."""

PUBLISHED = (
    Published(
        *("torchtitan, Llama 3.1 8B, FSDP, selective, eager", "h100", "llama3-8b --stage 3 --batch 2 --seq 8192"),
        {n: ("--set activations.policy=selective", v) for n, v in {8: 5762.0, 128: 5605.0}.items()},
    ),
    Published(
        *("llm-foundry, MPT 13B, batch 2, kept", "h100", f"gpt2-xl {MPT13} {MPT} --batch 2 {KEEP}"),
        {n: ("", v) for n, v in {8: 4792.0, 16: 4767.0, 32: 4811.0, 64: 4800.0}.items()},
    ),
    Published(
        *("llm-foundry, MPT 7B, recomputed", "a100-40", f"gpt2-xl {MPT7} {MPT} {WHOLE} {SPECTRUM}"),
        {
            n: (f"--batch {batch}", v)
            for n, batch, v in ((16, 16, 3645.0), (32, 18, 3725.0), (64, 18, 3665.0), (128, 18, 3623.0))
        },
    ),
    Published(
        *("llm-foundry, MPT 13B, recomputed", "a100-40", f"gpt2-xl {MPT13} {MPT} {WHOLE} {SPECTRUM}"),
        {
            n: (f"--batch {batch}", v)
            for n, batch, v in ((16, 10, 1993.0), (32, 14, 1998.0), (64, 16, 1976.0), (128, 16, 1972.0))
        },
    ),
    Published(
        *("llm-foundry, MPT 30B, recomputed", "a100-40", f"gpt2-xl {MPT30} {MPT} {WHOLE} {SPECTRUM}"),
        {32: ("--batch 4", 857.0), 128: ("--batch 6", 865.0)},
    ),
    Published(
        *("Fernandez et al., Llama 2 7B, FSDP (share of the rate at 128)", "h100"),
        "llama3-8b --set model.vocab=32000 --set model.kv_heads=32 --set model.mlp_hidden=11008 --stage 3 --batch 2 "
        f"--seq 4096 {KEEP}",
        {128: ("", 1.0), 2048: ("", 1 - 0.3722)},
        "share",
    ),
    Published(
        *("ZeRO paper, Figure 2: 100B, MP 16, batch 32", "v100-32", f"gpt2-xl {ZERO} {DGX2}"),
        {400: ("--set model.layers=125 --set model.hidden=8192 --set model.heads=64 --batch 32", 38.0)},
        "TFLOPS per GPU",
    ),
    Published(
        *("ZeRO paper, Figure 3: 60B, MP 16", "v100-32", f"gpt2-xl {ZERO} {DGX2}"),
        {
            n: (f"--set model.layers=75 --set model.hidden=8192 --set model.heads=32 --batch {batch}", v)
            for n, batch, v in ((64, 16, 25.0), (400, 64, 38.0))
        },
        "TFLOPS per GPU",
    ),
)


def published() -> None:
    """Print estimates beside what others have measured, and both relative to the first row of each."""
    from zerocli.plan.time.hardware import preset

    for each in PUBLISHED:
        print(f"{each.source} ({each.what})")
        first: tuple[float, float] | None = None
        for ranks, (words, measured) in each.runs.items():
            document = fit(*f"{each.flags} {words} --hardware {each.hardware} --ranks {ranks}".split())
            found = document["candidates"][0]["step"]
            estimated = found["tokens_per_second"] / ranks
            if each.what == "TFLOPS per GPU":
                estimated = found["mfu"] * preset(each.hardware).tflops
            first = first or (estimated, measured)
            if each.what == "share":
                estimated /= first[0]
            change, there = estimated / (1.0 if each.what == "share" else first[0]) - 1, measured / first[1] - 1
            print(
                f"  {ranks:5} GPUs: measured {measured:8.1f}, estimated {estimated:8.1f}"
                f" ({estimated / measured - 1:+.0%}); beside the first: measured {there:+.1%}, estimated {change:+.1%};"
                f" hidden {found['hidden']:.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "published"))
    parser.add_argument("model", nargs="?", default="llama3-8b")
    parser.add_argument("--ranks", default="", help="comma-separated; 64 to 16384")
    asked, also = parser.parse_known_args()
    if asked.what == "step":
        step(asked.model, tuple(map(int, asked.ranks.split(","))) if asked.ranks else SIZES, also)
    else:
        published()


if __name__ == "__main__":
    main()
