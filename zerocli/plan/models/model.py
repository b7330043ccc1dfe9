"""What a plan asks of a model, whoever answers: the formulas of a shape, a trace, or a bare parameter count.

`Formula`, `Traced` and `Counted` are the three kinds. What one of them cannot answer it refuses itself, with the
reason; no other part of the plan asks which kind a model is.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerocli.errors import UserError
from zerocli.layout.recompute import NOTHING, SELECTIVELY, WHOLE, Recompute
from zerocli.plan.memory.build import plan_replayable
from zerocli.plan.memory.quick import quick_plan
from zerocli.plan.memory.replayable import Replayable
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import Computed
from zerocli.plan.time.hardware import HostTimes

TREATED_ALIKE = (NOTHING, SELECTIVELY, WHOLE)
"""What may be recomputed of blocks that are all treated alike, in the order in which backward comes to such blocks."""


class Model:
    """A model that can be planned."""

    numel: int
    """The parameters of the whole model."""
    trainable_numel: int
    active_numel: int
    """The parameters that one token uses."""
    summary: str
    """Its size and kind in words."""
    family = ""
    whole = True
    """Whether everything that a step needs is planned; if not, model states alone, and no seconds."""
    resizable = False
    """Whether another batch, sequence length or size of it can be planned."""
    blocks = 0
    """Blocks of which each may be recomputed or not; 0: all are treated alike."""
    dimensions: dict[str, int] | None = None
    """Layers, hidden size and heads, if they are known."""

    def replayable(self, setup: Setup) -> Replayable:
        """Return the model with a setup's batch, as its steps are replayed, if they are planned."""
        raise NotImplementedError

    def plan(self, setup: Setup) -> Plan:
        """Return what a step of this setup needs; UserError for an impossible setup."""
        return plan_replayable(self.replayable(setup), setup)

    def quick_plan(self, setup: Setup) -> Plan:
        """Return a plan that is close to `plan`, for a search among many setups."""
        return quick_plan(self.replayable(setup), setup)

    def computed(self, setup: Setup, host: HostTimes) -> Computed | None:
        """Return what a step of this setup computes; None if that is not known."""
        return None

    def recomputed(self, setup: Setup) -> Recompute | None:
        """Return how many blocks a setup recomputes, and how; None if they are not counted one by one."""
        return setup.blocks(self.blocks) if self.blocks else None

    def notes(self, setup: Setup) -> list[str]:
        """Return what a user should know about its plans."""
        return []

    def sized(self, setup: Setup, layers: int, hidden: int | None = None) -> Model:
        """Return the family's model of this many layers, in its proportions unless its width is given."""
        raise self.fixed("model")

    def with_seq(self, seq: int) -> Model:
        """Return the model with a table of positions for this many tokens, if it has one as long as they are."""
        raise self.fixed("seq")

    def sequences(self, step: int, most: int) -> tuple[Sequence[int], str]:
        """Return the lengths of sequences that it can be trained with, and what ends them."""
        raise self.fixed("seq")

    def fixed(self, kind: str) -> UserError:
        """Return why there is no largest one of this kind."""
        return UserError(
            f"--max {kind} needs a model with a shape: activations of this one are not planned by formulas",
            hint=f"zerocli fit llama3-8b --max {kind}",
        )
