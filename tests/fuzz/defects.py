"""Known defects, put into the sharded side on purpose: the fuzzer must find each of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fuzz.model import Model
from fuzz.program import Program
from fuzz.rules import ELEMENTWISE


class Defect:
    """A change to how one rank's model trains."""

    def __init__(self, model: Model, program: Program, rank: int) -> None:
        self.model, self.program, self.rank = model, program, rank
        self.install()

    def install(self) -> None:
        pass

    @classmethod
    def changed(cls, program: Program) -> Program:
        """Return the program that the ranks run instead."""
        return program

    def before_forward(self) -> None:
        pass

    def result(self, result: Any) -> Any:
        return result

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class LostGradient(Defect):
    """Rank 1's gradient of the first block's first parameter never arrives."""

    def install(self) -> None:
        parameter = next(self.model.blocks[0].parameters())
        if self.rank == 1 and parameter.requires_grad:
            parameter.register_hook(torch.zeros_like)


class EarlyReduction(Defect):
    """Of a block that is called several times in a pass only the first call's gradient arrives."""

    def install(self) -> None:
        self.calls: dict[int, int] = {}
        if not self.program.moves:  # elsewhere the parameters are not there yet when the call begins
            for part in self.model.blocks:
                self._wrap(part)

    def _wrap(self, part: nn.Module) -> None:
        inner, depth = part.forward, [0]

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.calls[id(part)] = self.calls.get(id(part), 0) + 1
            if self.calls[id(part)] == 1 or depth[0]:
                return inner(*args, **kwargs)
            depth[0] += 1
            try:
                held = {name: p.detach() for name, p in part.named_parameters()}
                return functional_call(part, held, args, kwargs)
            finally:
                depth[0] -= 1

        part.forward = forward  # type: ignore[method-assign]

    def before_forward(self) -> None:
        self.calls.clear()


class UnusedMoves(Defect):
    """A parameter without a gradient is updated as if its gradient were zero."""

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        if self.program.moves:
            return loss
        return loss + sum(0.0 * p.sum() for p in self.model.parameters() if p.requires_grad)


class FirstGroupsOptions(Defect):
    """The second group of an optimizer gets the first one's options."""

    @classmethod
    def changed(cls, program: Program) -> Program:
        return replace(program, rule=replace(program.rule, second=()))


class LostTerm(Defect):
    """Of an optimizer of the user's own all terms but the elementwise ones are left out."""

    @classmethod
    def changed(cls, program: Program) -> Program:
        terms = tuple(term for term in program.rule.terms if term in ELEMENTWISE)
        return replace(program, rule=replace(program.rule, terms=terms))


class OldMemory(Defect):
    """Aliases of parameters stay on the memory that the parameters had before `shard`."""

    def install(self) -> None:
        for index, alias in enumerate(self.program.aliases):
            if alias.way != "first_forward":
                copied = self.model.alias(index).detach().clone()
                if alias.listed:
                    self.model.aliases[index] = copied
                else:
                    setattr(self.model, f"alias_{index}", copied)


class UpdatedTwice(Defect):
    """A buffer of the first block is updated once more, as by a forward that is run again."""

    def before_forward(self) -> None:
        for name, buffer in self.model.blocks[0].named_buffers():
            if name == "count":
                buffer.add_(1)
            elif name == "mean":
                buffer.mul_(0.8)


class DrawnAgain(Defect):
    """Something draws random numbers between two forwards of the program."""

    def before_forward(self) -> None:
        random.random()
        torch.rand(1)


class CopiedOutput(Defect):
    """The caller gets a copy of the dict that the model returns."""

    def result(self, result: Any) -> Any:
        return dict(result) if isinstance(result, dict) else result


class FrozenSecond(Defect):
    """The second of two models is not trained."""

    @classmethod
    def changed(cls, program: Program) -> Program:
        if program.second is None or program.second.link not in ("chained", "towers"):
            return program
        blocks = tuple(replace(block, frozen=True) for block in program.second.blocks)
        return replace(program, second=replace(program.second, blocks=blocks))


class Unnoticed(Defect):
    """A rank that leaves something out is not noticed: it goes on as if it had done the same as the others."""

    @classmethod
    def changed(cls, program: Program) -> Program:
        return replace(program, steps=tuple(replace(step, uneven="") for step in program.steps))


DEFECTS: dict[str, type[Defect]] = {
    "lost_gradient": LostGradient,
    "early_reduction": EarlyReduction,
    "unused_moves": UnusedMoves,
    "first_groups_options": FirstGroupsOptions,
    "lost_term": LostTerm,
    "old_memory": OldMemory,
    "updated_twice": UpdatedTwice,
    "drawn_again": DrawnAgain,
    "copied_output": CopiedOutput,
    "frozen_second": FrozenSecond,
    "unnoticed": Unnoticed,
}
