"""Laws of `activations.policy=auto` on real ranks: one choice for all, and the losses of any other policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from runs import TINY, Death, losses, train
from torch import nn

from zerocli import config as configs
from zerocli.config import Config
from zerocli.layout.recompute import NOTHING, WHOLE, Recompute
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.memory.build import plan_model
from zerocli.plan.models.traced import Traced
from zerocli.plan.search.recompute import MARGIN, describe, needed_by
from zerocli.plan.setup import setup_of
from zerocli.run.recompute import choose_blocks, trace_factory

SETS = ("model.layers=4", "model.dropout=0.1", "train.seq=64")
AUTO = "activations.policy=auto"


def config_of(*sets: str) -> Config:
    return configs.load("tiny", [*TINY, *SETS, *sets])


def room_for(recompute: Recompute, *sets: str, world: int = 2, device: str = "cpu") -> int:
    """Return the memory per rank with which exactly these blocks of a run are recomputed."""
    config = config_of(*sets)
    setup = setup_of(config, ranks=world, ranks_per_node=world, device=device, recompute=recompute)
    needed = needed_by(plan_model(shape_of(config.model, config.train.seq), setup))
    return int(needed / (1 - MARGIN)) + 1


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.long
def test_auto_changes_no_loss_and_says_what_it_chose(tmp_path, stage):
    """Neither does a resume that finds another device: it chooses anew."""
    sets = (f"zero.stage={stage}", "activations.policy=keep")
    assert train(tmp_path / "keep", *SETS, *sets).codes == [0, 0]
    whole = losses(tmp_path / "keep")
    sets = (sets[0], AUTO)
    folder, said = tmp_path / "auto", {}
    for chosen, death, codes in (
        (Recompute(0, 2), Death((0, 1), 3, "checkpoint write"), [-9, -9]),
        (Recompute(2, 2), None, [0, 0]),
    ):
        room = f"train.gpu_memory={room_for(chosen, *sets)}B"
        ended = train(folder, *SETS, *sets, room, death=death, resume=death is None)
        said[chosen] = ended.said[0]
        assert ended.codes == codes
        assert f"\nactivations: {describe(chosen, 4)} (" in said[chosen]
        assert "activations:" not in ended.said[1]
    assert "resuming after step" in said[Recompute(2, 2)]
    assert losses(folder) == whole
    assert configs.load(str(folder / "config.json")).activations.policy == "auto"


@pytest.mark.gpu
def test_auto_counts_a_gpus_memory(tmp_path):
    sets = (*SETS, "train.batch=64", "train.seq=256", "model.hidden=256", "model.heads=4", AUTO)
    for name, room, line in (
        (
            "part",
            room_for(Recompute(0, 2), *sets, world=1, device="cuda"),
            "2 of 4 blocks kept, 2 recomputed selectively",
        ),
        ("whole", 0, "nothing recomputed"),
    ):
        ended = train(tmp_path / name, *sets, f"train.gpu_memory={room}B", world=1)
        assert ended.codes == [0] and f"\nactivations: {line} (" in ended.said[0], ended.said


def _choices(sets: list[str], rooms: list[list[int]]) -> list[tuple[Any, str]]:
    import torch.distributed as dist

    config = configs.load("tiny", sets)
    return [choose_blocks(config, room=each[dist.get_rank()]) for each in rooms]


def test_unequal_ranks_agree_on_what_the_smallest_needs():
    sets = [*TINY, *SETS, "zero.stage=2", AUTO]
    order = [Recompute(), Recompute(0, 1), Recompute(0, 3), Recompute(2, 2)]
    rooms = [room_for(each, *sets) for each in order]
    pairs = [[rooms[0], rooms[3]], [rooms[3], rooms[0]], [rooms[1], rooms[2]], [rooms[0], rooms[0]], [rooms[0], 1]]
    first, second = run_ranks(2, _choices, sets, pairs)
    assert first == second
    assert [chosen for chosen, _ in first[:4]] == [order[3], order[3], order[2], order[0]]
    assert "no choice leaves" in first[4][1]
    assert run_ranks(2, _choices, [*TINY, "activations.policy=recompute"], [[1, 1]]) == [[(WHOLE, "")]] * 2


class Stack(nn.Module):
    """A model of which only a factory knows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(x.flatten(0, 1), targets.flatten() % 32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))


class Values(Stack):
    """Cannot be traced: its forward asks a tensor for its value."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, targets) * float(self.embed.weight.sum().item() > -1e9)


def factory(name: str) -> Config:
    config = config_of(AUTO, "train.batch=8")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, factory=f"{__name__}:{name}"))


def test_a_factorys_model_is_traced(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    traced = trace_factory(factory("Stack"))
    assert isinstance(traced, Traced)
    assert torch.equal(torch.get_rng_state(), before)
    for room, chosen, said in (
        (1 << 40, NOTHING, "nothing recomputed"),
        (1, Recompute(traced.blocks), "blocks recomputed"),
    ):
        recompute, reason = choose_blocks(factory("Stack"), traced, room)
        assert recompute == chosen and said in reason


def test_a_factorys_model_that_cannot_be_traced_is_recomputed(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    problem = trace_factory(factory("Values"))
    assert isinstance(problem, str)
    recompute, reason = choose_blocks(factory("Values"), problem, 1 << 40)
    assert recompute == WHOLE
    assert reason.startswith("all blocks recomputed (it cannot be traced: the model did not run on (tokens, targets)")
