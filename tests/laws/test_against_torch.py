"""Law: the numbers are torch's own. DDP and FSDP2 on the same batches give the same losses."""

from __future__ import annotations

import pytest
import torch
from ranks import run_cases, run_ranks
from torch import nn
from toys import Uneven, split, train_uneven, uneven_batch


def groups(model: nn.Module) -> list[dict]:
    decays = [p for p in model.parameters() if p.dim() >= 2]
    spared = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": decays, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]


STEPS = 5


def _peer(kind: str) -> list[float]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(7)
    model: nn.Module = Uneven()
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(1, STEPS + 1):
        loss = model(*uneven_batch(step, split(rank, world)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def _ours(stage: int) -> list[float]:
    return train_uneven(STEPS, stage=stage)


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=pytest.mark.long), "fsdp2"])
def test_losses_equal_torchs_own(kind):
    theirs = run_ranks(2, _peer, kind)[0]
    for stage, ours in enumerate(run_cases(2, _ours, [(stage,) for stage in range(4)])):
        assert ours[0] == pytest.approx(theirs, rel=1e-5), f"stage {stage}"
