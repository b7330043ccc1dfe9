"""Known defects, put into the sharded side on purpose: the fuzzer must find each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fuzz.model import Model
from fuzz.program import Program


class Defect:
    """A change to how one rank's model trains."""

    def __init__(self, model: Model, program: Program, rank: int) -> None:
        self.model, self.program, self.rank = model, program, rank
        self.install()

    def install(self) -> None:
        pass

    def before_forward(self) -> None:
        pass

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


DEFECTS: dict[str, type[Defect]] = {
    "lost_gradient": LostGradient,
    "early_reduction": EarlyReduction,
    "unused_moves": UnusedMoves,
}
