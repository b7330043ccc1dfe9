"""A model with a shape: its plans come from formulas, without torch, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerocli.config import LoraConfig
from zerocli.layout.sizes import format_count
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.memory.replayable import Replayable
from zerocli.plan.memory.replayable_shape import replayable_shape
from zerocli.plan.models.model import Model
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import Computed, computed
from zerocli.plan.time.hardware import HostTimes


class Formula(Model):
    """A decoder of this shape."""

    resizable = True

    def __init__(self, shape: Shape, grows: bool = True) -> None:
        """With `grows` a table of learned positions is as long as the sequence, as in built-in models."""
        self.shape, self._grows = shape, grows
        self.numel, self.trainable_numel, self.active_numel = shape.numel, shape.trainable_numel, shape.active_numel
        self.blocks, self.family = shape.layers, shape.family
        self.dimensions = {"layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads}
        active = f", {format_count(self.active_numel)} of them active" if shape.experts else ""
        self.summary = f"{self.numel:,} parameters{active} ({shape.family}, {shape.layers} x {shape.hidden})"

    def replayable(self, setup: Setup) -> Replayable:
        return replayable_shape(self.shape)

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
        return Formula(self.shape.adapted(asked), self._grows)

    def sized(self, setup: Setup, layers: int, hidden: int | None = None) -> Formula:
        shape = self.shape
        step = max(64, shape.head_size * (shape.heads // (shape.kv_heads or shape.heads)) * setup.tp)
        width = hidden if hidden is not None else max(step, round(shape.hidden / shape.layers * layers / step) * step)
        grown = shape.scaled(layers, width)
        positions = max(shape.positions, setup.seq) if shape.positions else 0
        return Formula(replace(grown, positions=positions), self._grows)

    def with_seq(self, seq: int) -> Formula:
        grows = self.shape.positions and self._grows
        return Formula(replace(self.shape, positions=seq)) if grows else self

    def sequences(self, step: int, most: int) -> tuple[Sequence[int], str]:
        last = self.shape.positions
        if last and not self._grows:
            return [*range(step, last, step), last], f"the model has a table of {last} positions"
        return range(step, most + 1, step), "longer ones are not searched"
