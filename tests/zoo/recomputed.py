"""Recomputed blocks whose forward changes state: it changes once, and the second run sees what the first saw."""

from __future__ import annotations

import itertools
import random
import time

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import spectral_norm as parametrized_spectral_norm

from zoo.blocks import WIDTH, Block, Regressor, pairs
from zoo.case import case, refused, trained


def _stack(block, layers: int = 3):
    """Return a factory of a regressor of such blocks."""

    def make():
        model = Regressor(0)
        model.blocks = nn.ModuleList(block() for _ in range(layers))
        return model

    return make


def _recomputed(name: str, block, how=True, **about) -> None:
    trained(f"recompute-{name}", _stack(block), pairs, settings={"recompute": how}, **about)


class Normed(nn.Module):
    """Batch statistics in training, running ones in evaluation."""

    momentum: float | None = 0.1

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH, momentum=self.momentum)

    def forward(self, x):
        return x + F.silu(self.norm(self.linear(x)))


class Cumulative(Normed):
    momentum = None


_recomputed("batch-norm", Normed, also=("stage0", "stage1"), gpu=True)
_recomputed("batch-norm-selective", Normed, "selective")
_recomputed("batch-norm-two-blocks", Normed, 2)
_recomputed("batch-norm-by-class", Normed, Normed)
_recomputed("batch-norm-cumulative", Cumulative)


class Counted(Block):
    """A counter in a buffer scales the output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x) / self.count.clone()


class Replacing(Counted):
    """The buffer is a new tensor each time."""

    def forward(self, x):
        self.count = self.count + 1
        return Block.forward(self, x) / self.count


class ThroughData(Counted):
    """An edit through `.data`, which no version counter shows."""

    def forward(self, x):
        self.count.data.add_(1)
        return Block.forward(self, x) / self.count


_recomputed("step-counter", Counted, gpu=True)
_recomputed("step-counter-selective", Counted, "selective")
_recomputed("step-counter-replaced", Replacing)
_recomputed("step-counter-through-data", ThroughData)


class Spectral(nn.Module):
    wrap = staticmethod(parametrized_spectral_norm)

    def __init__(self):
        super().__init__()
        self.linear = self.wrap(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + F.silu(self.linear(x))


class OldSpectral(Spectral):
    wrap = staticmethod(spectral_norm)


_recomputed("spectral-norm", Spectral)
_recomputed("spectral-norm-by-hook", OldSpectral)


class Codebook(nn.Module):
    """Nearest codes, moved towards the data in forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(5, WIDTH))

    def forward(self, x):
        x = self.linear(x)
        nearest = torch.cdist(x, self.codes).argmin(-1)
        chosen = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.codes.data[nearest] = 0.5 * chosen + 0.5 * x.detach()
        return x + torch.tanh(x * chosen)


_recomputed("codebook", Codebook, gpu=True)


class Drawing(Block):
    """Noise from a generator that torch's checkpoint does not know."""

    draw = staticmethod(random.random)

    def forward(self, x):
        return super().forward(x * (0.5 + self.draw()))


class NumpyDrawing(Drawing):
    draw = staticmethod(lambda: float(numpy.random.rand()))


class OwnGenerator(Drawing):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def draw(self):
        return float(torch.rand((), generator=self.generator))


class OwnRandom(Drawing):
    def __init__(self):
        super().__init__()
        self.generator = random.Random(3)

    def draw(self):
        return self.generator.random()


def _seeded(name: str, block, steps: int = 3) -> None:
    @case(f"recompute-{name}")
    def program(run):
        random.seed(5), numpy.random.seed(5)
        run.train(run.shard(_stack(block), recompute=True), steps, pairs)
        run.log("next draws", [random.random(), float(numpy.random.rand())])


_seeded("python-random", Drawing)
_seeded("numpy-random", NumpyDrawing)
_seeded("own-torch-generator", OwnGenerator)
_seeded("own-python-generator", OwnRandom)


class Attributes(Block):
    """A counter, a list and a cached tensor, all used in forward."""

    def __init__(self):
        super().__init__()
        self.calls, self.means, self.last = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.means.append(self.calls * 0.5)
        y = super().forward(x) / self.calls + sum(self.means)
        if self.last is not None:
            y = y + self.last.mean()
        self.last = y.detach()
        return y


class Statistics:
    def __init__(self):
        self.count = 0


class InAnObject(Block):
    def __init__(self):
        super().__init__()
        self.statistics = Statistics()

    def forward(self, x):
        self.statistics.count += 1
        return super().forward(x) / self.statistics.count


_recomputed("attributes", Attributes, also=("stage0",))
_recomputed("attributes-selective", Attributes, "selective")
_recomputed("attribute-of-an-object", InAnObject)

CALLS = [0]


class Global(Block):
    def forward(self, x):
        CALLS[0] += 1
        return super().forward(x) / (1 + CALLS[0] % 3)


@case("recompute-global-variable")
def global_variable(run):
    CALLS[0] = 0
    run.train(run.shard(_stack(Global), recompute=True), 3, pairs)
    run.log("calls", CALLS[0])


@case("recompute-closure")
def closure(run):
    seen = []

    class Noting(Block):
        def forward(self, x):
            seen.append(len(seen))
            return super().forward(x) / len(seen)

    run.train(run.shard(_stack(Noting), recompute=True), 3, pairs)
    run.log("seen", seen)


@case("recompute-shared-buffer")
def shared(run):
    """One counter belongs to all blocks."""

    def make():
        model = _stack(Counted)()
        for block in model.blocks[1:]:
            block.count = model.blocks[0].count
        return model

    run.train(run.shard(make, recompute=True), 3, pairs)


@case("recompute-counter-of-the-model")
def counter_of_the_model(run):
    """A block changes a buffer and an attribute of the model around it."""

    class Counting(Block):
        def forward(self, x):
            self.root[0].count += 1
            self.root[0].calls += 1
            return super().forward(x) / (self.root[0].count + self.root[0].calls)

    def make():
        model = _stack(Counting)()
        model.register_buffer("count", torch.zeros(()))
        model.calls = 0
        for block in model.blocks:
            block.root = (model,)
        return model

    run.train(run.shard(make, recompute=True), 3, pairs)


SEQUENTIAL = {"recompute": nn.Sequential, "units": nn.Sequential}


@case("recompute-two-calls-of-a-block")
def two_calls(run):
    class Twice(Regressor):
        def body(self, x):
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return x

    def make():
        model = Twice(0)
        model.blocks = nn.ModuleList(nn.Sequential(Counted(), Normed()) for _ in range(2))
        return model

    run.train(run.shard(make, **SEQUENTIAL), 3, pairs)


@case("recompute-two-graphs-at-a-time", also=("stage1",))
def two_graphs(run):
    """Two forwards, then their backwards: each recomputation sees its own forward's state."""
    trainer = run.shard(_stack(lambda: nn.Sequential(Counted(), Normed())), accumulate=2, **SEQUENTIAL)
    for step in range(4):
        first, second = trainer(*pairs(run, step)), trainer(*pairs(run, step + 20))
        trainer.backward(first)
        trainer.backward(second)
        trainer.step()


@case("recompute-evaluation-before-backward")
def evaluation(run):
    """The model is in evaluation mode when the block is recomputed."""
    trainer = run.shard(_stack(lambda: nn.Sequential(Normed(), nn.Dropout(0.3))), **SEQUENTIAL)
    for step in range(3):
        trainer.model.train()
        loss = trainer(*pairs(run, step))
        trainer.model.eval()
        with torch.no_grad():
            run.log("evaluation", trainer(*pairs(run, step + 20)))
        trainer.backward(loss)
        trainer.step()


@case("recompute-dropout-after-draws")
def dropout(run):
    """Replayed dropout stays right beside the other generators."""
    random.seed(5)
    run.train(run.shard(_stack(lambda: nn.Sequential(Drawing(), nn.Dropout(0.3), Normed())), **SEQUENTIAL), 3, pairs)


@case("recompute-retained-graph")
def retained(run):
    """The block is recomputed twice for one forward."""
    trainer = run.shard(_stack(Attributes), accumulate=2, recompute=True)
    for step in range(3):
        loss = trainer(*pairs(run, step))
        trainer.backward(loss, retain_graph=True)
        trainer.backward(loss * 2)
        trainer.step()


class Lists(Regressor):
    """Blocks append to a list that the model gives them."""

    def forward(self, x, y):
        found = []
        for block in self.blocks:
            x = block(x, found)
        return F.mse_loss(x, y) + sum(each.pow(2).mean() for each in found) + len(found)


class Memory:
    def __init__(self):
        self.found, self.count = [], 0


class Objects(Regressor):
    """The same with an object."""

    def forward(self, x, y):
        memory = Memory()
        for block in self.blocks:
            x = block(x, memory)
        return F.mse_loss(x, y) + sum(each.pow(2).mean() for each in memory.found) + memory.count


class Appending(Block):
    def forward(self, x, found):
        x = super().forward(x)
        found.append(x * len(found))
        return x


class Remembering(Block):
    def forward(self, x, memory):
        x = super().forward(x)
        memory.count += 1
        memory.found.append(torch.tanh(x * memory.count))
        return torch.tanh(x / memory.count)


def _fills(name, kind, block) -> None:
    def make():
        model = kind(0)
        model.blocks = nn.ModuleList(block() for _ in range(3))
        return model

    trained(f"recompute-{name}", make, pairs, settings={"recompute": True})


_fills("list-filled-by-blocks", Lists, Appending)
_fills("object-filled-by-blocks", Objects, Remembering)


# -- refused -----------------------------------------------------------------------------------------------------------


class Late(Block):
    """Begins to change its buffer after some steps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 4:
            self.count += 1
        return super().forward(x) * (1 + self.count)


RECOMPUTE = refused("recompute")
trained(
    *("recompute-buffer-that-changes-late", _stack(Late), pairs, 6, {"recompute": True}),
    below3=RECOMPUTE,
    at3=RECOMPUTE,
)


@case("recompute-another-path", below3=RECOMPUTE, at3=RECOMPUTE)
def another_path(run):
    """State that cannot be seen decides which operations run."""

    class Path(Block):
        numbers = itertools.count()

        def forward(self, x):
            return super().forward(x) if next(Path.numbers) % 2 else torch.tanh(super().forward(x).sin())

    run.train(run.shard(_stack(Path, 2), recompute=True), 2, pairs)


@case("recompute-input-changed-in-place", below3=refused("in place"), at3=refused("in place"))
def in_place(run):
    class InPlace(Block):
        def forward(self, x):
            return super().forward(x.mul_(0.5))

    class Inner(Regressor):
        def body(self, x):
            return super().body(x * 1.0 if not run.sharded else x * self.scale)

        def __init__(self):
            super().__init__(0)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.blocks = nn.ModuleList(InPlace() for _ in range(2))

    trainer = run.shard(Inner, recompute=True)
    if run.sharded:
        trainer.backward(trainer(*pairs(run, 0)))
        trainer.step()


# -- random numbers that are drawn late, or into what autograd saves ---------------------------------------------------


def _late(kind):
    """Return a block that draws from its fourth call on: after those that are watched most closely."""

    class Later(kind):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) if self.calls > 3 else Block.forward(self, x)

    return Later


class ImportedInside(Drawing):
    def draw(self):
        from random import uniform

        return uniform(0.0, 1.0)


for _kind in (Drawing, NumpyDrawing, OwnGenerator, OwnRandom, ImportedInside):
    _seeded(f"late-draws-{_kind.__name__.lower()}", _late(_kind), 6)


class Walking(Block):
    """A tensor in an attribute moves in place, from its fourth call on."""

    def __init__(self):
        super().__init__()
        self.noise, self.calls = torch.zeros(WIDTH), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            self.noise.add_(torch.empty_like(self.noise).normal_())
        return super().forward(x * (1 + self.noise))


trained(
    *("recompute-attribute-that-changes-late", _stack(Walking), pairs, 6, {"recompute": True}),
    below3=RECOMPUTE,
    at3=RECOMPUTE,
)


class Recurrent(nn.Module):
    """Its kernels save a workspace with bytes that nothing has written."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        return x + self.cells(x[:, None])[0][:, 0]


_recomputed("lstm", Recurrent)


class Seeded(nn.Module):
    """A saved scalar that nothing has written, as the seed of a fused attention that drops nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + _Unwritten.apply(self.linear(x))


class _Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.tensor(time.perf_counter_ns()))
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        assert ctx.saved_tensors
        return grad * 2


_recomputed("unwritten-seed", Seeded)


# -- a model that catches what is refused ------------------------------------------------------------------------------


class Stubborn(Block):
    """Tries again, whatever fails."""

    def forward(self, x):
        for _ in range(3):
            try:
                return self.attempt(x)
            except Exception:
                continue
        return x

    def attempt(self, x):
        return super().forward(x)


class Taking(Stubborn):
    def __init__(self):
        super().__init__()
        self.scales = iter([1.0 + number / 10 for number in range(1000)])

    def attempt(self, x):
        return super().attempt(x * next(self.scales))


class Failing(Stubborn):
    """Each other call fails once, by itself."""

    calls = 0

    def attempt(self, x):
        self.calls += 1
        if self.calls % 3 == 1:
            raise ValueError("try again")
        return super().attempt(x)


class CatchingModel(Regressor):
    def body(self, x):
        for _ in range(2):
            try:
                return super().body(x)
            except RuntimeError:
                continue
        return x * self.blocks[0].norm.weight


class Other(Block):
    """Another operation in backward than in forward, and a forward that does not mind."""

    def forward(self, x):
        again = torch._C._current_graph_task_id() != -1
        try:
            up = torch.mm(self.norm(x), self.up.weight.t()) + self.up.bias if again else self.up(self.norm(x))
        except Exception:
            up = self.up(self.norm(x))
        return x + self.down(F.silu(up))


_recomputed("caught-failure", Failing)
_recomputed("caught-failure-selective", Failing, "selective")
_recomputed("caught-refusal-of-an-operation", Other, "selective", below3=RECOMPUTE, at3=RECOMPUTE)


@case("recompute-caught-refusal", below3=RECOMPUTE, at3=RECOMPUTE)
def caught(run):
    """The block takes from an iterator, and the model goes on without its blocks."""

    def make():
        model = CatchingModel(0)
        model.blocks = nn.ModuleList(Taking() for _ in range(2))
        return model

    run.train(run.shard(make, recompute=True), 2, pairs)


class WithoutHooks(Block):
    def forward(self, x):
        with disable_saved_tensors_hooks("no hooks in here"):
            return super().forward(x)


HOOKS = refused("blocks.0", "disable_saved_tensors_hooks", "recompute=")
_recomputed("hooks-disabled", WithoutHooks, below3=HOOKS, at3=HOOKS)
_recomputed("hooks-disabled-selective", WithoutHooks, "selective", below3=HOOKS, at3=HOOKS)
trained(
    *("hooks-disabled-inside-a-block", _stack(WithoutHooks), pairs),
    at3=refused("blocks.0", "disable_saved_tensors_hooks", "stage=2"),
)


@case("recompute-hooks-disabled-around", at3=refused("disable_saved_tensors_hooks", "stage=2"))
def disabled_around(run):
    """Nothing can be recomputed then: the blocks keep their activations."""
    trainer = run.shard(_stack(Block), recompute=True)
    with disable_saved_tensors_hooks("no hooks in here"):
        run.train(trainer, 2, pairs)
