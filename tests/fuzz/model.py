"""The model that a program describes, and how its forward runs; the same code on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuzz.program import ROWS, TOKENS, WIDTH, Block, Call, Program


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


class _Boom(torch.autograd.Function):
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

    def forward(self, x=None, h=None, tokens=None):
        style = "plain"
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
        if self.boom:
            self.boom = False
            raise Boom
        if style == "tuple":
            return y, more
        if style == "dict":
            return {"y": y, "more": [more]}
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
}


def make_part(block: Block) -> Part:
    part = PARTS[block.kind](block)
    if block.half:
        part.bfloat16()
    if block.frozen:
        part.requires_grad_(False)
    return part


class Model(nn.Module):
    """The blocks, and a head that every pass uses."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_part(block) for block in program.blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        if program.unused:
            self.unused = nn.Parameter(torch.ones(3, 2))
        for left, right in program.ties:
            _tie(self.blocks[left % len(self.blocks)], self.blocks[right % len(self.blocks)])
        if program.shared >= 0:
            self.again = self.blocks[program.shared % len(self.blocks)]
        self.program = program

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.graph(batch)

    def graph(self, batch: dict[str, Any]) -> Any:
        value, terms, middle = run_calls(self, self.program, batch)
        out = self.head(value.to(self.head.weight.dtype) + self.bias)
        return finish(self.program, out, terms, middle)


def _tie(left: nn.Module, right: nn.Module) -> None:
    """Make the first parameter of `right` that of `left`, where the shapes allow."""
    if left is right:
        return
    source = next(((m, n, p) for m in left.modules() for n, p in m.named_parameters(recurse=False)), None)
    target = next(((m, n, p) for m in right.modules() for n, p in m.named_parameters(recurse=False)), None)
    if source and target and source[2].shape == target[2].shape and source[2].dtype == target[2].dtype:
        setattr(target[0], target[1], source[2])


def finish(program: Program, out: torch.Tensor, terms: list[torch.Tensor], middle: torch.Tensor) -> Any:
    if program.returns == "dict":
        return {"out": out, "terms": terms, "middle": middle}
    return Parcel(x=out, h=terms, y=middle)


def losses(result: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a forward, and another one of the same graph."""
    out, terms, middle = (
        (result["out"], result["terms"], result["middle"])
        if isinstance(result, dict)
        else (result.x, result.h, result.y)
    )
    loss = (out.float() - batch["target"]).square().mean()
    for term in terms:
        loss = loss + 0.3 * term.float()
    return loss, out.float().abs().mean() + middle.float().mean()


def forward(model: Model, program: Program, batch: dict[str, Any], call: Any = None) -> Any:
    """Run one forward the way the program enters the model; `call` runs the root."""
    if program.entry == "outside":
        value, terms, middle = run_calls(model, program, batch)
        return finish(program, value, terms, middle)
    if program.entry == "method":
        return model.graph(batch)
    return (call or model)(batch)


def run_calls(
    model: Model, program: Program, batch: dict[str, Any]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Return the last value, the terms of the loss, and a value from the middle."""
    values, terms = [batch["x"]], []
    fails, at = batch["fails"], batch["fails_at"] % len(program.calls)
    for index, call in enumerate(program.calls):
        source = values[max(0, len(values) - 1 - call.arg)]
        also = values[max(0, len(values) - 1 - call.also)]
        if call.raw:
            source = also = batch["x"]
        part = _chosen(model, call, batch)
        if fails == "forward" and index == at:
            if part is None or call.when != "always":
                raise Boom
            part.boom = True
        result = source if part is None else _invoke(part, call, source, also, batch["tokens"])
        if fails == "backward" and index == at:
            result = _Boom.apply(result)
        if call.detach:
            result = result.detach()
        if call.aux:
            terms.append(result.square().mean())
        values.append(result)
    return values[-1], terms, values[len(values) // 2]


def _chosen(model: Model, call: Call, batch: dict[str, Any]) -> Part | None:
    holds = {
        "always": True,
        "rank0": batch["rank"] == 0,
        "rank1": batch["rank"] == 1,
        "data": batch["data"],
        "odd_step": batch["step"] % 2 == 1,
    }[call.when]
    index = call.block if holds else call.other
    if index < 0:
        return None
    part = model.blocks[index % len(model.blocks)]
    if call.inner and isinstance(part, NestedPart):
        part = part.inside[0]
    return part


def _invoke(part: Part, call: Call, x: torch.Tensor, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    def body(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        if call.style == "plain":
            return part(x, h, tokens)
        if call.style == "kwargs":
            return part(x=x, h=h, tokens=tokens)
        if call.style == "tuple":
            y, more = part((x, h, tokens))
        elif call.style == "dict":
            got = part({"x": x, "h": h, "tokens": tokens})
            y, more = got["y"], got["more"][0]
        else:
            got = part(Parcel(x=x, h=h, tokens=tokens))
            y, more = got.y, got.more
        return y + 0.3 * more

    if call.checkpoint:
        return checkpoint(body, x, h, use_reentrant=call.checkpoint == "reentrant")
    return body(x, h)


def make_model(program: Program) -> Model:
    torch.manual_seed(program.seed)
    return Model(program)


def make_batch(
    program: Program, step: int, number: int, rank: int, fails: str = "", fails_at: int = 0
) -> dict[str, Any]:
    """Return the batch of one rank's `number`th pass in a step."""
    generator = torch.Generator().manual_seed(((program.seed * 11 + step) * 11 + number) * 2 + rank)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return {
        "x": x,
        "target": torch.randn(ROWS, WIDTH, generator=generator),
        "tokens": torch.randint(0, TOKENS, (ROWS,), generator=generator),
        "data": bool(x[0, 0] > 0),
        "rank": rank,
        "step": step,
        "fails": fails,
        "fails_at": fails_at,
    }
