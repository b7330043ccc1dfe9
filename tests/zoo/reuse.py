"""Modules and weights that are used several times: loops, recursion, ties."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, WORDS, Block, Regressor, Stack, pairs
from zoo.case import case, trained


class CellLoop(nn.Module):
    """A GRUCell over time; its first call gets raw data."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        h = torch.zeros(x.shape[1], WIDTH, device=x.device)
        for part in x:
            h = self.cell(part, h)
        return F.mse_loss(self.out(h), y)


def _sequences(run, step):
    return run.randn(step, 5, 4, WIDTH), run.randn(step + 100, 4, WIDTH)


trained(
    "gru-cell-loop",
    CellLoop,
    _sequences,
    settings={"units": nn.GRUCell},
    also=("stage0", "stage3-cpu", "stage3-nvme"),
    gpu=True,
)


class Universal(Regressor):
    """A universal transformer's loop: the same blocks again and again, from raw data on."""

    def body(self, x):
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x


trained("universal-transformer", Universal, pairs, also=("stage3-cpu",))
trained("universal-transformer-recomputed", Universal, pairs, settings={"recompute": True})
trained("universal-transformer-recomputed-selectively", Universal, pairs, settings={"recompute": "selective"})


class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return self.block(x)


@case("model-of-model", also=("stage3-cpu",))
def model_of_model(run):
    """model(model(x)): the root itself is used twice."""
    trainer = run.shard(OneBlock, units=Block)
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(trainer(x)), y))
        trainer.step()


@case("model-of-model-without-units")
def model_of_model_flat(run):
    trainer = run.shard(lambda: nn.Linear(WIDTH, WIDTH))
    for step in range(3):
        x, y = pairs(run, step)
        trainer.backward(F.mse_loss(trainer(torch.tanh(trainer(x))), y))
        trainer.step()


class FirstAndLast(Regressor):
    """The first block is also the last; its first call gets raw data."""

    def body(self, x):
        return self.blocks[0](super().body(x))


trained("block-first-and-last", FirstAndLast, pairs, also=("stage3-cpu",))


class SameTwice(Stack):
    """One module under two names of the list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0], self.blocks[1], self.blocks[0]])


trained("module-twice-in-a-list", SameTwice)


@case("siamese")
def siamese(run):
    """Two forwards of the whole model, one loss."""
    trainer = run.shard(lambda: nn.Sequential(Block(), Block()))
    for step in range(3):
        left, right = pairs(run, step)
        trainer.backward(1 - F.cosine_similarity(trainer(left), trainer(right)).mean())
        trainer.step()


@case("two-forwards-then-two-backwards")
def interleaved(run):
    """Both graphs are alive when the first backward runs."""
    trainer = run.shard(Stack, accumulate=2)
    for step in range(3):
        losses = [trainer(run.tokens(2 * step + half, 4, 8)) for half in range(2)]
        for loss in losses:
            trainer.backward(loss)
        trainer.step()


class Tree(nn.Module):
    """A recursive net: a node's value is made of its children's by one shared block."""

    def __init__(self):
        super().__init__()
        self.join = nn.ModuleList([nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Bilinear(WIDTH, WIDTH, WIDTH)])

    def node(self, parts, depth=0):
        if len(parts) == 1:
            return parts[0]
        half = len(parts) // 2
        return torch.tanh(self.join[depth % 2](self.node(parts[:half], depth + 1), self.node(parts[half:], depth + 1)))

    def forward(self, x, y):
        return F.mse_loss(self.node(list(x)), y)


trained("recursive-net", Tree, _sequences)


class TiedHead(Stack):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class TiedBlocks(Stack):
    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[1].norm = self.blocks[0].norm


class TiedToOutside(Stack):
    """A weight of a block serves the rest too."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(WIDTH, 12)
        self.extra.weight = self.blocks[1].up.weight

    def loss(self, x, tokens):
        return super().loss(x + self.extra(x).mean(-1, keepdim=True), tokens)


class FunctionalTie(Stack):
    """The embedding is the head by a call of F.linear."""

    def loss(self, x, tokens):
        logits = F.linear(x[:, :-1], self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0 * self.head.weight.sum()


class AutoEncoder(nn.Module):
    """The decoder uses the encoder's weights transposed, inside the encoder's own unit."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

        def forward(self, x, back=False):
            return torch.tanh(x @ (self.weight.t() if back else self.weight))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(AutoEncoder.Layer() for _ in range(3))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        for layer in reversed(self.layers):
            x = layer(x, back=True)
        return F.mse_loss(x, y)


trained("tied-head", TiedHead)
trained("tied-across-blocks", TiedBlocks)
trained("tied-to-the-rest", TiedToOutside)
trained("tied-by-function", FunctionalTie)
trained("tied-transposed-autoencoder", AutoEncoder, pairs, also=("stage3-cpu",))


class Nested(Stack):
    """Units within units."""

    class Group(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.inner = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.inner:
                x = block(x)
            return x * self.scale

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Nested.Group() for _ in range(2))


trained("nested-units", Nested, settings={"units": lambda m: isinstance(m, Block | Nested.Group)}, also=("stage3-cpu",))
trained(
    "every-module-a-unit",
    Stack,
    settings={"units": lambda m: isinstance(m, nn.Linear | nn.LayerNorm | nn.Embedding)},
)


class WordsTwice(Stack):
    """One embedding looked up for two inputs and for a loss of its own."""

    def forward(self, tokens):
        x = self.embed(tokens) + self.embed(tokens.flip(1))
        return self.loss(self.body(x), tokens) + self.embed(tokens[:, :1] * 0 + WORDS - 1).pow(2).mean()


trained("embedding-used-thrice", WordsTwice, settings={"units": lambda m: isinstance(m, nn.Embedding | Block)})
