"""`Traced`: the result of tracing a model on fake tensors (see trace.py). Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerocli.errors import UserError
from zerocli.layout.recompute import Recompute
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Unit


@dataclass(frozen=True)
class Traced:
    """A traced model: its units, and the peak of temporary bytes within a step."""

    name: str
    parts: tuple[Unit, ...]
    buffers: int
    """Bytes of the model's own buffers."""
    moving: dict[tuple[bool, Recompute], int]
    """Activations, logits and gradients in backward, by `way`."""

    def units(self) -> Iterator[tuple[Unit, int]]:
        for unit in self.parts:
            yield unit, 1

    def moving_nbytes(self, setup: Setup) -> int:
        """Return the temporary bytes of a step of this setup; UserError if no such step was traced."""
        found = self.moving.get(way(setup))
        if found is None:
            raise UserError(f"stage {setup.stage} with recompute={setup.recompute} was not traced")
        return found

    @property
    def numel(self) -> int:
        return sum(each.numel for unit in self.parts for each in unit.parameters)

    @property
    def trainable_numel(self) -> int:
        return sum(each.numel for unit in self.parts for each in unit.parameters if each.trainable)


def way(setup: Setup) -> tuple[bool, Recompute]:
    """Return what in a setup changes the temporary bytes: (gradients are partitioned, blocks that are recomputed)."""
    return setup.zero.gradients, setup.recomputed
