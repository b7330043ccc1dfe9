"""What takes GPU memory outside torch's allocator: the driver's count after each of the things that a run does.

    python benchmarks/driver_memory.py

One process, one GPU. Each line is an action, by how much the driver's count less the allocator's reservation has grown,
and that difference after it. `accuracy.py --random N --device cuda --json FILE` has the same difference of whole runs
under `about.outside`, at their context, when the engine is built and after each step.
"""

# ruff: noqa: E402
from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from zerocli import allocator

allocator.choose()

import torch
import torch.nn.functional as F
from measured_bytes import device_used

from tiers.pages import Pages, Registrar
from zerocli.profile.nvml import process_nbytes

GIB = 2**30
_kept: list[Any] = []
"""What the actions made: it stays until the end."""


def keep(value: Any) -> None:
    _kept.append(value)


def pin(nbytes: int) -> None:
    pages = Pages(nbytes)
    refusal = pages.pin(Registrar())
    assert refusal is None, refusal
    keep(pages)


def streams(count: int, priority: int = 0) -> None:
    for _ in range(count):
        stream = torch.cuda.Stream(priority=priority)
        with torch.cuda.stream(stream):
            keep(torch.zeros(1024, device="cuda"))
        keep(stream)


def copies(threads: int) -> None:
    """Copy pinned memory up and down, each thread on the same two streams, as the workers of a disk tier do."""
    pages = Pages(8 << 20)
    assert pages.pin(Registrar()) is None
    there = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def work() -> None:
        for stream, pair in ((up, (there, pages.bytes)), (down, (pages.bytes, there))):
            event = torch.cuda.Event(blocking=True)
            with torch.cuda.stream(stream):
                pair[0].copy_(pair[1], non_blocking=True)
                event.record(stream)
            event.synchronize()

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    keep((pages, there))


def attention(heads: int, size: int, dtype: torch.dtype, groups: int = 1) -> None:
    shape = (2, heads, 1024, size)
    q = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    k = torch.randn((2, heads // groups, 1024, size), device="cuda", dtype=dtype, requires_grad=True)
    F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=groups > 1).sum().backward()


def matmul(dtype: torch.dtype, size: int = 2048) -> None:
    x = torch.randn(size, size, device="cuda", dtype=dtype, requires_grad=True)
    F.linear(x, x, x[0]).sum().backward()


def adam(dtype: torch.dtype, name: str = "AdamW") -> None:
    x = torch.randn(1 << 20, device="cuda", dtype=dtype, requires_grad=True)
    rule = getattr(torch.optim, name)([x])
    x.sum().backward()
    rule.step()


def model(family: str) -> None:
    from zerocli import shard
    from zerocli.config import ModelConfig
    from zerocli.models import build

    config = ModelConfig(
        family=family, layers=2, hidden=512, heads=8, kv_heads=8 if family == "gpt2" else 2, vocab=5000
    )
    engine = shard(build(config, 256), lr=1e-3, stage=3, precision="bf16", device="cuda")
    for _ in range(2):
        tokens = torch.randint(5000, (2, 4, 256), device="cuda")
        engine.backward(engine(tokens[0], tokens[1]))
        engine.step()
    engine.synchronize()
    engine.close()


BF16, FP32 = torch.bfloat16, torch.float32
ACTIONS: list[tuple[str, Callable[[], Any]]] = [
    ("a first kernel", lambda: keep(torch.zeros(1024, device="cuda").add_(1))),
    ("bf16 matmul, forward and backward", lambda: matmul(BF16)),
    ("fp32 matmul, forward and backward", lambda: matmul(FP32)),
    ("flash attention, heads of 64, bf16", lambda: attention(8, 64, BF16)),
    ("flash attention, heads of 128, bf16", lambda: attention(8, 128, BF16)),
    ("flash attention, shared heads of 128, bf16", lambda: attention(8, 128, BF16, 4)),
    ("attention, fp32", lambda: attention(8, 64, FP32)),
    ("torch's AdamW, fp32", lambda: adam(FP32)),
    ("torch's Adagrad, fp32", lambda: adam(FP32, "Adagrad")),
    ("a gpt2 through the engine", lambda: model("gpt2")),
    ("a llama through the engine", lambda: model("llama")),
    ("8 streams", lambda: streams(8)),
    ("24 more streams", lambda: streams(24)),
    ("8 streams of high priority", lambda: streams(8, -1)),
    ("256 MiB page-locked by registration", lambda: pin(GIB // 4)),
    ("1 GiB page-locked by registration", lambda: pin(GIB)),
    ("4 GiB page-locked by registration", lambda: pin(4 * GIB)),
    ("8 GiB page-locked by registration", lambda: pin(8 * GIB)),
    ("1 GiB of torch's page-locked memory", lambda: keep(torch.empty(GIB, dtype=torch.uint8, pin_memory=True))),
    ("copies by 1 thread", lambda: copies(1)),
    ("copies by 32 threads", lambda: copies(32)),
    ("copies by 64 threads", lambda: copies(64)),
    ("an unpinned copy up and down", lambda: torch.empty(64 << 20).cuda().cpu()),
    ("sorting 1M ids", lambda: torch.randint(50000, (1 << 20,), device="cuda").sort()),
    ("dropout", lambda: F.dropout(torch.randn(1 << 20, device="cuda", requires_grad=True), 0.1).sum().backward()),
]


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no GPU", file=sys.stderr)
        return 1
    others = device_used()
    device = torch.device("cuda", 0)

    def outside() -> int:
        torch.cuda.synchronize()
        mine = process_nbytes(device)
        free, total = torch.cuda.mem_get_info(device)
        return (total - free - others if mine is None else mine) - torch.cuda.memory_reserved()

    torch.cuda.init()
    before = outside()
    counted = (
        "its own process" if process_nbytes(device) is not None else f"the device less {others >> 20} MiB of others"
    )
    print(f"{before / 2**20:9.1f} MiB  the context; the driver counts {counted}")
    for name, act in ACTIONS:
        try:
            act()
        except Exception as error:
            print(f"           {name}: {type(error).__name__}: {error}")
        now = outside()
        print(f"{(now - before) / 2**20:+9.1f} MiB  {name}, then {now / 2**20:.1f}", flush=True)
        before = now
    return 0


if __name__ == "__main__":
    sys.exit(main())
