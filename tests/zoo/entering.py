"""Entering a model elsewhere than at the root's forward: other methods, inner modules, generation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, WORDS, Block, Stack, pairs
from zoo.case import case, either


class Wrapped(nn.Module):
    """A model within a model, as language models with heads are."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.layers = nn.ModuleList(Block() for _ in range(3))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)

    def __init__(self):
        super().__init__()
        self.model, self.head = Wrapped.Inner(), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        return self.head(self.model(tokens))


def _next_token(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@case("enter-at-an-inner-model", also=("stage3-cpu",))
def inner_model(run):
    """`m.model(x)`: the root's forward never runs, and its head gets no gradient."""
    trainer = run.shard(Wrapped)
    for step in range(3):
        trainer.backward(trainer.model.model(run.tokens(step, 4, 8)).pow(2).mean())
        trainer.step()


@case("enter-at-an-inner-model-and-the-head", also=("stage3-cpu",))
def inner_and_head(run):
    """`m.head(m.model(x))`, as losses in chunks do it."""
    trainer = run.shard(Wrapped)
    for step in range(3):
        tokens = run.tokens(step, 4, 8)
        trainer.backward(_next_token(trainer.model.head(trainer.model.model(tokens)), tokens))
        trainer.step()


@case("enter-at-a-block", also=("stage3-cpu",))
def one_block(run):
    """A unit is called by itself, in training and without gradients, between whole passes."""
    trainer = run.shard(Stack)
    for step in range(3):
        x = run.randn(step, 2, WIDTH)
        with torch.no_grad():
            run.log("block", trainer.model.blocks[1](x))
        own = trainer.model.blocks[2](x).pow(2).mean()
        trainer.backward(trainer(run.tokens(step, 4, 8)) + own)
        trainer.step()


@case("enter-at-a-block-alone")
def block_alone(run):
    """Layer-wise training: a step's loss is of one block."""
    trainer = run.shard(Stack)
    for step in range(3):
        trainer.backward(trainer.model.blocks[step](run.randn(step, 2, WIDTH)).pow(2).mean())
        trainer.step()


class Coder(nn.Module):
    """Methods beside forward: encode and decode, with parameters of the rest in them."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(2))
        self.up = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def encode(self, x):
        for block in self.down:
            x = block(x)
        return self.middle(x) + self.shift

    def decode(self, x):
        for block in self.up:
            x = block(x - self.shift)
        return x

    def forward(self, x):
        return self.decode(self.encode(x))


def _coding(run, trainer) -> None:
    for step in range(3):
        x, y = pairs(run, step)
        code = trainer.model.encode(x)
        trainer.backward(F.mse_loss(trainer.model.decode(torch.tanh(code)), y))
        trainer.step()
        with torch.no_grad():
            run.log("code", trainer.model.encode(y))


@case("methods-registered-by-name", also=("stage3-cpu",), gpu=True)
def registered(run):
    trainer = run.shard(Coder)
    trainer.register_forward_method(trainer.model, "encode")
    trainer.register_forward_method(trainer.model, "decode")
    _coding(run, trainer)


@case("methods-not-registered", at3=either("register_forward_method"), also=("stage3-cpu",))
def not_registered(run):
    _coding(run, run.shard(Coder))


@case("generate-by-hand", also=("stage3-cpu",))
def generate_by_hand(run):
    """A decoding loop of the user's own, between steps; ranks stop together."""
    trainer = run.shard(Wrapped)
    for step in range(2):
        tokens = run.tokens(step, 4, 8)
        trainer.backward(_next_token(trainer(tokens), tokens))
        trainer.step()
        with torch.no_grad():
            for _ in range(4):
                tokens = torch.cat([tokens, trainer(tokens)[:, -1:].argmax(-1)], 1)
        run.log("tokens", tokens)


@case("functional-head", at3=either("head.weight", "gathered"))
def functional_head(run):
    """The head's weight is used outside of the model, as fused losses do."""
    trainer = run.shard(Wrapped)
    for step in range(3):
        tokens = run.tokens(step, 4, 8)
        hidden = trainer.model.model(tokens)
        head = trainer.model.head
        trainer.backward(_next_token(F.linear(hidden, head.weight, head.bias), tokens))
        trainer.step()
