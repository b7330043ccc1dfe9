"""Outputs, inputs and classes that are the user's own objects: they stay so, and keep their precision."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import UserDict, namedtuple

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, refused, trained
from zoo.graphs import Net

BF16 = torch.bfloat16
TOLERANCE = 2e-2


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    parts: list


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: torch.Tensor


class Plain:
    def __init__(self, loss):
        self.loss = loss


Pair = namedtuple("Pair", "loss other")


class Kept(Regressor):
    """Returns an object that it keeps."""

    def __init__(self, make=dict):
        super().__init__()
        self.kept, self.make = None, make

    def forward(self, x, y):
        loss = super().forward(x, y)
        self.kept = self.make(loss)
        return self.kept


def _output(name: str, make) -> None:
    @case(f"own-object-output-{name}", also=("stage1",))
    def program(run):
        trainer = run.shard(lambda: Kept(make))
        for step in range(2):
            out = trainer(*pairs(run, step))
            run.log("the same object", out is trainer.model.kept)
            loss = out[0] if isinstance(out, list | tuple) else out["loss"] if hasattr(out, "keys") else out.loss
            trainer.backward(loss)
            trainer.step()


_output("dict", lambda loss: {"loss": loss})
_output("list", lambda loss: [loss])
_output("tuple", lambda loss: Pair(loss, [loss]))
_output("mapping", lambda loss: UserDict(loss=loss))
_output("read-only-mapping", lambda loss: types.MappingProxyType({"loss": loss}))
_output("dataclass", lambda loss: Result(loss, [loss]))
_output("frozen-dataclass", Frozen)
_output("plain-object", Plain)


@case("own-object-output-changed-later", also=("stage1",))
def changed_later(run):
    """What the model puts into its dict and list after it has returned them is seen by the caller."""

    class Later(Regressor):
        def __init__(self):
            super().__init__()
            self.record, self.history = {}, []

        def forward(self, x, y):
            loss = super().forward(x, y)
            self.record["loss"] = loss
            self.history.append(loss.detach())
            return self.record, self.history

    trainer = run.shard(Later)
    record, history = trainer(*pairs(run, 50))
    for step in range(3):
        trainer(*pairs(run, step))
        trainer.backward(record["loss"])
        trainer.step()
        run.log("history", torch.stack(history))
    history.clear()
    run.log("cleared", len(trainer.model.history))


@case("own-object-output-of-blocks")
def of_blocks(run):
    """Blocks return a dict that they keep; the model changes it."""

    class Keeps(Block):
        def __init__(self):
            super().__init__()
            self.state = {"calls": 0}

        def forward(self, x):
            self.state["x"] = super().forward(x)
            self.state["calls"] += 1
            return self.state

    class Model(Regressor):
        def __init__(self):
            super().__init__(0)
            self.blocks = nn.ModuleList(Keeps() for _ in range(3))

        def body(self, x):
            for block in self.blocks:
                state = block(x)
                assert state is block.state
                x = state["x"] / state["calls"]
            return x

    run.train(run.shard(Model), 3, pairs)


@case("own-object-output-parameter-in-a-list")
def parameter(run):
    """A list with a weight in it: at stage 3 it is a copy, which outlives the gathered weight."""

    class Shows(Regressor):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, y):
            self.shown = [super().forward(x * self.scale, y), self.scale]
            return self.shown

    trainer = run.shard(Shows)
    for step in range(3):
        out = trainer(*pairs(run, step))
        run.log("the same list", out is trainer.model.shown)
        run.log("scale", out[1])
        trainer.backward(out[0])
        trainer.step()


def _filled(name: str, precision: str, tolerance: float) -> None:
    @case(f"own-object-input-{name}", tolerance=tolerance, also=("stage1",))
    def program(run):
        """The model fills the caller's list and dict."""

        class Fills(Regressor):
            def forward(self, x, y, found, notes):
                loss = F.mse_loss(self.body(x).float(), y)
                found.append(loss)
                notes["mean"] = x.detach().float().mean()
                return found

        trainer = run.shard(Fills, precision=precision, plain_cast=False)
        for step in range(3):
            found, notes = [], {}
            x, y = pairs(run, step)
            out = trainer(x.to(BF16) if precision == "bf16" else x, y, found, notes)
            run.log("the same list", out is found)
            run.log("filled", len(found) + len(notes))
            trainer.backward(found[0].float())
            trainer.step()


_filled("filled", "fp32", 1e-5)
_filled("filled-bf16", "bf16", TOLERANCE)


# -- floating-point inputs under bf16 ----------------------------------------------------------------------------------


class Diffusion(Regressor):
    """Sines of large timesteps: bf16 cannot hold 999."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, t):
        waves = t[:, None] * torch.exp(-torch.arange(WIDTH, device=t.device) * 0.5)
        embedded = self.time(waves.sin().to(self.time[0].weight.dtype))
        x = x.to(embedded.dtype)
        return F.mse_loss(self.body(x + embedded).float(), x.float()), waves.sin().sum()


def _timesteps(run, step):
    generator = torch.Generator().manual_seed(step)
    return run.randn(step, 4, WIDTH), torch.randint(900, 1000, (4,), generator=generator).float().to(run.device)


def _uncast(name: str, make, batch, precision: str = "bf16") -> None:
    @case(f"own-object-{name}", tolerance=TOLERANCE, also=("stage1",))
    def program(run):
        trainer = run.shard(make, precision=precision, plain_cast=False)
        for step in range(3):
            loss, exact = trainer(*batch(run, step))
            run.log("exact", exact.double())
            trainer.backward(loss)
            trainer.step()


_uncast("timesteps-bf16", Diffusion, _timesteps)
_uncast("timesteps-fp16", Diffusion, _timesteps, "fp16")


class Labelled(Regressor):
    """Float labels and sample weights in the loss."""

    def forward(self, x, y, weights):
        x = self.body(x.to(self.blocks[0].up.weight.dtype))
        return ((x.float() - y).pow(2).mean(1) * weights).mean(), (y.sum(1) * 1000 * weights).sum()


_uncast("labels-bf16", Labelled, lambda run, step: (*pairs(run, step), 1 + run.randn(step, 4).abs()))


@case("own-object-data-is-cast-at-the-layer", tolerance=5e-2, also=("stage1",))
def data(run):
    """fp32 data reaches layers of bf16 weights: of torch.nn, of the user's own, by keyword and nested."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

        def forward(self, x):
            return x @ self.weight

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.own, self.rnn = nn.Conv1d(1, 1, 3, padding=1), Own(), nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, batch, y=None):
            x = batch["x"]
            seen = self.conv(x[:, None])[:, 0] + self.own(x) + self.rnn(x[:, None])[0][:, 0] + self.head(self.norm(x))
            return F.mse_loss(seen.float(), y.float())

    trainer = run.shard(Reads, precision="bf16")
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(trainer({"x": x}, y=y))
        trainer.step()


@case("own-object-cast-inputs", tolerance=TOLERANCE)
def cast_inputs(run):
    """On request all floating-point inputs are cast, as the reference does."""
    settings = {"cast_inputs": True} if run.sharded else {}
    run.train(run.shard(Regressor, precision="bf16", **settings), 3, pairs)


@case("own-object-data-that-cannot-be-cast", below3=refused("cast_inputs"), at3=refused("cast_inputs"))
def not_cast(run):
    class Product(Regressor):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x, y):
            return super().forward(x @ self.weight, y)

    run.train(run.shard(Product, precision="bf16"), 1, pairs)


@case("own-object-bf16-model-in-fp32", below3=refused("precision"), at3=refused("precision"))
def bf16_model(run):
    run.train(run.shard(lambda: Stack().to(BF16)), 2)


@case("own-object-mixed-model-in-fp32", below3=refused("precision"), at3=refused("precision"))
def mixed_model(run):
    """One layer in bf16: the model's own casts would meet weights in fp32."""

    def make():
        model = Stack()
        model.head.to(BF16)
        return model

    if run.sharded:
        run.shard(make)


trained("own-object-bf16-model-in-bf16", lambda: Stack().to(BF16), settings={"precision": "bf16"}, tolerance=5e-3)


# -- classes -----------------------------------------------------------------------------------------------------------


@functools.singledispatch
def _scale(module):
    return 1.0


@_scale.register
def _(module: Block):
    return 0.5


@case("own-object-exact-type", also=("stage1",))
def exact_type(run):
    """Code that asks for a module's exact class."""
    table = {Block: 2.0, nn.Linear: 3.0}

    class Dispatches(Regressor):
        def body(self, x):
            for block in self.blocks:
                assert type(block) is Block and block.__class__ in table
                x = block(x) * table[type(block)] * _scale(block)
            return self.last(x) * table[self.last.__class__]

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(WIDTH, WIDTH)

    trainer = run.shard(Dispatches)
    run.log("type", type(trainer.model) is Dispatches)
    run.train(trainer, 3, pairs)


@case("own-object-class-with-arguments", also=("stage1",))
def class_arguments(run):
    """A class whose subclasses must give an argument."""

    class Named(Block):
        def __init_subclass__(cls, *, kind, **keywords):
            super().__init_subclass__(**keywords)
            cls.kind = kind

    class First(Named, kind="first"):
        pass

    def make():
        model = Regressor(0)
        model.blocks = nn.ModuleList(First() for _ in range(3))
        return model

    run.train(run.shard(make), 3, pairs)


# -- zero gradients ----------------------------------------------------------------------------------------------------


def _zeros(name: str, zero, optimizer: str, **options) -> None:
    @case(f"own-object-zero-grad-{name}", also=("stage1",))
    def program(run):
        """A head that is used in the first steps alone: with zero gradients, momentum and decay go on acting on it."""

        class Heads(Regressor):
            def __init__(self):
                super().__init__()
                self.extra = nn.Linear(WIDTH, WIDTH)

            def forward(self, x, y, extra):
                x = self.body(x)
                return F.mse_loss(self.extra(x) if extra else x, y)

        settings = {"optimizer": optimizer, **options}
        trainer = run.shard(Heads, **settings)
        for step in range(4):
            if run.sharded:
                zero(trainer)
            else:
                had = [p for p in trainer.masters.values() if getattr(p, "had", False)]
                for p in had:
                    p.grad = torch.zeros_like(p)
            trainer.backward(trainer(*pairs(run, step), step < 2))
            if not run.sharded:
                for p in trainer.masters.values():
                    p.had = getattr(p, "had", False) or p.grad is not None
            trainer.step()


_zeros("of-the-engine", lambda trainer: trainer.engine.zero_grad(set_to_none=False), "adamw")
_zeros("of-the-optimizer", lambda trainer: trainer.optimizer.zero_grad(set_to_none=False), "sgd", momentum=0.9)
_zeros("of-the-model", lambda trainer: trainer.model.zero_grad(set_to_none=False), "adamw")


@case("own-object-zero-grad-to-none")
def to_none(run):
    """Without zero gradients nothing acts on an unused parameter."""

    class Heads(Net):
        def __init__(self):
            super().__init__()
            self.extra = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, extra):
            for block in self[:3]:
                x = block(x)
            return self.extra(x) if extra else x

        def __getitem__(self, index):
            return list(self.children())[index]

    trainer = run.shard(Heads)
    for step in range(3):
        x, y = pairs(run, step)
        trainer.zero_grad()
        trainer.backward(F.mse_loss(trainer(x, step == 0), y))
        trainer.step()
