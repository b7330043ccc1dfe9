"""Time of the models' fused edges beside torch's operations, and the bytes a second that each moves.

    python benchmarks/kernels.py                                  # Llama 1.03B, 8 x 2048 tokens, bf16, on a GPU
    python benchmarks/kernels.py --device cpu --batch 1 --seq 16 --vocab 999 --hidden 64 --mlp 96 --heads 4 --repeat 2

Columns: `ours` is what the models run, `plain` the same functions with torch's operations in place of the kernels,
`torch` the usual expressions under autograd. Rates count one read of each input and one write of each output: the bytes
that must move, whatever a path moves besides. Times are medians. On a CPU `ours` and `plain` are the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from zerocli.layout.constants import chunk_tokens, padded_vocab  # noqa: E402
from zerocli.models import fused, loss  # noqa: E402
from zerocli.models.llama import Rotary  # noqa: E402

Run = Callable[[], object]
Edge = Callable[[Tensor], Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@contextmanager
def plainly() -> Iterator[None]:
    """While the body runs, torch's operations take the place of the kernels."""
    before = fused.kernels_for
    fused.kernels_for = loss.kernels_for = lambda x: None
    try:
        yield
    finally:
        fused.kernels_for = loss.kernels_for = before


def seconds(run: Run, device: str, repeat: int) -> float:
    """Return the median time of `run` after two calls that are not counted."""
    times = []
    for index in range(repeat + 2):
        if device == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            took = start.elapsed_time(stop) / 1e3
        else:
            began = time.perf_counter()
            run()
            took = time.perf_counter() - began
        if index >= 2:
            times.append(took)
    return statistics.median(times)


def peak(run: Run, device: str) -> int:
    """Return the bytes of the GPU's memory that `run` takes at most; 0 on a CPU."""
    if device != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def show(name: str, nbytes: int, ways: dict[str, Run], args: argparse.Namespace) -> None:
    """Print a line for each way: its time, its rate over `nbytes`, and the most memory it takes."""
    for way, run in ways.items():
        if way == "plain":
            with plainly():
                took, most = seconds(run, args.device, args.repeat), peak(run, args.device)
        else:
            took, most = seconds(run, args.device, args.repeat), peak(run, args.device)
        rate = f"{nbytes / took / 1e9:9.1f} GB/s" if nbytes else " " * 14
        print(f"{name:<24} {way:<6} {took * 1e6:11.1f} us {rate} {most / 2**20:9.1f} MiB", flush=True)


def backward_of(function: Edge, x: Tensor) -> Run:
    """Return a run of the backward pass alone: what it needs is computed and kept here."""
    x = x.detach().requires_grad_()
    out = function(x)
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, x, grad, retain_graph=True)


def plain_rotate(x: Tensor, rotary: Rotary) -> Tensor:
    swapped = torch.roll(x, x.shape[3] // 2, dims=-1)
    return torch.addcmul(x * rotary.cos, swapped, rotary.sin).to(x.dtype)


def elementwise(
    name: str, ours: Callable[[Tensor], Tensor], usual: Callable[[Tensor], Tensor], x: Tensor, args
) -> None:
    out = ours(x)
    width = x.element_size()
    show(f"{name} forward", width * (x.numel() + out.numel()), {
        "ours": lambda: ours(x), "plain": lambda: ours(x), "torch": lambda: usual(x),
    }, args)  # fmt: skip
    with plainly():
        plain = backward_of(ours, x)
    # SwiGLU's backward reads its input too; a rotation's does not.
    nbytes = width * (out.numel() + (2 if name == "swiglu" else 1) * x.numel())
    ways = {"ours": backward_of(ours, x), "plain": plain, "torch": backward_of(usual, x)}
    show(f"{name} backward", nbytes, ways, args)


def losses(args: argparse.Namespace) -> None:
    """Print the lines of one chunk's softmax, and of the projection with its loss, forward and backward."""
    dtype, vocab, tokens = DTYPES[args.dtype], args.vocab, args.batch * args.seq
    chunk = min(chunk_tokens(vocab, args.device), tokens)
    padded = torch.randn(chunk, padded_vocab(vocab), device=args.device).to(dtype)
    targets = torch.randint(vocab, (tokens,), device=args.device)
    each = torch.empty(chunk, device=args.device)

    def of_chunk() -> None:
        kernels = fused.kernels_for(padded)
        if kernels is not None:
            kernels.softmax_loss_(padded[:, :vocab], targets[:chunk], each, loss.IGNORED, True)
        else:
            loss._softmax_loss_(padded, vocab, targets[:chunk], True, None)

    def of_torch() -> None:
        logits = padded[:, :vocab].detach().requires_grad_()
        F.cross_entropy(logits, targets[:chunk]).backward()

    ways: dict[str, Run] = {"ours": of_chunk, "plain": of_chunk, "torch": of_torch}
    show(f"softmax of {chunk} rows", 2 * chunk * vocab * dtype.itemsize, ways, args)

    x = torch.randn(tokens, args.hidden, device=args.device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocab, args.hidden, device=args.device)).to(dtype).requires_grad_()

    def chunked() -> None:
        torch.autograd.grad(loss.linear_cross_entropy(x, weight, targets), (x, weight))

    def whole() -> None:
        torch.autograd.grad(F.cross_entropy(F.linear(x, weight).float(), targets), (x, weight))

    show("projection and loss", 0, {"ours": chunked, "plain": chunked, "torch": whole}, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    sizes = dict(batch=8, seq=2048, hidden=2048, vocab=50304, mlp=5632, heads=16, kv_heads=16, repeat=20)
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype, head_dim = DTYPES[args.dtype], args.hidden // args.heads
    kernels = fused.kernels_for(torch.empty(1, device=args.device, dtype=dtype))
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, {args.dtype}, kernels: {'no' if kernels is None else 'yes'}; median of {args.repeat}; peak memory")

    losses(args)
    gate_up = torch.randn(args.batch, args.seq, 2 * args.mlp, device=args.device).to(dtype)
    elementwise("swiglu", fused.swiglu, fused._plain_swiglu, gate_up, args)
    del gate_up
    rotary = Rotary(args.seq, head_dim, 1e4).to(args.device)
    wide = args.heads + 2 * args.kv_heads
    qkv = torch.randn(args.batch, args.seq, wide, head_dim, device=args.device).to(dtype)
    qk = qkv[:, :, : args.heads + args.kv_heads]
    elementwise("rotary", rotary, lambda x: plain_rotate(x, rotary), qk, args)


if __name__ == "__main__":
    main()
