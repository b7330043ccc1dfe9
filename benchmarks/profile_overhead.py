"""What a profile costs while only its clock runs: the same steps with and without it, in turn, in one process.

    python benchmarks/profile_overhead.py --layers 4 --hidden 256

Prints one JSON line: seconds of a step without and with the clock (the fastest of each turn, then the median over
turns), and the overhead. Memory is followed in no step here: in the two in which it is, nobody takes the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import zerocli  # noqa: E402
from zerocli.config import ModelConfig  # noqa: E402
from zerocli.models import build  # noqa: E402
from zerocli.profile.profiler import Profiler  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 4, "hidden": 256, "batch": 4, "seq": 128, "steps": 5, "turns": 8, "stage": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--offload", default="")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = ModelConfig(layers=args.layers, hidden=args.hidden, heads=4, vocab=256)
    model = build(config, args.seq, "meta")
    engine = zerocli.shard(
        model,
        stage=args.stage,
        offload=args.offload,
        units=model.unit_modules(),
        device=device,
        precision=args.precision,
    )
    tokens = torch.randint(0, 256, (args.batch, args.seq), device=device)

    def fastest() -> float:
        found = []
        for _ in range(args.steps):
            began = time.perf_counter()
            engine.backward(engine(tokens, tokens))
            engine.step()
            if device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        return min(found)

    fastest()
    without, watched = [], []
    for _ in range(args.turns):
        without.append(fastest())
        profiler = Profiler(follow=False)
        profiler.attach(engine)
        watched.append(fastest())
        profiler.detach()
    before, after = statistics.median(without), statistics.median(watched)
    print(json.dumps({"device": device, "without": before, "with": after, "overhead": after / before - 1}))


if __name__ == "__main__":
    main()
