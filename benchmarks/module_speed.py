"""Tokens per second of a Hugging Face folder trained with our own code and with the module of transformers, in turn.

    python benchmarks/module_speed.py FOLDER --batch 2 --seq 4096 [--compile]

One process. Both start from the folder's weights and train the same random tokens; `benchmarks/loading.py --folder`
writes a folder of a given shape. The last line is transformers' share of our own code's speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from zerocli import allocator  # noqa: E402

allocator.choose()

from zerocli import config as configs  # noqa: E402
from zerocli.checkpoint.imports import load_weights  # noqa: E402
from zerocli.run import engines  # noqa: E402

CODES = ("zerocli", "transformers")


def measure(folder: str, code: str, given: argparse.Namespace) -> dict[str, Any]:
    """Train some steps; return seconds per step, the first and last loss, the peak and the seconds of loading."""
    sets = [f"model.code={code}", f"train.seq={given.seq}", f"train.batch={given.batch}", "zero.stage=3"]
    sets += [f"activations.policy={given.policy}", f"model.compile={str(given.compile).lower()}", "train.steps=1000"]
    sets += [f"train.precision={given.precision}", f"offload.placement={given.offload}", "optimizer.lr=1e-6"]
    config = configs.load(folder, [each for each in sets if not each.endswith("=")])
    began = time.perf_counter()
    engine = engines.make_engine(config, empty=True)
    load_weights(engine, config.train.init_from, config.model)
    loaded = time.perf_counter() - began
    torch.manual_seed(1)
    tokens = torch.randint(0, config.model.vocab, (given.batch, given.seq + 1), device=engine.device)
    seconds, losses = [], []
    for _ in range(given.warmup + given.steps):
        start = time.perf_counter()
        loss = engine(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    engine.close()
    del engine, loss
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    took = statistics.median(seconds[given.warmup :])
    return {"code": code, "seconds": took, "losses": [losses[0], losses[-1]], "peak": peak, "loading": loaded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--policy", default="recompute")
    parser.add_argument("--offload", default="")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", help="write the rows here")
    given = parser.parse_args()
    rows = []
    for _ in range(given.rounds):
        for code in CODES:
            row = measure(given.folder, code, given)
            rows.append(row)
            speed = given.batch * given.seq / row["seconds"]
            print(
                f"{code:13} {row['seconds']:.4f} s  {speed:9,.0f} tokens/s  peak {row['peak'] / 2**30:.2f} GiB  "
                f"loaded in {row['loading']:.1f} s  loss {row['losses'][0]:.5f} -> {row['losses'][1]:.5f}",
                flush=True,
            )
    ours, theirs = (statistics.median(row["seconds"] for row in rows if row["code"] == code) for code in CODES)
    print(f"transformers at {ours / theirs:.3f} of our own code, {'compiled' if given.compile else 'eager'}")
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
