"""Law: ranks that run different units are exact, or refused in that step with the units and the ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import torch
import torch.distributed as dist
from ranks import run_cases, run_ranks
from torch import nn

import zerocli


class Swapped(nn.Module):
    """Blocks of one size on the same data, which ranks run in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.swaps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        order = [0, 2, 1] if self.swaps and dist.get_rank() == 1 else [0, 1, 2]
        loss = x.new_zeros(())
        for index in order:
            loss = loss + (1 + index) * torch.tanh(self.blocks[index](x)).square().mean()
        return loss


def _compared() -> tuple[str, bool]:
    """Return what the step with different units says, and whether it changed anything."""
    torch.manual_seed(0)
    model = Swapped()
    engine = zerocli.shard(model, stage=3, lr=0.1, uneven=False)
    x = torch.ones(2, 8) * (1 + dist.get_rank())
    engine.backward(model(x))
    engine.step()
    before = engine.state_dict()
    model.swaps = True
    engine.backward(model(x))
    try:
        engine.step()
        said = ""
    except zerocli.Refused as error:
        said = str(error)
    after = engine.state_dict()
    return said, all(torch.equal(before[name], after[name]) for name in before)


def _answers(function: Callable[[], tuple[str, bool]], tries: int = 5) -> list[tuple[str, bool]]:
    """Return what two ranks answer; again if a gather of one waits for a reduction of the other (docs/python.md)."""
    for _ in range(tries - 1):
        with contextlib.suppress(TimeoutError):
            return run_ranks(2, function, seconds=20)
    return run_ranks(2, function)


def test_where_ranks_do_not_agree_first_a_difference_is_refused_before_the_update():
    for said, unchanged in _answers(_compared):
        assert re.search(r"rank 0 blocks\.(\d), rank 1 blocks\.(?!\1)\d", said) and "uneven=True" in said
        assert unchanged


def _agreed(stage: int) -> list[float]:
    torch.manual_seed(0)
    model = Swapped()
    model.swaps = True
    engine = zerocli.shard(model, stage=stage, lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 8) * (1 + dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_over_gloo_ranks_that_run_units_in_other_orders_are_exact():
    whole, *partitioned = run_cases(2, _agreed, [(stage,) for stage in range(4)])
    assert partitioned == [whole] * 3


class HalfUsed(nn.Module):
    """One flat of parameters, of which each step uses a half."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).square().mean()


def _sat_out(offload: str) -> tuple[bool, bool]:
    """Return whether the unused half is as it was, as the engine has it and as the model computes with it."""
    torch.manual_seed(0)
    model = HalfUsed()
    before = model.two.weight.detach().clone()
    engine = zerocli.shard(model, stage=3, lr=0.1, precision="bf16", offload=offload)
    for _ in range(3):
        engine.backward(model(torch.ones(2, 8)))
        engine.step()
    with engine.gathered(model.two):
        computed = torch.equal(model.two.weight.detach(), before.bfloat16())
    return torch.equal(engine.state_dict()["two.weight"], before), computed


def test_parameters_that_sit_a_step_out_keep_their_values_on_every_tier():
    placements = [("",), ("cpu",), ("params=cpu",), ("params=cpu,optimizer=hbm",)]
    for placement, found in zip(placements, run_cases(2, _sat_out, placements), strict=True):
        assert found == [(True, True)] * 2, placement
