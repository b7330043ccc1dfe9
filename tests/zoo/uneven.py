"""Ranks that run different parts of the model in one step, and parameters that get no gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, WORDS, Block, Regressor, Stack, pairs
from zoo.case import case, either, trained

UNEVEN = either("rank")
"""At stage 3: the same numbers, or an error that says which ranks ran what."""


class Dropping(Stack):
    """Skips the blocks it is told to skip."""

    def forward(self, tokens, skip=()):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            if i not in skip:
                x = block(x)
        return self.loss(x, tokens)


def _dropping(name: str, make, skips, **about) -> None:
    @case(name, **about)
    def program(run):
        trainer = run.shard(make)
        for step in range(3):
            trainer.backward(trainer(run.tokens(step, 4, 8), skip=skips(run.rank, step)))
            trainer.step()
        with torch.no_grad():
            run.log("all blocks", trainer(run.tokens(9, 4, 8)))


def _unequal_blocks() -> nn.Module:
    model = Dropping()
    model.blocks = nn.ModuleList(Block(hidden=size) for size in (5, 12, 31))
    return model


_dropping(
    "layerdrop-per-rank",
    Dropping,
    lambda rank, step: (1 + rank,),
    at3=either("blocks.", "rank"),
    also=("stage0", "stage1", "stage3-cpu"),
    gpu=True,
)
_dropping(
    "layerdrop-per-rank-unequal-sizes", _unequal_blocks, lambda rank, step: (2 * rank,), at3=UNEVEN, also=("stage1",)
)
_dropping("layerdrop-on-one-rank-only", Dropping, lambda rank, step: (1,) if rank == 0 else (), at3=UNEVEN)
_dropping("layerdrop-first-step-only", Dropping, lambda rank, step: (0, rank) if step == 0 else (), at3=UNEVEN)
_dropping("layerdrop-same-on-all-ranks", Dropping, lambda rank, step: (step % 3,), also=("stage1", "stage3-cpu"))
_dropping("layerdrop-all-blocks-on-one-rank", Dropping, lambda rank, step: (0, 1, 2) if rank else (), at3=UNEVEN)


class Experts(nn.Module):
    """A router and experts, of which each batch takes one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, y, expert):
        return F.mse_loss(self.experts[expert](self.inner(x)), y)


@case("experts-per-rank", at3=either("experts.", "rank"), also=("stage1",))
def experts_per_rank(run):
    trainer = run.shard(Experts)
    run.train(trainer, 3, lambda run, step: (*pairs(run, step), (run.rank * 2 + step) % 4))


@case("experts-by-turns", also=("stage3-cpu",))
def experts_by_turns(run):
    trainer = run.shard(Experts)
    run.train(trainer, 4, lambda run, step: (*pairs(run, step), step % 2))


class Routed(nn.Module):
    """Tokens choose experts: some experts get none on some ranks."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, y):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), weights[mine, None] * expert(x[mine]))
        return F.mse_loss(out, y)


trained(
    "experts-chosen-by-data",
    Routed,
    lambda run, step: (run.randn(step, 2, WIDTH), run.randn(step + 50, 2, WIDTH)),
    at3=UNEVEN,
)


class Tasks(Stack):
    """A trunk with a head for each task."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, WORDS) for name in ("parse", "tag", "rank")})

    def forward(self, tokens, task):
        x = self.body(self.embed(tokens))
        return F.cross_entropy(self.heads[task](x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@case("task-heads-per-rank", at3=either("heads.", "rank"), also=("stage1",))
def heads_per_rank(run):
    run.train(run.shard(Tasks), 3, lambda run, step: (run.tokens(step, 4, 8), ("parse", "tag")[run.rank]))


@case("task-heads-by-turns", also=("stage0", "stage1", "stage2-cpu", "stage3-cpu"), gpu=True)
def heads_by_turns(run):
    """Heads that had no gradient in a step keep their weights: no decay, no momentum."""
    run.train(run.shard(Tasks), 4, lambda run, step: (run.tokens(step, 4, 8), ("parse", "tag")[step % 2]))


class Unused(Stack):
    """Holds a branch that no forward uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].spare = nn.Linear(3, 5)


trained("unused-branch-with-weight-decay", Unused, also=("stage0", "stage3-cpu"))
trained("unused-branch-sgd-momentum", Unused, settings={"optimizer": "sgd", "momentum": 0.9})


class OneSided(Stack):
    """A parameter of the rest that only one rank uses; every unit runs everywhere."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, tokens, shifted):
        x = self.body(self.embed(tokens))
        return self.loss(x + self.shift if shifted else x, tokens)


@case("parameter-used-on-one-rank")
def one_sided(run):
    run.train(run.shard(OneSided), 3, lambda run, step: (run.tokens(step, 4, 8), run.rank == 0))


trained("different-batch-sizes-per-rank", Stack, lambda run, step: (run.tokens(step, 2 + 3 * run.rank, 8),))
trained("different-sequence-lengths-per-rank", Stack, lambda run, step: (run.tokens(step, 2, 5 + 4 * run.rank),))


@case("task-heads-after-accumulation", at3=UNEVEN)
def heads_accumulated(run):
    """Two passes a step, each with another head on each rank."""
    trainer = run.shard(Tasks, accumulate=2)
    for step in range(2):
        for half in range(2):
            trainer.backward(trainer(run.tokens(2 * step + half, 4, 8), ("parse", "tag", "rank")[run.rank + half]))
        trainer.step()


@case("loss-without-any-unit-on-one-rank", at3=UNEVEN)
def loss_without_unit(run):
    """One rank's loss reaches the last block alone."""

    class Cut(Regressor):
        def forward(self, x, y, cut):
            for i, block in enumerate(self.blocks):
                x = block(x)
                x = x.detach() if cut and i == 1 else x
            return F.mse_loss(x, y)

    run.train(run.shard(Cut), 3, lambda run, step: (*pairs(run, step), run.rank == 1))
