"""Ranks that do different amounts of work: exact where that has one meaning, else refused on all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, refused

BOTH = refused("rank 0", "rank 1")
"""The error names both ranks, on both of them."""


def _refused(name: str, **about):
    return case(f"calls-{name}", below3=BOTH, at3=BOTH, **about)


def _passes(run, trainer, count: int, step: int) -> None:
    for number in range(count):
        trainer.backward(trainer(*pairs(run, 10 * step + number)))


@_refused("micro-batch-skipped-on-one-rank", also=("stage1",), gpu=True)
def skipped(run):
    trainer = run.shard(Regressor, accumulate=2)
    _passes(run, trainer, 2, 0)
    trainer.step()
    if run.sharded:
        _passes(run, trainer, 2 - run.rank, 1)
        trainer.step()


@_refused("three-passes-against-one", also=("stage1",))
def three_against_one(run):
    trainer = run.shard(Regressor, accumulate=3)
    if run.sharded:
        _passes(run, trainer, 3 if run.rank else 1, 0)
        trainer.step()


@_refused("unfrozen-on-one-rank")
def unfrozen(run):
    model = run.build(Regressor)
    model.blocks[1].requires_grad_(False)
    trainer = run.shard(model)
    _passes(run, trainer, 1, 0)
    trainer.step()
    if run.sharded:
        model.blocks[1].requires_grad_(run.rank == 0)
        _passes(run, trainer, 1, 1)
        trainer.step()


@_refused("frozen-on-one-rank-before-shard", also=("stage1",))
def frozen(run):
    if run.sharded:
        model = run.build(Regressor)
        model.blocks[1].requires_grad_(run.rank == 0)
        run.shard(model)


@_refused("another-model-on-one-rank")
def another_model(run):
    if run.sharded:
        run.shard(lambda: Regressor(2 + run.rank))


@_refused("another-learning-rate-on-one-rank")
def another_rate(run):
    """As a scheduler does that looks at each rank's own loss."""
    trainer = run.shard(Regressor)
    _passes(run, trainer, 1, 0)
    if run.sharded:
        trainer.optimizer.param_groups[0]["lr"] *= 1 + run.rank
        trainer.step()


@_refused("step-left-out-on-one-rank")
def step_left_out(run):
    trainer = run.shard(Regressor, accumulate=2)
    if run.sharded:
        _passes(run, trainer, 1, 0)
        if run.rank:
            trainer.step()
        _passes(run, trainer, 1, 1)
        trainer.step()


@_refused("gradients-dropped-on-one-rank")
def dropped(run):
    trainer = run.shard(Regressor, accumulate=2)
    if run.sharded:
        _passes(run, trainer, 1, 0)
        if run.rank:
            trainer.zero_grad()
        _passes(run, trainer, 1, 1)
        trainer.step()


@_refused("state-read-on-rank-0-alone", also=("stage1",))
def state_on_one(run):
    trainer = run.shard(Regressor)
    _passes(run, trainer, 1, 0)
    if run.sharded:
        if run.rank == 0:
            trainer.state()
        trainer.step()


@_refused("gathered-on-rank-0-alone")
def gathered_on_one(run):
    trainer = run.shard(Regressor)
    _passes(run, trainer, 1, 0)
    trainer.step()
    if run.sharded:
        if run.rank == 0:
            with trainer.gathered("blocks.0.up.weight"):
                pass
        _passes(run, trainer, 1, 1)


class Fails(Regressor):
    """Its backward raises if it is told to."""

    def forward(self, x, y, fails=False):
        out = self.body(x)
        if fails:
            out.register_hook(self._fail)
        return F.mse_loss(out, y)

    def _fail(self, grad):
        raise ValueError("a bad batch")


@case("calls-backward-fails-on-one-rank", also=("stage1",), gpu=True)
def fails_on_one(run):
    """The rank itself raises its error, the other one names it; both go on with the next batch."""
    trainer = run.shard(Fails)
    _passes(run, trainer, 1, 0)
    trainer.step()
    if run.sharded:
        loss = trainer(*pairs(run, 1), fails=run.rank == 0)
        try:
            trainer.engine.backward(loss)
        except ValueError:
            assert run.rank == 0
        except RuntimeError as error:
            assert run.rank == 1 and "rank 0 failed in backward with ValueError: a bad batch" in str(error), error
        else:
            raise AssertionError("not raised")
    _passes(run, trainer, 1, 2)
    trainer.step()


@case("calls-forward-more-often-on-one-rank", also=("stage1",), gpu=True)
def forward_more_often(run):
    """A forward without backward changes nothing, so one rank may make more of them."""
    trainer = run.shard(Stack)
    for step in range(3):
        loss = trainer(run.tokens(step, 4, 8))
        for extra in range(2 * run.rank):
            with torch.set_grad_enabled(extra == 0):
                trainer(run.tokens(50 + extra, 4, 8))
        trainer.backward(loss)
        trainer.step()


@case("calls-evaluation-on-rank-0-alone", also=("stage3-cpu",))
def evaluate_on_one(run):
    trainer = run.shard(Stack)
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        if run.rank == 0:
            with torch.no_grad():
                run.log("evaluation", trainer(run.tokens(90, 4, 8, same=True)))


@case("calls-own-collectives-beside", also=("stage1",))
def own_collectives(run):
    """The user's own collectives, between and inside forward, on the same group."""

    class Normed(Regressor):
        def forward(self, x, y):
            mean = x.mean(0)
            dist.all_reduce(mean)
            return super().forward(x - mean / 2, y)

    trainer = run.shard(Normed)
    for step in range(3):
        loss = trainer(*pairs(run, step))
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        run.log("summed", shown)
        trainer.backward(loss)
        trainer.step()
        dist.barrier()


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x, y, last):
        for block in self.blocks[:last]:
            x = block(x)
        return F.mse_loss(x, y)


@case("calls-one-block-against-six", also=("stage1",))
def one_against_six(run):
    """A rank that runs one block waits for nobody's reductions of the other five."""
    trainer = run.shard(Heads, bucket_nbytes=64 * WIDTH)
    run.train(trainer, 3, lambda run, step: (*pairs(run, step), 6 if run.rank else 1))
