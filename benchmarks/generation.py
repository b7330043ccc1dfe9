"""Time of `zerocli generate` beside transformers' own generate, greedy, on the same random weights, in turns.

python benchmarks/generation.py [--family llama] [--tokens 200] [--rounds 5] [--code auto|transformers] [--offload ...]

A model of about 88M parameters is made by transformers and written to a temporary folder. Each round times both, one
after the other, so that what else the machine does falls on both; the medians and the median of the rounds' ratios are
printed, and whether the tokens were the same. `--before` also times some tokens without a cache of keys and values.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from zerocli.cli.generate import read_config, with_placement
from zerocli.run import generate
from zerocli.run.complete import Sampling, complete
from zerocli.run.engines import make_engine, make_model

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": dict(vocab_size=16384, n_embd=768, n_layer=10, n_head=12, n_positions=1024),
    "llama": dict(vocab_size=16384, hidden_size=768, num_hidden_layers=9, num_attention_heads=12,
                  num_key_value_heads=4, intermediate_size=2048, max_position_embeddings=1024),
    "gemma2": dict(vocab_size=16384, hidden_size=768, num_hidden_layers=10, num_attention_heads=12, head_dim=64,
                   num_key_value_heads=4, intermediate_size=2048, max_position_embeddings=1024),
    "mamba": dict(vocab_size=16384, hidden_size=768, num_hidden_layers=20),
}  # fmt: skip


def open_engine(folder: str, code: str, offload: str, needed: int) -> tuple[Any, int]:
    """Return the engine of a folder as the command would make it, and the length of its window."""
    sets = (f"model.code={code}",) if code != "auto" else ()
    config = read_config(folder, False, {"precision": "fp32", "stage": None, "offload": offload, "sets": sets})
    config = with_placement(config, 1, None)
    weights = generate.Weights(folder, False, None, generate.positions_of(folder))
    config = generate.with_window(config, weights, needed)
    engine = make_engine(config, make_model(config).requires_grad_(False), compile=False)
    generate.load(engine, config, weights, print)
    return engine, config.train.seq


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", choices=SHAPES, default="llama")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--code", default="auto")
    parser.add_argument("--offload", default="")
    parser.add_argument("--before", type=int, default=0, help="tokens to time without a cache")
    given = parser.parse_args()

    import transformers

    torch.manual_seed(0)
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    config = transformers.AutoConfig.for_model(given.family, **SHAPES[given.family] | ends)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(16384, (1, given.prompt))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder))
        engine, window = open_engine(folder, given.code, given.offload, given.prompt + given.tokens)
    theirs, ids = theirs.to(engine.device), ids.to(engine.device)
    print(f"{given.family}: {sum(p.numel() for p in theirs.parameters()) / 1e6:.1f}M parameters")
    seconds: dict[str, list[float]] = {"zerocli": [], "transformers": []}
    same = True
    for _ in range(given.rounds):
        began = time.perf_counter()
        ours = list(complete(engine, ids[0].tolist(), Sampling(given.tokens), window))
        seconds["zerocli"].append(time.perf_counter() - began)
        began = time.perf_counter()
        made = theirs.generate(ids, max_new_tokens=given.tokens, min_new_tokens=given.tokens, do_sample=False)
        seconds["transformers"].append(time.perf_counter() - began)
        same = same and made[0, given.prompt :].tolist() == ours
    for name, each in seconds.items():
        print(f"{name:<14} {statistics.median(each):8.2f} s for {given.tokens} tokens (median of {given.rounds})")
    ratios = [ours / other for ours, other in zip(*seconds.values(), strict=True)]
    print(f"ratio {statistics.median(ratios):.2f}; the same tokens: {same}")
    if given.before:
        began = time.perf_counter()
        without = list(complete(engine, ids[0].tolist(), Sampling(given.before), window, cached=False))
        spent = time.perf_counter() - began
        print(f"without cache  {spent:8.2f} s for {given.before} tokens; the same: {without == ours[: given.before]}")


if __name__ == "__main__":
    main()
