"""The backward passes of a step: how one begins, ends, and is cleaned up after a failure.

Several engines may take part in one pass: if the loss of one engine depends on another, the other one joins.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from zerocli.engine.comm import Disagreed
from zerocli.engine.guards.parameters import Gradients
from zerocli.errors import Refused, RefusedValue, raise_caught
from zerocli.ranks.loss import Severed

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine

_UNDER_WAY: list[Backward] = []
"""Participants of the current backward pass; `run` was called on the first."""


class Backward:
    """Runs the backward passes of one engine and counts them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.gradients = Gradients()
        """Gradient status, shared with the engine's parameters."""
        self.count = 0
        """Number of passes since the last step."""
        self._told = False
        """Whether the other ranks know of this rank's last error."""

    def run(self, loss: torch.Tensor, retain_graph: bool, create_graph: bool) -> None:
        """Accumulate the gradients of a loss in this engine and in all engines that the loss depends on."""
        if _UNDER_WAY:
            raise Refused("backward was called inside another backward")
        made = Refused.latest
        try:
            self._check(loss, create_graph)  # before the ranks meet: one that has met launches collectives
            self._engine.agreement.announce_pass(self.count)
            self._begin()
            _UNDER_WAY.append(self)
            if loss.requires_grad:
                loss.register_hook(lambda grad: self._engine.reducer.outermost())
            seed = self._seed()
            if seed is None:
                loss.backward(retain_graph=retain_graph)
            else:
                with self._engine.hooks.ends.unscaled(loss, seed):
                    (loss * seed).backward(retain_graph=retain_graph)
            raise_caught(made)
            self._engine.reducer.launch_rest()
            for each in self._participants():
                each._end(retain_graph)
        except BaseException as error:
            self._told = True
            refusal = self._engine.hooks.explained(error)
            try:
                self._tell(refusal or error)
            finally:
                for each in _UNDER_WAY:
                    each._abandon()
            if refusal is not None:
                raise refusal from error
            raise
        finally:
            _UNDER_WAY.clear()

    def _check(self, loss: torch.Tensor, create_graph: bool) -> None:
        if loss.numel() != 1:
            raise RefusedValue(f"backward needs a loss of one element, not of shape {tuple(loss.shape)}")
        if not loss.requires_grad:
            raise Refused(
                "this loss has no gradient: it was computed under no_grad or inference_mode, was detached, or depends "
                "on no trainable parameter"
            )
        if create_graph:
            raise Refused(
                "gradients of gradients are taken with torch.autograd.grad(..., create_graph=True) in the loss; "
                "engine.backward(loss) then trains with them"
            )

    def _participants(self) -> list[Backward]:
        """Return the engines that take part in this pass on any rank, in the same order on all ranks. Collective.

        The loss of one rank may depend on an engine that another rank's does not: that rank then adds no gradient.
        """
        agreement = self._engine.agreement
        if agreement.channel is None:
            return list(_UNDER_WAY)
        slots = sum(1 << each._engine.member.slot for each in _UNDER_WAY)
        anywhere = agreement.end_pass(slots)
        by_slot = {each._engine.member.slot: each for each in _UNDER_WAY}
        for slot in range(agreement.channel.num_slots):
            if anywhere >> slot & 1 and slot not in by_slot:
                if (other := agreement.channel.agreement(slot)) is None:
                    raise Refused("another rank's loss depends on a model whose engine is closed on this rank")
                other.passes._begin(joining=True)
                _UNDER_WAY.append(other.passes)
                by_slot[slot] = other.passes
        return [by_slot[slot] for slot in sorted(by_slot)]

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of this rank's error: they raise Disagreed at the end of their pass and name it.

        If they have not called backward at all, raise Disagreed here.
        """
        known = isinstance(error, Severed | Disagreed) or not isinstance(error, Exception)
        if not known and self._engine.agreement.channel is not None:
            self._engine.agreement.channel.finish_meeting()
            with contextlib.suppress(Exception):  # the original error is the one to raise
                self._engine.reducer.launch_rest()
                self._engine.agreement.fail_pass(error)

    @property
    def can_give_up(self) -> bool:
        """Whether all ranks can leave a forward or backward that failed on one of them, with all states unchanged."""
        engine = self._engine
        if engine.updater.interrupted:
            return False
        if engine.collectives.world * engine.tensor_parallel.world == 1:
            return True
        alike = engine.agreement.active or not engine.gatherer.moves  # else another rank may wait in a gather
        alike = alike and not engine.gatherer.interrupted
        return engine.agreement.channel is not None and alike and engine.tensor_parallel.world == 1

    def give_up(self, error: BaseException) -> None:
        """Leave a step whose forward or backward failed with this error, on all ranks; its gradients are lost.

        The others leave their backward with `Disagreed`, and call this with it. Then the step can be run again.
        """
        told, self._told = self._told, False
        if not told:
            self._tell(error)
        self._abandon()
        self._engine.zero_grad()
        self._engine.hooks.end_step()
        self._engine.gatherer.restart()

    def join(self, name: str) -> None:
        """Join another engine's pass whose loss depends on this engine's parameter `name`; refuse if there is none."""
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
        """Reset the count: the step is done, or its gradients were dropped."""
        self.count = 0
        self.gradients.in_backward = self.gradients.pending = False

    @property
    def divisor(self) -> torch.Tensor | float:
        """The divisor that turns this step's accumulated gradients into averages."""
        scale = self._engine.loss_scale
        if scale.active:
            return scale.value * self.count
        return float(self._engine.collectives.world * self.count)

    def _seed(self) -> torch.Tensor | None:
        """Return the factor that the loss is multiplied by before backward; None for no scaling.

        Gradients are summed over ranks and micro-steps, and divided by `divisor` in the update. Only fp16, whose
        maximum is 65504, divides by the world size before the sum.
        """
        scale = self._engine.loss_scale
        return scale.value / self._engine.collectives.world if scale.active else None

    def _begin(self, joining: bool = False) -> None:
        engine, accumulate = self._engine, self._engine.settings.accumulate
        if self.count >= accumulate:
            raise Refused(
                f"backward was called {self.count + 1} times before step(); shard(..., accumulate={self.count + 1}) "
                "adds the gradients of several backward passes"
            )
        with engine.waits.waiting("optimizer"):
            engine.updater.issue_updates()  # of units that forward did not use, before their gradients are overwritten
        if self.count == 0 and not joining:
            engine.verified.issue()
        engine.reducer.begin(first=self.count == 0, last=self.count == accumulate - 1, joining=joining)
        self.gradients.in_backward = True

    def _end(self, retained: bool) -> None:
        engine = self._engine
        engine.reducer.finish()
        engine.hooks.end_backward(retained)
        engine.gatherer.release_all()
        self.count += 1
        self.gradients.in_backward, self.gradients.pending = False, True

    def _abandon(self) -> None:
        """Clean up after an exception; the step's gradients are lost."""
        engine = self._engine
        engine.reducer.abandon()
        engine.hooks.abandon()
        engine.gatherer.release_all(quietly=True)
        engine.activations.abandon()
        self.forget()
