"""Graphs from before a change of the parameters: torch raises an error for them, and so must the engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import zerocli
from zoo.blocks import Block, Regressor, Stack, pairs
from zoo.case import case, refused
from zoo.graphs import Net

STEP = refused("step()")


def _penalty(trainer):
    """Return the sum of the parameters' squares, as a user writes it at this stage."""
    with trainer.gathered():
        return sum(p.pow(2).sum() for p in trainer.model.parameters())


def _trains(run, trainer, step: int = 0) -> None:
    trainer.backward(F.mse_loss(trainer(*pairs(run, step)[:1]).float(), pairs(run, step)[1]))
    trainer.step()


def _refused_after(name: str, before, change=_trains, settings=None, make=Net, **about) -> None:
    """Enter a case: `before` makes a loss, `change` changes the parameters, and backward of the loss is refused."""

    @case(f"stale-{name}", below3=STEP, at3=STEP, **about)
    def program(run):
        trainer = run.shard(make, **(settings or {}))
        _trains(run, trainer, 7)
        loss = before(run, trainer)
        change(run, trainer)
        if run.sharded:  # plain torch raises an error here
            trainer.backward(loss())
            trainer.step()


def _l2(run, trainer):
    term = _penalty(trainer)
    return lambda: term


class Box:
    """An object that torch's pytree does not know."""

    def __init__(self, value):
        self.value = value


class Boxed(Net):
    def forward(self, x):
        return Box(super().forward(x)) if self.boxed else super().forward(x)

    boxed = False


def _boxed(run, trainer):
    trainer.model.boxed = True
    found = trainer(pairs(run, 1)[0])
    trainer.model.boxed = False
    return lambda: found.value.mean()


class Keeping(Net):
    """Keeps its last hidden state as an attribute."""

    def forward(self, x):
        x = super().forward(x)
        self.hidden = x * 1.0
        return x


def _attribute(run, trainer):
    trainer(pairs(run, 1)[0])
    hidden = trainer.model.hidden
    return lambda: hidden.mean()


def _hooked(run, trainer):
    found = []
    handle = trainer.model[1].register_forward_hook(lambda module, args, output: found.append(output.pow(2)))
    trainer(pairs(run, 1)[0])
    handle.remove()
    return lambda: found[0].mean()


def _plain(run, trainer):
    out = trainer(pairs(run, 1)[0])
    return lambda: out.mean()


def _tuple(run, trainer):
    out = trainer(pairs(run, 1)[0])
    return lambda: F.mse_loss(trainer(pairs(run, 2)[0] + out), out)


def _slope(run, trainer):
    x = pairs(run, 1)[0].requires_grad_()
    (slope,) = torch.autograd.grad(trainer(x).sum(), x, create_graph=True)
    return lambda: slope.pow(2).sum()


def _loads(run, trainer):
    trainer.load({name: value * 0.5 for name, value in trainer.state().items()})


def _writes(run, trainer):
    with trainer.gathered(write=True), torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(0.5)


_refused_after("l2-term", _l2, also=("stage1",), gpu=True)
_refused_after("l2-term-bf16", _l2, settings={"precision": "bf16"}, also=("stage1",), tolerance=1e-2)
_refused_after("l2-term-and-load", _l2, _loads)
_refused_after("l2-term-and-write", _l2, _writes)
_refused_after("output-in-an-object", _boxed, make=Boxed, also=("stage1",), gpu=True)
_refused_after("output-in-an-object-and-load", _boxed, _loads, make=Boxed)
_refused_after("output-in-an-object-recomputed", _boxed, make=Boxed, settings={"recompute": True}, also=("stage1",))
_refused_after("output-in-an-object-selective", _boxed, make=Boxed, settings={"recompute": "selective"})
_refused_after("attribute-of-the-model", _attribute, make=Keeping)
_refused_after("list-of-a-hook", _hooked, also=("stage1",))
_refused_after("output-and-load", _plain, _loads)
_refused_after("output-and-write", _plain, _writes)
_refused_after("state-carried-without-detach", _tuple)
_refused_after("second-derivative", _slope, also=("stage1",))


@case("stale-average", below3=STEP, at3=STEP, also=("stage1",))
def average(run):
    """A graph made with averaged weights is not one of the trained weights."""
    trainer = run.shard(Boxed)
    _trains(run, trainer)
    if run.sharded:
        ema = zerocli.EMA(trainer.engine, decay=0.5)
        ema.update()
        _trains(run, trainer, 1)
        with ema.applied():
            loss = _boxed(run, trainer)
        trainer.backward(loss())
        trainer.step()


@case("stale-trained-graph-under-average", below3=STEP, at3=STEP)
def under_average(run):
    trainer = run.shard(Boxed)
    _trains(run, trainer)
    if run.sharded:
        ema = zerocli.EMA(trainer.engine, decay=0.5)
        ema.update()
        _trains(run, trainer, 1)
        loss = _boxed(run, trainer)
        with ema.applied():
            trainer.backward(loss())


@case("stale-retained-graph", below3=STEP, at3=STEP)
def retained(run):
    trainer = run.shard(Boxed)
    loss = _boxed(run, trainer)
    trainer.backward(loss(), retain_graph=True)
    trainer.step()
    if run.sharded:
        trainer.backward(loss())


@case("stale-autograd-grad", also=("stage1",))
def autograd_grad(run):
    """`torch.autograd.grad` after the step is refused too, and training goes on."""
    trainer = run.shard(Net)
    for step in range(3):
        x = pairs(run, step)[0].requires_grad_()
        out = trainer(x)
        _trains(run, trainer, step)
        run.refused(lambda out=out, x=x: torch.autograd.grad(out.sum(), x), "step()")


@case("stale-refused-then-going-on", also=("stage1",), gpu=True)
def going_on(run):
    trainer = run.shard(Boxed)
    for step in range(3):
        term, boxed = _l2(run, trainer), _boxed(run, trainer)
        _trains(run, trainer, step)
        run.refused(lambda term=term: trainer.engine.backward(term()), "step()")
        run.refused(lambda boxed=boxed: trainer.engine.backward(boxed()), "step()")


@case("stale-fresh-terms", also=("stage1",), gpu=True)
def fresh(run):
    """Terms and outputs of the same step are exact, over several passes and with a retained graph."""
    trainer = run.shard(Boxed, accumulate=3)
    for step in range(3):
        x, y = pairs(run, step)
        boxed, term = _boxed(run, trainer), _penalty(trainer)
        trainer.backward(F.mse_loss(trainer(x), y) + 0.1 * term)
        trainer.backward(boxed(), retain_graph=True)
        trainer.backward(boxed().pow(2))
        trainer.step()


@case("stale-state-carried-detached")
def carried(run):
    trainer = run.shard(Boxed)
    state = 0.0
    for step in range(3):
        x, y = pairs(run, step)
        trainer.model.boxed = True
        state = trainer(x + state).value
        trainer.backward(F.mse_loss(state, y))
        state = state.detach()
        trainer.step()


@case("stale-graph-of-frozen-parameters", also=("stage1",))
def frozen(run):
    """A graph through parameters that never change stays valid."""

    def make():
        model = Regressor(2)
        model.first = Block().requires_grad_(False)
        return model

    trainer = run.shard(make)
    x = run.randn(50, 4, 8).requires_grad_()
    with trainer.gathered(trainer.model.first):
        kept = F.linear(x, trainer.model.first.up.weight).tanh()
    for step in range(2):
        trainer.backward(trainer(*pairs(run, step)))
        trainer.step()
    (slope,) = torch.autograd.grad(kept.sum(), x)  # at stage 3 the weight is gathered again
    run.log("slope", slope)


@case("stale-deferred-update", below3=refused("synchronize"), at3=refused("gathered"), also=("stage1",))
def deferred(run):
    """With a deferred update the parameters are not yet the step's result."""
    trainer = run.shard(Stack, **({"defer_update": True} if run.sharded else {}))
    for step in range(2):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
    run.log("norm", trainer.model.head.weight.norm())


@case("stale-deferred-update-synchronized", also=("stage1",))
def synchronized(run):
    trainer = run.shard(Stack, **({"defer_update": True} if run.sharded else {}))
    for step in range(3):
        trainer.backward(trainer(run.tokens(step, 4, 8)))
        trainer.step()
        if run.sharded and step == 1:
            trainer.engine.synchronize()
        if step == 1:
            with trainer.gathered("head.weight"):
                run.log("norm", trainer.model.head.weight.norm())
