"""The blocks of a program's model: what each kind computes, and what it keeps between calls."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from fuzz.program import TOKENS, WIDTH, Block
from zerocli.config import LoraConfig
from zerocli.models.lora import adapt


class Boom(Exception):
    """What a program that fails on purpose raises."""


@dataclass
class Parcel:
    """A class that torch's pytree does not know, so what it carries cannot be found in it."""

    x: Any = None
    h: Any = None
    tokens: Any = None
    y: Any = None
    more: Any = None


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise Boom


class _Times(torch.autograd.Function):
    """x @ w, with a view of the weight kept as an attribute instead of by save_for_backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.transposed = w.t()
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad @ ctx.transposed, x.t() @ grad


class Part(nn.Module):
    """A block: unpacks its inputs, computes, and packs its outputs as they came."""

    boom = False
    caches = False
    """Whether the first call keeps a view of the first parameter, which later calls use."""

    def forward(self, x=None, h=None, tokens=None, keeps=False):
        style = "kept" if keeps else "plain"
        if isinstance(x, tuple):
            style, (x, h, tokens) = "tuple", x
        elif isinstance(x, dict):
            style, (x, h, tokens) = "dict", (x["x"], x["h"], x["tokens"])
        elif isinstance(x, Parcel):
            style, (x, h, tokens) = "object", (x.x, x.h, x.tokens)
        first = next(iter(self.parameters()), None)
        if first is not None:
            x, h = x.to(first.dtype), h.to(first.dtype)
        y, more = self.run(x, h, tokens)
        if self.caches and first is not None:
            if not hasattr(self, "cached"):
                self.cached = first.view(-1)
            y = y + 0.1 * self.cached.mean()
        if self.boom:
            self.boom = False
            raise Boom
        if style == "tuple":
            return y, more
        if style == "dict":
            return {"y": y, "more": [more]}
        if style == "kept":
            if not hasattr(self, "kept"):
                self.kept = {}
            self.kept.update(y=y, more=more)
            return self.kept
        return Parcel(y=y, more=more) if style == "object" else y

    def run(self, x, h, tokens):
        raise NotImplementedError


class LinearPart(Part):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def run(self, x, h, tokens):
        y = torch.tanh(self.lin(x))
        return y, y * x


class MlpPart(Part):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, block.hidden), nn.Linear(block.hidden, WIDTH, bias=False)

    def run(self, x, h, tokens):
        return x + self.down(torch.tanh(self.up(x))), h


class NormPart(Part):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=0.1)

    def run(self, x, h, tokens):
        return self.norm(x) * 0.5, x + h


class EmbeddingPart(Part):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)

    def run(self, x, h, tokens):
        y = self.embed(tokens) * 0.5
        return y + 0.3 * x, y.mean(-1, keepdim=True)


class GruPart(Part):
    """A cell called in a loop, at first with data."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def run(self, x, h, tokens):
        state = torch.zeros_like(x)
        for value in (x.detach(), h, x):
            state = self.cell(value, state)
        return state, state * 0.5


class ConvPart(Part):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)

    def run(self, x, h, tokens):
        y = self.conv(x.unsqueeze(1))
        return torch.tanh(y[:, 0]), y[:, 1]


class ScalePart(Part):
    """Bare parameters, one without dimensions; one of them leaves with the outputs."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.one, self.row = nn.Parameter(torch.ones(())), nn.Parameter(torch.full((WIDTH,), 0.5))

    def run(self, x, h, tokens):
        return x * self.one + h * self.row, self.row


class ComplexPart(Part):
    """A view of another dtype is what autograd saves."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(WIDTH // 2, 2) * 0.5)

    def run(self, x, h, tokens):
        signal = torch.view_as_complex(x.float().reshape(-1, WIDTH // 2, 2).contiguous())
        y = torch.view_as_real(signal * torch.view_as_complex(self.kernel.float()))
        y = y.reshape(-1, WIDTH).to(x.dtype)
        return torch.tanh(y), y


class CtxAttrPart(Part):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def run(self, x, h, tokens):
        y = torch.tanh(_Times.apply(x, self.weight))
        return y, y


class StatefulPart(Part):
    """Keeps the state that its block names: buffers, and attributes of Python; or draws random numbers."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.kinds = block.state
        self.lin = nn.Linear(WIDTH, WIDTH)
        if "spectral" in self.kinds:
            self.lin = spectral_norm(self.lin)
        if "batchnorm" in self.kinds:
            self.norm = nn.BatchNorm1d(WIDTH, eps=0.1)
        self.calls = 0
        if "counter" in self.kinds:
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
        if "ema" in self.kinds:
            self.register_buffer("mean", torch.zeros(WIDTH))
        if "expanded" in self.kinds:  # torch itself cannot load into it
            self.register_buffer("wide", torch.full((1,), 0.2).expand(WIDTH, 40), persistent=False)
        if "strided" in self.kinds:
            self.register_buffer("table", torch.randn(WIDTH, 3 * WIDTH)[:, ::3])

    def run(self, x, h, tokens):
        y = self.lin(x)
        if "batchnorm" in self.kinds and x.shape[0] > 1:
            y = self.norm(y)
        if "counter" in self.kinds:
            self.count += 1
            y = y * (1 + 0.1 * self.count)
        if "attribute" in self.kinds:
            self.calls += 1
            y = y * (1 - 0.05 * self.calls)
        if "ema" in self.kinds:
            with torch.no_grad():
                self.mean.mul_(0.8).add_(x.detach().mean(0), alpha=0.2)
            y = y - self.mean
        if "expanded" in self.kinds:
            y = y + self.wide[:, :WIDTH].mean(0)
        if "strided" in self.kinds:
            with torch.no_grad():
                self.table.mul_(0.9)
            y = y + self.table.sum(0) * 0.1
        if "dropout" in self.kinds:
            y = nn.functional.dropout(y, 0.5)
        if "random" in self.kinds:
            y = y * (1 + random.random())
        return torch.tanh(y), y * 0.3


class NestedPart(Part):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.inside = nn.ModuleList(make_part(child) for child in block.children)

    def run(self, x, h, tokens):
        y = x
        for part in self.inside:
            y = part(y, h, tokens)
        return x + y, y


PARTS: dict[str, type[Part]] = {
    "linear": LinearPart,
    "mlp": MlpPart,
    "norm": NormPart,
    "embedding": EmbeddingPart,
    "gru": GruPart,
    "conv": ConvPart,
    "scale": ScalePart,
    "complex": ComplexPart,
    "ctx_attr": CtxAttrPart,
    "nested": NestedPart,
    "stateful": StatefulPart,
}


def make_part(block: Block) -> Part:
    part = PARTS[block.kind](block)
    part.caches = block.caches
    if block.half:
        part.bfloat16()
    if block.adapted:
        adapt(part, LoraConfig(rank=2))
    if block.frozen:
        part.requires_grad_(False)
    return part
