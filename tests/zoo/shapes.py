"""What goes in and out of units, and parameters of every shape."""

from __future__ import annotations

import dataclasses
from collections import namedtuple

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, Block, Regressor, Stack, pairs
from zoo.case import case, trained

trained("plain", Stack, also=("stage0", "stage1", "stage2-cpu", "stage3-cpu", "stage3-nvme"), gpu=True)
trained("recomputed", Stack, settings={"recompute": True}, also=("stage3-cpu",))
trained("recomputed-selectively", Stack, settings={"recompute": "selective"}, also=("stage3-cpu",))
trained("no-units", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), _Mean()), lambda run, s: (run.randn(s, 4, WIDTH),))


class _Mean(nn.Module):
    def forward(self, x):
        return x.pow(2).mean()


class Tuples(Block):
    def forward(self, pair):
        x, rest = pair
        return super().forward(x), {"sum": rest["sum"] + x.mean(), "none": None, "list": [x, 3]}


class Trees(Stack):
    """Tuples, dicts, lists, None and numbers in and out of units."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Tuples() for _ in range(3))

    def body(self, x):
        pair = (x, {"sum": x.mean()})
        for block in self.blocks:
            pair = block(pair)
        return pair[0] + pair[1]["sum"] + pair[1]["list"][0]


trained("tuples-and-dicts", Trees, also=("stage3-cpu",))


class Keywords(Block):
    def forward(self, *, hidden, scale=1.0, mask=None):
        return {"hidden": super().forward(hidden) * scale, "mask": mask}


class KeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({name: Keywords() for name in ("one", "two")})

    def forward(self, *, x, y):
        out = self.blocks["two"](**self.blocks["one"](hidden=x))
        return {"loss": F.mse_loss(out["hidden"], y), "nothing": None}


trained("keywords-only", KeywordsOnly, lambda run, step: dict(zip("xy", pairs(run, step), strict=True)))

Pair = namedtuple("Pair", "hidden gate")


@dataclasses.dataclass
class Carried:
    hidden: torch.Tensor
    count: int = 0


class NamedBlock(Block):
    def forward(self, pair):
        hidden = super().forward(pair.hidden)
        return Pair(hidden, torch.sigmoid(hidden))


class DataBlock(Block):
    def forward(self, carried):
        return Carried(super().forward(carried.hidden), carried.count + 1)


class NamedTuples(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NamedBlock() for _ in range(3))

    def body(self, x):
        pair = super().body(Pair(x, x))
        return pair.hidden * pair.gate


class DataClasses(Stack):
    """Dataclasses in and out of units: autograd's tensors hide in them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(DataBlock() for _ in range(3))

    def body(self, x):
        return super().body(Carried(x)).hidden


trained("named-tuples", NamedTuples)
trained("dataclasses-in-and-out", DataClasses, also=("stage3-cpu",), gpu=True)


class NoneBlock(Block):
    """Writes its output into a list of the caller's and returns nothing."""

    def forward(self, x, into):
        into.append(super().forward(x))


class NoneOutputs(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NoneBlock() for _ in range(3))

    def body(self, x):
        states = [x]
        for block in self.blocks:
            block(states[-1], states)
        return sum(states)


trained("units-that-return-none", NoneOutputs, also=("stage3-cpu",))


class Iterators(Stack):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Listing() for _ in range(3))

    def body(self, x):
        for block in self.blocks:
            x = torch.stack(tuple(iter(block(x))))
        return x


class Listing(Block):
    def forward(self, x):
        return iter(super().forward(x).unbind(0))


trained("iterators-out-of-units", Iterators)


class Odd(nn.Module):
    """Scalars, no elements, one element, three dimensions, and one parameter far larger than the others."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(1.0))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.one = nn.Parameter(torch.zeros(1))
            self.cube = nn.Parameter(torch.randn(3, WIDTH, 5) * 0.1)

        def forward(self, x):
            mixed = torch.einsum("bi,aik->bi", x, self.cube)
            return x * self.gain + self.one + 0.1 * mixed + self.nothing.sum()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Odd.Layer() for _ in range(3))
        self.large = nn.Parameter(torch.randn(WIDTH, 701) * 0.05)
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x + self.scalar * torch.tanh(x @ self.large).mean(-1, keepdim=True), y)


trained("odd-shapes", Odd, pairs, also=("stage3-cpu", "stage3-nvme"), gpu=True)


class Lists(nn.Module):
    """ParameterList and ParameterDict, in the rest and in a unit."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.ParameterList(torch.randn(WIDTH) * 0.3 for _ in range(3))
            self.named = nn.ParameterDict({"w": torch.randn(WIDTH, WIDTH) * 0.3})

        def forward(self, x):
            return x + sum(row * x for row in self.rows) @ self.named["w"]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Lists.Layer() for _ in range(2))
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(2))

    def forward(self, x, y):
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = layer(x) * gain
        return F.mse_loss(x, y)


trained("parameter-lists", Lists, pairs)


class NotContiguous(nn.Module):
    """Parameters that are transposed, expanded from one value, or in channels-last order."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter((torch.randn(WIDTH, 5) * 0.3).t())
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        y = self.conv(x.view(-1, 2, 2, 2)).reshape(x.shape)
        return x + y + (x @ self.turned.t()).mean(-1, keepdim=True)


class Strided(Regressor):
    def __init__(self):
        super().__init__(0)
        self.blocks = nn.ModuleList(NotContiguous() for _ in range(3))


trained("strided-parameters", Strided, pairs)


class SkipConnections(nn.Module):
    """A U-Net: outputs of early units are inputs of late ones."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, y):
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return F.mse_loss(x, y)


trained("skip-connections", SkipConnections, pairs)


class Parallel(Regressor):
    """Branches that take the same raw input and meet in the loss."""

    def body(self, x):
        return sum(block(x) for block in self.blocks)


trained("parallel-branches", Parallel, pairs, also=("stage3-cpu",))


class Branches(Regressor):
    """Control flow by the data's values, alike on all ranks."""

    def body(self, x):
        for i, block in enumerate(self.blocks):
            if self.turn % (i + 1) == 0:
                x = block(x)
        return x


@case("branches-by-step", also=("stage3-cpu",))
def branches(run):
    trainer = run.shard(Branches)
    for step in range(4):
        trainer.model.turn = step
        trainer.backward(trainer(*pairs(run, step)))
        trainer.step()


@case("model-that-returns-logits")
def logits(run):
    """The loss is computed outside of the model, and divided by the user."""

    class Logits(Stack):
        def forward(self, tokens):
            return self.head(self.body(self.embed(tokens)))

    trainer = run.shard(Logits)
    for step in range(3):
        tokens = run.tokens(step, 4, 8)
        out = trainer(tokens)
        trainer.backward(F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / 2)
        trainer.step()
