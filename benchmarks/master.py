"""Trains one model with a split master, with a whole fp32 master, and in plain torch, and compares the losses.

    python benchmarks/master.py --steps 3000

All three compute in bf16 and update an fp32 master with AdamW. zerocli rounds the master to the parameters with ties
away from zero (engine/units/master.py), torch with ties to even. The split master must give the whole one's losses
bit for bit; against plain torch only the rounding of ties differs, so their curves should differ no more than two
seeds' do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import torch
from torch import Tensor, nn

LR, BETAS, DECAY, CLIP, WARMUP = 1e-3, (0.9, 0.95), 0.1, 1.0, 100


def make_model(layers: int, hidden: int, seq: int, seed: int, device: torch.device) -> nn.Module:
    from zerocli.config import ModelConfig
    from zerocli.models import build

    torch.manual_seed(seed)
    config = ModelConfig(family="llama", layers=layers, hidden=hidden, heads=hidden // 32, vocab=256, tie=False)
    return build(config, seq, device)


def read_text() -> Tensor:
    """Return Python's standard library as bytes: real text that every machine has."""
    folder = Path(statistics.__file__).parent
    files = sorted(folder.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batches(text: Tensor, steps: int, batch: int, seq: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(len(text) - seq - 1, (steps, batch), generator=generator)
    span = torch.arange(seq + 1)
    return [text[one[:, None] + span].to(device) for one in starts]


def lr_at(step: int) -> float:
    return LR * min(1.0, step / WARMUP)


def train_zero(model: nn.Module, data: Sequence[Tensor], master: str) -> list[float]:
    import zerocli

    engine = zerocli.shard(
        model, lr=lr_at, betas=BETAS, weight_decay=DECAY, clip=CLIP, precision="bf16", master=master, stage=0
    )
    losses = []
    for tokens in data:
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    engine.close()
    return torch.stack(losses).tolist()


def train_torch(model: nn.Module, data: Sequence[Tensor]) -> list[float]:
    """Train in plain torch: a bf16 model, fp32 masters of its parameters, copied back after every step."""
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().clone()) for p in parameters]
    groups = [
        {"params": [p for p in masters if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in masters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    model.to(torch.bfloat16)
    losses = []
    for step, tokens in enumerate(data, 1):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for master, p in zip(masters, parameters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(parameters, masters)
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--steps", type=click.IntRange(10), default=3000, help="Optimizer steps per run.")
@click.option("--layers", type=click.IntRange(1), default=2, help="Blocks of the Llama.")
@click.option("--hidden", type=click.IntRange(32), default=64, help="Its width, a multiple of 32.")
@click.option("--seq", type=click.IntRange(8), default=64, help="Tokens per sequence.")
@click.option("--batch", type=click.IntRange(1), default=8, help="Sequences per step.")
@click.option("--seeds", type=click.IntRange(1), default=3, help="Initialisations, on the same batches.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where to train.")
def main(steps: int, layers: int, hidden: int, seq: int, batch: int, seeds: int, device: str) -> None:
    """Compare a split master with a whole one and with plain torch over a few thousand steps."""
    where = torch.device(device)
    data = batches(read_text(), steps, batch, seq, where)
    runs: dict[str, Callable[[nn.Module], list[float]]] = {
        "split": lambda model: train_zero(model, data, "split"),
        "fp32": lambda model: train_zero(model, data, "fp32"),
        "torch": lambda model: train_torch(model, data),
    }
    last = max(1, steps // 10)
    ends: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(seeds):
        curves = {}
        for name, train in runs.items():
            began = time.perf_counter()
            curves[name] = train(make_model(layers, hidden, seq, seed, where))
            ends[name].append(statistics.fmean(curves[name][-last:]))
            seconds = time.perf_counter() - began
            click.echo(
                f"seed {seed} {name:<5} mean loss of the last {last} steps {ends[name][-1]:.4f} ({seconds:.0f} s)"
            )
        same = "bit for bit the same" if curves["split"] == curves["fp32"] else "DIFFERENT"
        click.echo(f"seed {seed}: losses of split and fp32 masters are {same}")
    gaps = [a - b for a, b in zip(ends["split"], ends["torch"], strict=True)]
    click.echo(f"split - torch: {', '.join(f'{gap:+.4f}' for gap in gaps)}")
    if seeds > 1:
        click.echo(f"standard deviation over seeds: {statistics.stdev(ends['torch']):.4f}")


if __name__ == "__main__":
    main()
