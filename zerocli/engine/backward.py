"""The backward passes of a step: what begins one, what ends it, and what is left when one fails.

Several engines may take part in one: where the loss of one reaches another, that one joins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerocli.engine import agreement as agreements
from zerocli.engine.parameters import Gradients
from zerocli.errors import Refused

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine

_UNDER_WAY: list[Backward] = []
"""Those that take part in the backward pass under way; the first one's `run` was called."""


class Backward:
    """Runs the backward passes of one engine and counts them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.gradients = Gradients()
        """What the engine's parameters know of their gradients."""
        self.count = 0
        """Passes since the last step."""

    def run(self, loss: torch.Tensor, retain_graph: bool, create_graph: bool) -> None:
        """Accumulate the gradients of a loss, in this engine and in those that it reaches."""
        if loss.numel() != 1:
            raise ValueError(f"backward needs a loss of one element, not of shape {tuple(loss.shape)}")
        if _UNDER_WAY:
            raise Refused("backward was called inside another backward")
        if create_graph:
            raise Refused(
                "gradients of gradients are taken with torch.autograd.grad(..., create_graph=True) in the loss; "
                "engine.backward(loss) then trains with them"
            )
        self._begin()
        _UNDER_WAY.append(self)
        try:
            if loss.requires_grad:
                loss.register_hook(lambda grad: self._engine.reducer.outermost())
            seed = self._seed()
            if seed is None:
                loss.backward(retain_graph=retain_graph)
            else:
                with self._engine.hooks.unscaled_outside(loss, seed):
                    (loss * seed).backward(retain_graph=retain_graph)
            for each in _UNDER_WAY:
                each._end()
        except BaseException:
            for each in _UNDER_WAY:
                each._abandon()
            raise
        finally:
            _UNDER_WAY.clear()

    def join(self, name: str) -> None:
        """Take part in another engine's pass whose loss has reached this one's parameter `name`; refuse any other."""
        if not _UNDER_WAY:
            raise Refused(
                f"a gradient of {name} arrived outside engine.backward(loss): call it instead of loss.backward()"
            )
        if self._engine.loss_scale.active or _UNDER_WAY[0]._engine.loss_scale.active:
            raise Refused("two engines under one loss have one loss scale each under fp16: use bf16 or fp32")
        self._begin(joining=True)
        self._engine.reducer.outermost()
        _UNDER_WAY.append(self)

    def forget(self) -> None:
        """Count from 0 again: the step has been taken, or its gradients are given up."""
        self.count = 0
        self.gradients.in_backward = self.gradients.pending = False

    @property
    def divisor(self) -> torch.Tensor | float:
        """What the gradients of this step, as they are kept, are divided by to be averages."""
        scale = self._engine.loss_scale
        if scale.active:
            return scale.value * self.count
        return float(self._engine.collectives.world * self.count)

    def _seed(self) -> torch.Tensor | None:
        """Return what the loss is multiplied by before its backward; None: it is left as it is.

        Gradients are summed over ranks and micro-steps, and divided by `divisor` in the update. Only fp16, whose
        numbers end at 65504, divides by the ranks before the sum.
        """
        scale = self._engine.loss_scale
        return scale.value / self._engine.collectives.world if scale.active else None

    def _begin(self, joining: bool = False) -> None:
        engine, accumulate = self._engine, self._engine.settings.accumulate
        if self.count >= accumulate:
            raise RuntimeError(
                f"backward was called {self.count + 1} times before step(); shard(..., accumulate={self.count + 1}) "
                "adds the gradients of several backward passes"
            )
        with engine.waits.waiting("optimizer"):
            engine.updater.issue_updates()  # units that forward did not use: their gradients are about to be replaced
        if self.count == 0 and not joining:
            engine.verified.issue()
        engine.reducer.begin(first=self.count == 0, last=self.count == accumulate - 1, joining=joining)
        self.gradients.in_backward = True

    def _end(self) -> None:
        engine = self._engine
        engine.agreement.agree(agreements.BACKWARD)
        engine.reducer.finish()
        engine.hooks.end_backward()
        engine.gatherer.release_all()
        self.count += 1
        self.gradients.in_backward, self.gradients.pending = False, True

    def _abandon(self) -> None:
        """After an exception: the step's gradients are lost, and nothing of them is left."""
        engine = self._engine
        engine.reducer.abandon()
        engine.hooks.abandon()
        engine.gatherer.release_all(quietly=True)
        engine.activations.abandon()
        self.forget()
