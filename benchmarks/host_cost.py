"""Measures what the engine itself costs the host per unit and step, with blocks so small that they compute nothing.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --device cuda --precision bf16 --stage 3

A model of tiny blocks is trained with zerocli and in plain torch (backward, fused AdamW, clipping), each with few and
with many blocks. The difference between the two numbers of blocks, divided by the blocks, is the time per block; the
difference between zerocli and torch is the engine's. On a GPU the loop is not synchronized, so this is host time only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(self.norm(x))
        return out


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def zero_step(blocks: int, device: torch.device, precision: str, stage: int) -> Callable[[], None]:
    import zerocli

    model = Stack(blocks)
    engine = zerocli.shard(model, stage=stage, precision=precision, clip=1.0, device=device)
    x = torch.randn(2, WIDTH, device=device)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    return step


def torch_step(blocks: int, device: torch.device, precision: str) -> Callable[[], None]:
    model = Stack(blocks).to(device, torch.bfloat16 if precision == "bf16" else torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)
    x = torch.randn(2, WIDTH, device=device, dtype=parameters[0].dtype)

    def step() -> None:
        model(x).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_of(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Return the least seconds of a step's host time over a few windows: noise only adds."""
    for _ in range(5):
        step()
    found = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.process_time()
        for _ in range(steps):
            step()
        found.append((time.process_time() - began) / steps)
    return min(found)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Where the blocks compute.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", help="What parameters compute in.")
@click.option("--stage", type=click.IntRange(0, 3), default=3, help="ZeRO stage; one rank.")
@click.option("--few", type=click.IntRange(1), default=8, help="Blocks of the smaller model.")
@click.option("--many", type=click.IntRange(2), default=72, help="Blocks of the larger model.")
@click.option("--steps", type=click.IntRange(1), default=10, help="Steps per window.")
@click.option("--rounds", type=click.IntRange(1), default=3, help="Alternations.")
def main(device: str, precision: str, stage: int, few: int, many: int, steps: int, rounds: int) -> None:
    """Measure the engine's host time per unit and step."""
    torch.set_num_threads(1)
    where, each = torch.device(device), {}
    found: dict[str, list[float]] = {"zerocli": [], "torch": []}
    for _ in range(rounds):
        for blocks in (few, many):
            each["zerocli", blocks] = seconds_of(zero_step(blocks, where, precision, stage), steps, where)
            each["torch", blocks] = seconds_of(torch_step(blocks, where, precision), steps, where)
        for name, times in found.items():
            times.append((each[name, many] - each[name, few]) / (many - few))
    ours, theirs = (statistics.median(found[name]) * 1e6 for name in ("zerocli", "torch"))
    click.echo(
        f"per block and step: zerocli {ours:.0f} us, plain torch {theirs:.0f} us; the engine {ours - theirs:.0f} us"
    )


if __name__ == "__main__":
    main()
