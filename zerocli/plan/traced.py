"""`Traced`: what is known of a model that was run without memory (see trace.py). No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerocli.plan.setup import Setup
from zerocli.plan.shape import Unit


@dataclass(frozen=True)
class Traced:
    """A model that was run: its units, and the most bytes that come and go within a step."""

    name: str
    parts: tuple[Unit, ...]
    buffers: int
    """Bytes of the model's own buffers."""
    moving: dict[tuple[bool, bool], int]
    """Activations, logits and gradients in backward, by `way`."""

    def units(self) -> Iterator[tuple[Unit, int]]:
        for unit in self.parts:
            yield unit, 1

    @property
    def numel(self) -> int:
        return sum(each.numel for unit in self.parts for each in unit.parameters)


def way(setup: Setup) -> tuple[bool, bool]:
    """Return what of a setup changes which bytes come and go: (gradients are partitioned, blocks are recomputed)."""
    return setup.zero.gradients, setup.recomputes
