"""A bare parameter count as a model: its states as the paper counts them, and nothing else."""

from __future__ import annotations

from zerocli.plan.memory.build import plan_count
from zerocli.plan.models.model import Model
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup


class Counted(Model):
    """So many parameters, all of them trained but for the frozen ones."""

    whole = False

    def __init__(self, count: int, frozen: int = 0) -> None:
        self.numel = self.active_numel = count
        self.trainable_numel, self._frozen = count - frozen, frozen
        self.summary = f"{count:,} parameters; model states alone"

    def plan(self, setup: Setup) -> Plan:
        return plan_count(self.numel, setup, self._frozen)

    quick_plan = plan
