"""A model with a shape: its plans come from formulas, without torch, in milliseconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zerocli.config import LoraConfig
from zerocli.layout.sizes import format_count
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.memory.build import plan_model
from zerocli.plan.memory.quick import quick_plan
from zerocli.plan.memory.replayable_shape import replayable_shape
from zerocli.plan.models.model import Model
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import Computed, computed
from zerocli.plan.time.hardware import HostTimes


@dataclass(frozen=True)
class Formula(Model):
    """A decoder of this shape."""

    shape: Shape
    grows: bool = True
    """Whether a table of learned positions is as long as the sequence, as in built-in models."""
    resizable = True

    @property
    def numel(self) -> int:
        return self.shape.numel

    @property
    def trainable_numel(self) -> int:
        return self.shape.trainable_numel

    @property
    def active_numel(self) -> int:
        return self.shape.active_numel

    @property
    def blocks(self) -> int:
        return self.shape.layers

    @property
    def family(self) -> str:
        return self.shape.family

    @property
    def dimensions(self) -> dict[str, int]:
        return {"layers": self.shape.layers, "hidden": self.shape.hidden, "heads": self.shape.heads}

    @property
    def summary(self) -> str:
        shape = self.shape
        active = f", {format_count(shape.active_numel)} of them active" if shape.experts else ""
        return f"{shape.numel:,} parameters{active} ({shape.family}, {shape.layers} x {shape.hidden})"

    def plan(self, setup: Setup) -> Plan:
        return plan_model(self.shape, setup)

    def quick_plan(self, setup: Setup) -> Plan:
        return quick_plan(replayable_shape(self.shape), setup)

    def computed(self, setup: Setup, host: HostTimes) -> Computed:
        return computed(self.shape, setup, host)

    def notes(self, setup: Setup) -> list[str]:
        shape, lora = self.shape, self.shape.lora
        if lora is None:
            return []
        return [
            f"LoRA of rank {lora.rank} on {', '.join(lora.of(shape.projections()))}: "
            f"{shape.trainable_numel:,} parameters are trained, in {setup.precision}; the others are frozen"
        ]

    def adapted(self, asked: LoraConfig) -> Formula:
        """Return this model with adapters; UserError if they are not planned for it."""
        return replace(self, shape=self.shape.adapted(asked))

    def sized(self, setup: Setup, layers: int, hidden: int | None = None) -> Formula:
        shape = self.shape
        step = max(64, shape.head_size * (shape.heads // (shape.kv_heads or shape.heads)) * setup.tp)
        width = hidden if hidden is not None else max(step, round(shape.hidden / shape.layers * layers / step) * step)
        grown = shape.scaled(layers, width)
        positions = max(shape.positions, setup.seq) if shape.positions else 0
        return replace(self, shape=dataclasses.replace(grown, positions=positions))

    def with_seq(self, seq: int) -> Formula:
        if not self.shape.positions or not self.grows:
            return self
        return replace(self, shape=dataclasses.replace(self.shape, positions=seq))

    def sequences(self, step: int, most: int) -> tuple[Sequence[int], str]:
        last = self.shape.positions
        if last and not self.grows:
            return [*range(step, last, step), last], f"the model has a table of {last} positions"
        return range(step, most + 1, step), "longer ones are not searched"
