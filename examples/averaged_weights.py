"""An exponential moving average of sharded weights: kept in shards, applied for evaluation, saved whole.

python examples/averaged_weights.py
torchrun --standalone --nproc-per-node 2 examples/averaged_weights.py
"""

from __future__ import annotations

import os

import torch
from own_loop import Regressor

import zerocli


def main() -> None:
    torch.manual_seed(0)
    engine = zerocli.shard(Regressor(), optimizer="adamw", lr=1e-2, stage=3)
    average = zerocli.EMA(engine, decay=0.9)
    rank = int(os.environ.get("RANK", "0"))
    generator = torch.Generator().manual_seed(rank)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, 32, generator=generator)
        return x.to(engine.device), x.sum(-1).sin().to(engine.device)

    for _ in range(30):
        engine.backward(engine(*batch()))
        engine.step()
        average.update()
    held_out = batch()
    with torch.no_grad():
        raw = engine(*held_out).item()
        with average.applied():
            averaged = engine(*held_out).item()
    weights = average.state_dict()  # whole tensors, by the model's own names; every rank calls it
    if rank == 0:
        print(f"loss {raw:.4f}, of the averaged weights {averaged:.4f}; {len(weights)} tensors to save")
    engine.close()


if __name__ == "__main__":
    main()
