"""The model that a program describes, and how its forward runs; the same code on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuzz.parts import Boom, FailingBackward, NestedPart, Parcel, Part, make_part
from fuzz.program import ROWS, TOKENS, WIDTH, Alias, Call, Program, second_program


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
        self.bias.quick = True  # type: ignore[attr-defined]  # for rules that treat marked parameters differently
        self.aliases: list[torch.Tensor | None] = []
        for alias in program.aliases:
            made = None if alias.way == "first_forward" else self._alias(alias)
            self.aliases.append(made if alias.listed else None)
            if not alias.listed:
                setattr(self, f"alias_{len(self.aliases) - 1}", made)

    def _alias(self, alias: Alias) -> torch.Tensor:
        p = next(self.blocks[alias.block % len(self.blocks)].parameters())
        match alias.way:
            case "detach":
                return p.detach()
            case "data":
                return p.data
            case "chunk":
                return p.view(-1).chunk(2)[0]
            case "transposed":
                return p.t() if p.dim() == 2 else p[None]
        return p.view(-1)

    def alias(self, index: int) -> torch.Tensor:
        """Return an alias, made now if it is one of the first forward."""
        alias = self.program.aliases[index]
        made = self.aliases[index] if alias.listed else getattr(self, f"alias_{index}")
        if made is None:
            made = self._alias(alias)
            if alias.listed:
                self.aliases[index] = made
            else:
                setattr(self, f"alias_{index}", made)
        return made

    def forward(self, batch: dict[str, Any]) -> Any:
        return self.graph(batch)

    def graph(self, batch: dict[str, Any]) -> Any:
        value, terms, middle = run_calls(self, self.program, batch)
        out = self.head(value.to(self.head.weight.dtype) + self.bias)
        for index, alias in enumerate(self.program.aliases):
            if alias.use == "forward":
                out = out + 0.2 * self.alias(index).mean()
            elif alias.way == "first_forward":
                self.alias(index)
        if self.program.fills:
            batch["more"]["sink"].append(out * 0.5)
        result = finish(self.program, out, terms, middle)
        if self.program.returns == "kept":
            if not hasattr(self, "result"):
                self.result: dict[str, Any] = {"calls": 0}
            self.result.update(result, calls=self.result["calls"] + 1)
            return self.result
        return result


def _tie(left: nn.Module, right: nn.Module) -> None:
    """Make the first parameter of `right` that of `left`, where the shapes allow."""
    if left is right:
        return
    source = next(((m, n, p) for m in left.modules() for n, p in m.named_parameters(recurse=False)), None)
    target = next(((m, n, p) for m in right.modules() for n, p in m.named_parameters(recurse=False)), None)
    if source and target and source[2].shape == target[2].shape and source[2].dtype == target[2].dtype:
        setattr(target[0], target[1], source[2])


def finish(program: Program, out: torch.Tensor, terms: list[torch.Tensor], middle: torch.Tensor) -> Any:
    if program.returns != "object":
        return {"out": out, "terms": terms, "middle": middle}
    return Parcel(x=out, h=terms, y=middle)


def unpack(result: Any) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    if isinstance(result, dict):
        return result["out"], result["terms"], result["middle"]
    return result.x, result.h, result.y


def losses(result: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a forward, and another one of the same graph."""
    out, terms, middle = unpack(result)
    loss = (out.float() - batch["target"]).square().mean()
    for term in terms:
        loss = loss + 0.3 * term.float()
    for put in batch["more"]["sink"]:
        loss = loss + 0.2 * put.float().square().mean()
    return loss, out.float().abs().mean() + middle.float().mean()


def forward(model: Model, program: Program, batch: dict[str, Any], call: Any = None) -> Any:
    """Run one forward the way the program enters the model; `call` runs the root."""
    if program.entry == "outside":
        value, terms, middle = run_calls(model, program, batch)
        return finish(program, value, terms, middle)
    if program.entry == "method":
        return model.graph(batch)
    return (call or model)(batch)


def forward_both(models: Sequence[Model], program: Program, batch: dict[str, Any], calls: Sequence[Any]) -> Any:
    """Run one forward of the program's models, linked as it says; with one model, its own."""
    result = forward(models[0], program, batch, calls[0])
    if program.second is None:
        return result
    out, terms, middle = unpack(result)
    link = program.second.link
    if link == "alternate" and batch["step"] % 2:  # trains the second model alone
        out, terms, middle = out.detach(), [term.detach() for term in terms], middle.detach()
        batch["more"]["sink"] = [put.detach() for put in batch["more"]["sink"]]
    inner = batch | {"x": batch["x"] if link == "towers" else out, "fails": "", "more": {"sink": []}}
    other, more, _ = unpack(forward(models[1], second_program(program), inner, calls[1]))
    return {"out": out * other if link == "towers" else other, "terms": [*terms, *more], "middle": middle}


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
            result = FailingBackward.apply(result)
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
        elif call.style == "kept":
            got = part(x, h, tokens, keeps=True)
            y, more = got["y"], got["more"]
            if got is not part.kept:
                y = y * 2
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


def make_models(program: Program) -> list[Model]:
    """Return the program's model, or both of them; the same values in every process."""
    made = []
    for one in (program, *([second_program(program)] if program.second else [])):
        torch.manual_seed(one.seed)
        made.append(Model(one))
    if program.second and program.second.link == "frozen":
        made[1].requires_grad_(False)
    return made


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
        "more": {"sink": []},
    }
