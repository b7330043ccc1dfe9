"""Copies of the model: deepcopy, averaged models, references for DPO, moving averages."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel

import zerocli
from zoo.blocks import Stack
from zoo.case import case, refused

WHOLE = refused("unsharded_model")


def _steps(run, trainer, first: int, count: int) -> None:
    for step in range(first, first + count):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()


@case("deepcopy-after-shard", at3=WHOLE, also=("stage0", "stage3-cpu"), gpu=True)
def deepcopied(run):
    """The copy keeps the values it was made with and runs on them."""
    trainer = run.shard(Stack)
    _steps(run, trainer, 0, 2)
    frozen = copy.deepcopy(trainer.model)
    _steps(run, trainer, 2, 2)
    with torch.no_grad():
        run.log("copy", frozen(run.tokens(7, 4, 8)))
        run.log("live", trainer(run.tokens(7, 4, 8)))


@case("deepcopy-of-a-block", at3=WHOLE)
def deepcopied_block(run):
    trainer = run.shard(Stack)
    _steps(run, trainer, 0, 1)
    block = copy.deepcopy(trainer.model.blocks[1])
    _steps(run, trainer, 1, 1)
    run.log("copy", block(run.randn(7, 2, 8)))


COPIED = refused("copy.copy", "unsharded_model")


@case("copy-of-a-block", below3=COPIED, at3=COPIED)
def copied_block(run):
    copy.copy(run.shard(Stack).model.blocks[0])


@case("averaged-model", at3=WHOLE)
def averaged(run):
    trainer = run.shard(Stack)
    average = AveragedModel(trainer.model)
    for step in range(3):
        _steps(run, trainer, step, 1)
        average.update_parameters(trainer.model)
    with torch.no_grad():
        run.log("average", average(run.tokens(7, 4, 8)))


def _dpo(run, trainer, reference) -> None:
    for step in range(3):
        good, bad = run.tokens(step, 4, 8), run.tokens(step + 50, 4, 8)
        with torch.no_grad():
            base = reference(bad) - reference(good)
        margin = trainer(bad) - trainer(good) - base
        run.log("margin", margin)
        trainer.backward(-F.logsigmoid(margin))
        trainer.step()


@case("dpo-reference-by-deepcopy", at3=WHOLE)
def dpo_deepcopy(run):
    trainer = run.shard(Stack)
    _dpo(run, trainer, copy.deepcopy(trainer.model))


@case("dpo-reference-by-unsharded-model", also=("stage0", "stage3-cpu"))
def dpo_unsharded(run):
    """The supported way to an independent whole copy, after some training."""
    trainer = run.shard(Stack)
    _steps(run, trainer, 5, 2)
    _dpo(run, trainer, trainer.whole_copy())


@case("dpo-reference-by-deepcopy-before-shard")
def dpo_before(run):
    model = run.build(Stack)
    reference = copy.deepcopy(model)
    _dpo(run, run.shard(model), reference)


@case("unsharded-copy-trains-alone")
def copy_trains(run):
    """What is done to the copy does not reach the model, nor the other way round."""
    trainer = run.shard(Stack)
    _steps(run, trainer, 0, 1)
    other = trainer.whole_copy()
    rule = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(2):
        loss = other(run.tokens(step, 4, 8))
        loss.backward()
        rule.step()
        rule.zero_grad()
        _steps(run, trainer, step + 1, 1)
    for name, value in other.named_parameters():
        run.log(name, value)


@case("ema-by-hand", at3=refused("embed.weight", "gathered"))
def ema_by_hand(run):
    trainer = run.shard(Stack)
    average = {name: torch.zeros(p.shape, device=run.device) for name, p in trainer.model.named_parameters()}
    for step in range(3):
        _steps(run, trainer, step, 1)
        with torch.no_grad():
            for name, p in trainer.model.named_parameters():
                average[name].lerp_(p, 0.1)
    for name, value in average.items():
        run.log(name, value)


@case("ema-by-hand-gathered", also=("stage3-cpu",))
def ema_gathered(run):
    trainer = run.shard(Stack)
    average = {name: torch.zeros(p.shape, device=run.device) for name, p in trainer.model.named_parameters()}
    for step in range(3):
        _steps(run, trainer, step, 1)
        with torch.no_grad(), trainer.gathered():
            for name, p in trainer.model.named_parameters():
                average[name].lerp_(p, 0.1)
    for name, value in average.items():
        run.log(name, value)


class PlainEMA:
    """What `zerocli.EMA` must be equal to: torch's AveragedModel, whose first update takes the model's values."""

    def __init__(self, trainer, decay: float) -> None:
        self.trainer, self.decay = trainer, decay
        self.average: dict[str, torch.Tensor] = {}

    def update(self) -> None:
        for name, value in self.trainer.state().items():
            self.average.setdefault(name, value.clone()).lerp_(value, 1 - self.decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.average


@case("ema-of-zerocli", also=("stage0", "stage3-cpu", "stage3-nvme"), gpu=True)
def ema(run):
    trainer = run.shard(Stack)
    average = zerocli.EMA(trainer.engine, decay=0.8) if run.sharded else PlainEMA(trainer, 0.8)
    for step in range(3):
        _steps(run, trainer, step, 1)
        average.update()
    for name, value in sorted(average.state_dict().items()):
        run.log(name, value)
    with torch.no_grad():
        if run.sharded:
            with average.applied():
                run.log("averaged loss", trainer(run.tokens(7, 4, 8)))
        else:
            other = trainer.whole_copy()
            other.load_state_dict(average.state_dict())
            run.log("averaged loss", other(run.tokens(7, 4, 8)))
        run.log("live loss", trainer(run.tokens(7, 4, 8)))
    _steps(run, trainer, 3, 1)
