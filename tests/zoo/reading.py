"""Parameters that a program reads outside of their unit's forward, and weights that are computed from others."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, either, refused, trained


@case("l2-over-parameters", at3=refused("weight", "gathered"), also=("stage0", "stage3-cpu"))
def l2(run):
    trainer = run.shard(Stack)
    for step in range(3):
        loss = trainer(run.tokens(step, 4, 8))
        trainer.backward(loss + 0.01 * sum(p.pow(2).sum() for p in trainer.model.parameters()))
        trainer.step()


@case("l2-over-a-block", at3=either("blocks.1", "gathered"))
def l2_block(run):
    """The penalty is on the parameters of one unit."""
    trainer = run.shard(Stack)
    for step in range(3):
        loss = trainer(run.tokens(step, 4, 8))
        trainer.backward(loss + 0.01 * sum(p.abs().sum() for p in trainer.model.blocks[1].parameters()))
        trainer.step()


class OwnPenalty(Stack):
    """The root's forward reads its blocks' weights."""

    def forward(self, tokens):
        penalty = sum(block.up.weight.pow(2).sum() for block in self.blocks)
        return super().forward(tokens) + 0.01 * penalty


trained("l2-inside-the-roots-forward", OwnPenalty, at3=either("up.weight", "gathered"), also=("stage3-cpu",))


class BlockPenalty(Block):
    def forward(self, x):
        return super().forward(x), self.up.weight.pow(2).sum()


class PenaltyInBlocks(Stack):
    """Each unit computes the penalty of its own weights: this works at every stage."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(BlockPenalty() for _ in range(3))

    def forward(self, tokens):
        x, penalty = self.embed(tokens), 0.0
        for block in self.blocks:
            x, own = block(x)
            penalty = penalty + own
        return self.loss(x, tokens) + 0.01 * penalty


trained("l2-inside-units", PenaltyInBlocks)


@case("read-gathered-parameters", also=("stage0", "stage3-cpu", "stage3-nvme"))
def read_gathered(run):
    """Histograms of weights: reading whole parameters between steps, by name, by module, and all."""
    trainer = run.shard(Stack)
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        with torch.no_grad():
            with trainer.gathered():
                run.log("norms", torch.stack([p.norm() for p in trainer.model.parameters()]))
            with trainer.gathered(trainer.model.blocks[2]):
                run.log("block", trainer.model.blocks[2].up.weight.clone())
            with trainer.gathered("blocks.0.up.weight", trainer.model.head.weight):
                run.log("weights", trainer.model.blocks[0].up.weight.sum() + trainer.model.head.weight.sum())


@case("gathered-body-that-raises", also=("stage0", "stage3-cpu"))
def raising_body(run):
    """What the body has written before is kept, as in plain torch, on whichever rank it raises."""
    trainer = run.shard(Stack)
    for step in range(3):
        weight = trainer.model.blocks[0].up.weight
        try:
            with torch.no_grad(), trainer.gathered(trainer.model.blocks[0], write=True):
                weight.mul_(0.8)
                if step or run.rank:
                    raise KeyError("a wrong name")
        except KeyError:
            run.log("raised", step)
        trainer.edited()
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()


@case("print-a-parameter-between-steps", at3=refused("blocks.0.up.weight", "gathered"))
def printing(run):
    trainer = run.shard(Stack)
    for step in range(2):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        run.log("mean", trainer.model.blocks[0].up.weight.mean())


@case("to-list-of-a-parameter", at3=refused("head.weight", "gathered"))
def to_list(run):
    trainer = run.shard(Stack)
    trainer.backward(trainer(run.tokens(0, 4, 8)))
    trainer.step()
    run.log("values", trainer.model.head.weight.detach().cpu().numpy())


# -- weights made from others ------------------------------------------------------------------------------------------


def _normed(how, module: nn.Module, name: str = "weight") -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return how(module, name)


def _with(how, on_units: bool = False):
    def make() -> nn.Module:
        model = Regressor()
        for block in model.blocks:
            _normed(how, block.up)
        if on_units:
            model.blocks = nn.ModuleList(_normed(how, nn.Linear(WIDTH, WIDTH)) for _ in range(3))
        return model

    return make


OLD_WEIGHT, OLD_SPECTRAL = torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm
NEW_WEIGHT, NEW_SPECTRAL = parametrizations.weight_norm, parametrizations.spectral_norm

trained("weight-norm-inside-units", _with(OLD_WEIGHT), pairs)
trained(
    "weight-norm-on-units",
    _with(OLD_WEIGHT, True),
    pairs,
    at3=either("weight_", "gathered"),
    also=("stage3-cpu",),
    gpu=True,
)
trained("weight-norm-parametrized-inside-units", _with(NEW_WEIGHT), pairs)
trained("weight-norm-parametrized-units", _with(NEW_WEIGHT, True), pairs, at3=either("weight", "gathered"))
trained("spectral-norm-inside-units", _with(OLD_SPECTRAL), pairs)
trained("spectral-norm-on-units", _with(OLD_SPECTRAL, True), pairs, at3=either("weight", "gathered"))
trained("spectral-norm-parametrized-inside-units", _with(NEW_SPECTRAL), pairs)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


def _symmetric() -> nn.Module:
    model = Regressor()
    model.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    for layer in model.blocks:
        parametrize.register_parametrization(layer, "weight", Symmetric())
    return model


trained("own-parametrization-of-units", _symmetric, pairs, at3=either("weight", "gathered"))


class Hyper(nn.Module):
    """A hypernetwork: one unit's output is another layer's weight."""

    def __init__(self):
        super().__init__()
        self.makers = nn.ModuleList(nn.Linear(4, WIDTH * WIDTH) for _ in range(3))
        self.codes = nn.ParameterList(torch.randn(4) for _ in range(3))

    def forward(self, x, y):
        for maker, code in zip(self.makers, self.codes, strict=True):
            x = x + torch.tanh(F.linear(x, maker(code).view(WIDTH, WIDTH)))
        return F.mse_loss(x, y)


trained("hypernetwork", Hyper, pairs)


class Standardised(nn.Conv1d):
    """Weight standardisation: the weight is normalised inside forward."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2), keepdim=True)
        weight = weight / (weight.std((1, 2), keepdim=True) + 1e-3)
        return x + self._conv_forward(x, weight, self.bias)


class StandardisedNet(Regressor):
    def __init__(self):
        super().__init__(0)
        self.blocks = nn.ModuleList(Standardised(4, 4, 3, padding=1) for _ in range(3))


trained("weight-standardisation", StandardisedNet, lambda run, s: (run.randn(s, 2, 4, 6), run.randn(s + 9, 2, 4, 6)))
