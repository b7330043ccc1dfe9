"""A bare parameter count as a model: its states as the paper counts them, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from zerocli.plan.memory.build import plan_count
from zerocli.plan.models.model import Model
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup


@dataclass(frozen=True)
class Counted(Model):
    """So many parameters, all of them trained but for the frozen ones."""

    count: int
    frozen: int = 0
    whole = False

    @property
    def numel(self) -> int:
        return self.count

    @property
    def trainable_numel(self) -> int:
        return self.count - self.frozen

    @property
    def summary(self) -> str:
        return f"{self.count:,} parameters; model states alone"

    def plan(self, setup: Setup) -> Plan:
        return plan_count(self.count, setup, self.frozen)
