"""How fast a folder's weights come into the engine, beside a raw read of its files, and the host memory at the peak.

    python benchmarks/loading.py                                        a small model on this machine
    python benchmarks/loading.py --shape llama3-8b --folder /nvme/8b    16 GB of bf16, written once and kept
    python benchmarks/loading.py --shape llama3-8b --folder /nvme/8b --cold --start --base nf4 --lora 16

With `--start` it is the seconds from `zerocli train FOLDER`, with the words that follow, to the end of its first step.
A raw read is the same files by large reads of several threads into one buffer each, which are thrown away. By default
both find the page cache as it is (`warm` after the first); `--cold` drops the files from it before each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from zerocli import config as configs  # noqa: E402
from zerocli import machine  # noqa: E402
from zerocli.checkpoint.imports import load_weights  # noqa: E402
from zerocli.checkpoint.safetensors import Entry, Writer  # noqa: E402
from zerocli.layout.constants import LOAD_THREADS as MAX_THREADS  # noqa: E402
from zerocli.run import engines  # noqa: E402

MAX_READ_NBYTES = 32 << 20

SHAPES = {
    "small": dict(hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                  intermediate_size=2816, vocab_size=32000),
    "llama3-8b": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                      intermediate_size=14336, vocab_size=128256, rope_theta=500000.0),
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
WORDS = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
FILE_NBYTES = 5_000_000_000


def tensors(shape: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a Llama's tensors in a Hugging Face folder."""
    hidden, wide, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{each}_layernorm.weight": (hidden,) for each in ("input", "post_attention")}
        rows = {"self_attn.q": hidden, "self_attn.k": kv, "self_attn.v": kv, "self_attn.o": hidden}
        found |= {f"{at}{each}_proj.weight": (n, hidden) for each, n in rows.items()}
        found |= {f"{at}mlp.{each}_proj.weight": (wide, hidden) for each in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (hidden, wide)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write(folder: Path, shape: dict[str, int], dtype: str) -> None:
    """Write a folder of random weights in files of 5 GB."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 8192}
    about |= {"tie_word_embeddings": False, "rms_norm_eps": 1e-5, "torch_dtype": WORDS[dtype]}
    groups: list[list[Entry]] = [[]]
    for name, each in tensors(shape).items():
        entry = Entry(name, DTYPES[dtype], each)
        if groups[-1] and sum(e.nbytes for e in groups[-1]) + entry.nbytes > FILE_NBYTES:
            groups.append([])
        groups[-1].append(entry)
    noise = torch.randn(1 << 22) * 0.02
    places = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        writer = Writer(folder / file, group)
        for entry in group:
            places[entry.name] = file
            for first in range(0, entry.numel, noise.numel()):
                writer.write(entry.name, first, noise[: min(noise.numel(), entry.numel - first)])
        writer.finish()
        writer.close()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(about | shape, indent=2))


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def raw_seconds(folder: Path) -> float:
    """Return the seconds of a raw read of the folder's files."""
    threads = max(2, min(MAX_THREADS, machine.cores()))
    buffers = {}

    def read(job: tuple[int, int, int]) -> None:
        fd, start, nbytes = job
        view = buffers.setdefault(threading.get_ident(), memoryview(bytearray(MAX_READ_NBYTES)))
        done = 0
        while done < nbytes:
            done += os.preadv(fd, [view[: nbytes - done]], start + done)

    began = time.perf_counter()
    fds = {file: os.open(file, os.O_RDONLY) for file in sorted(folder.glob("*.safetensors"))}
    jobs = [
        (fd, start, min(MAX_READ_NBYTES, file.stat().st_size - start))
        for file, fd in fds.items()
        for start in range(0, file.stat().st_size, MAX_READ_NBYTES)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, jobs))
    for fd in fds.values():
        os.close(fd)
    return time.perf_counter() - began


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def load(folder: Path, code: str, precision: str, stage: int, cold: bool) -> dict[str, float]:
    """Return the seconds of building and loading, and the host memory at the peak beside what is kept."""
    sets = [f"model.code={code}", "train.seq=128", f"train.precision={precision}"]
    config = configs.load(str(folder), sets)
    engines.make_model(config)  # imports what it needs
    if cold:
        forget(folder)
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    Path("/proc/self/clear_refs").write_text("5")
    before, began = status("VmRSS"), time.perf_counter()
    engine = engines.make_engine(config, stage=stage, empty=True)
    built = time.perf_counter()
    load_weights(engine, config.train.init_from, config.model)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ended, most, kept = time.perf_counter(), status("VmHWM") - before, sum(engine.memory().values())
    engine.close()
    return {"build": built - began, "load": ended - built, "host_peak": most, "kept": kept}


def start(folder: Path, words: list[str], cold: bool) -> dict[str, float]:
    """Return the seconds from a command to its weights, and to the end of its first step."""
    with tempfile.TemporaryDirectory() as name:
        run, tokens = Path(name) / "run", Path(name) / "tokens.npy"
        np.save(tokens, np.random.default_rng(0).integers(0, 30_000, 100_000).astype(np.uint32))
        sets = ["train.batch=2", "train.global_batch=2", "train.steps=1", "checkpoint.every=0"]
        given = [*words, *(each for text in sets for each in ("--set", text)), "--run-dir", str(run)]
        if cold:
            forget(folder)
        began, found = time.time(), {}
        command = [sys.executable, "-u", "-m", "zerocli", "train", str(folder), "--data", str(tokens), *given]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                for key, word in (("load", "weights from "), ("first step", "step 1/1 ")):
                    if line.startswith(word):
                        found[key] = time.time() - began
    if len(found) < 2:
        sys.exit("".join(said))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--hidden", type=int, help="instead of the shape's")
    parser.add_argument("--vocab", type=int, help="instead of the shape's")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the files")
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="of the engine")
    parser.add_argument("--code", choices=["zerocli", "transformers"], default="zerocli")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--folder", help="where the weights are, or are written and kept; by default a temporary one")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each read")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start", action="store_true", help="time a command instead; other words are passed to it")
    given, words = parser.parse_known_args()
    if words and not given.start:
        parser.error(f"{' '.join(words)}: only with --start")
    engines_own = {name: parser.get_default(name) for name in ("code", "precision", "stage")}
    if given.start and engines_own != {name: getattr(given, name) for name in engines_own}:
        parser.error("--code, --precision and --stage are not of the command: --set model.code=, --set zero.stage=")
    shape = dict(SHAPES[given.shape])
    for key, value in (("num_hidden_layers", given.layers), ("hidden_size", given.hidden), ("vocab_size", given.vocab)):
        shape[key] = value or shape[key]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        if not (folder / "config.json").exists():
            write(folder, shape, given.dtype)
        nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        numel = sum(map(math.prod, tensors(shape).values()))
        print(f"{nbytes / 1e9:.2f} GB, {numel / 1e9:.2f}B parameters, {'cold' if given.cold else 'as cached'}")
        raws, loads = [], []
        for _ in range(given.rounds):  # in turn, so that both see the same machine
            if given.cold:
                forget(folder)
            raws.append(raw_seconds(folder))
            if given.start:
                loads.append(start(folder, words, given.cold))
                continue
            loads.append(load(folder, given.code, given.precision, given.stage, given.cold))
        raw = statistics.median(raws)
        took = statistics.median(each["load"] for each in loads)
        print(f"raw read   {nbytes / raw / 1e9:6.2f} GB/s  {raw:7.2f} s")
        if given.start:
            step = statistics.median(each["first step"] for each in loads)
            print(f"weights    {took:7.2f} s after the command")
            print(f"first step {step:7.2f} s, {step / raw:.2f} of a raw read")
            return
        print(f"load       {nbytes / took / 1e9:6.2f} GB/s  {took:7.2f} s  {raw / took:.2f} of a raw read")
        print(f"build      {statistics.median(each['build'] for each in loads):25.2f} s")
        last = loads[-1]
        share = last["host_peak"] / last["kept"]
        print(
            f"host peak  {last['host_peak'] / 1e9:.2f} GB, kept by the rank {last['kept'] / 1e9:.2f} GB ({share:.2f})"
        )


if __name__ == "__main__":
    main()
