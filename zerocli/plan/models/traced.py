"""`Traced`: the result of tracing a model on fake tensors (see trace.py). Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zerocli.errors import UserError
from zerocli.layout.recompute import NOTHING, SELECTIVELY, WHOLE, Recompute
from zerocli.plan.blocks.shape import Unit
from zerocli.plan.memory.build import plan_measured
from zerocli.plan.models.model import TREATED_ALIKE, Model
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import (
    HOST_COMPILED,
    HOST_FORWARD,
    USUAL,
    Computed,
    Passes,
    Work,
    num_chunks,
    recomputing,
)
from zerocli.plan.time.hardware import HostTimes

# The host's times are from steps of eleven families of transformers with 4 and 12 narrow blocks, on an H200, and from
# 28 random models of the same families on three more such machines.
UNIT, UNIT_FORWARD = 0.7, 0.41
"""The share of the host's time for a block (`hardware.HostTimes`) that is not for launching its operations (a block of
GPT-2 has 13 in forward and 21 in backward), and forward's share of that."""
WHOLE_UNIT, REPEATED = 0.8, 2.0
"""The share of the host's time for recomputing a whole block that does not depend on its operations; and the time for
an operation that is repeated, relative to one that runs once: what it saves passes through Python."""
SELECTIVE_UNIT, LOOKED_AT = 0.6, 3.0
"""The same for a block that is recomputed selectively, and for each operation of its forward, which Python looks at."""
TRACED_COMPILED = 0.3
"""Bytes that compiled blocks move, relative to the operations of eager ones one by one (transformers' Llama 8B)."""
TRACED = TREATED_ALIKE
"""What is traced where recomputation is to be chosen."""


@dataclass(frozen=True)
class Traced(Model):
    """A traced model: its units, and the peak of temporary bytes within a step.

    Where all blocks are alike, a step that recomputes some of them is between those in which all are treated alike.
    """

    name: str
    parts: tuple[Unit, ...]
    buffers: int
    """Bytes of the model's own buffers."""
    moving: dict[tuple[bool, Recompute], int]
    """Activations, logits and gradients in backward, by `way`."""
    work: dict[tuple[bool, Recompute], tuple[Work, Work, Work]]
    """Of a micro-step's forward, backward and recomputation on one rank, by `way`."""
    kept: dict[tuple[bool, Recompute], int]
    """The part of `moving` that is there at the end of forward, by `way`."""
    alike: int
    """Blocks that may be recomputed, if all are alike; else 0."""

    @property
    def blocks(self) -> int:
        return self.alike

    @property
    def summary(self) -> str:
        return f"{self.numel:,} parameters in {len(self.parts)} units; traced"

    def plan(self, setup: Setup) -> Plan:
        return plan_measured(self, setup, self.moving_nbytes(setup), self.buffers)

    def computed(self, setup: Setup, host: HostTimes = USUAL) -> Computed:
        found = self.passes(setup, host), Work(), self.model_flops(setup), self.ends_numel
        return Computed(*found, num_chunks(self.units(), setup), self.layers, hidden=0)

    def units(self) -> Iterator[tuple[Unit, int]]:
        for unit in self.parts:
            yield unit, 1

    def moving_nbytes(self, setup: Setup) -> int:
        """Return the temporary bytes of a step of this setup; UserError if no such step was traced.

        Of blocks that are treated in several ways, backward comes to the kept ones first, then to the selective ones,
        then to the whole ones. Whatever is behind it is freed and counts as whole, which is the least. So it is at most
        what the blocks before it hold, and what a step needs beyond that in which all are treated as it is.
        """
        partitioned, shares = setup.zero.gradients, self._shares(setup)
        if len(shares) == 1:
            return self.moving[partitioned, next(iter(shares))]
        highest = 0.0
        for kind in TRACED:
            if share := shares.get(kind, 0.0):
                held = sum(part * self.kept[partitioned, each] for each, part in shares.items())
                highest = max(highest, held + self.moving[partitioned, kind] - self.kept[partitioned, kind])
                shares[kind] -= share
                shares[WHOLE] = shares.get(WHOLE, 0.0) + share
        return math.ceil(highest)

    def _shares(self, setup: Setup) -> dict[Recompute, float]:
        """Return the share of blocks that is treated as all are in each trace; UserError without such traces."""
        partitioned, asked = way(setup)
        if (partitioned, asked) in self.moving:
            return {asked: 1.0}
        if not self.blocks or any((partitioned, each) not in self.moving for each in TRACED):
            raise UserError(f"stage {setup.stage} with recompute={setup.recompute} was not traced")
        counts = setup.blocks(self.blocks)
        numbers = {NOTHING: self.blocks - counts.count, SELECTIVELY: counts.selective, WHOLE: counts.whole}
        return {each: number / self.blocks for each, number in numbers.items() if number}

    @property
    def layers(self) -> int:
        """Units beside the one of all that is not repeated."""
        return max(1, len(self.parts) - 1)

    @property
    def ends_numel(self) -> int:
        """Parameters of the units that no block is like: what comes before and after the blocks."""
        shapes = [tuple(each.shape for each in unit.parameters) for unit in self.parts]
        return sum(
            each.numel
            for unit, shape in zip(self.parts, shapes, strict=True)
            if shapes.count(shape) == 1
            for each in unit.parameters
        )

    def passes(self, setup: Setup, host: HostTimes = USUAL) -> Passes:
        """Return the work of a micro-step."""
        units, recompute = len(self.parts), setup.recomputed.of(self.layers)
        whole, part = recompute.whole, recompute.count - recompute.whole
        forward, backward, again, repeated = (each.at(host.pace) for each in self._work(setup))
        if setup.compiled:
            hosted = recomputing(host, setup, whole, part)
        else:
            hosted = recomputing(host, setup, WHOLE_UNIT * whole, SELECTIVE_UNIT * part)
            hosted += REPEATED * repeated.host
            hosted += LOOKED_AT * forward.host * part / self.layers
        again = again.at(0.0)  # its launches are counted
        forward += Work(host=host.block * UNIT * UNIT_FORWARD * units)
        backward += Work(host=host.block * UNIT * (1 - UNIT_FORWARD) * units)
        if setup.compiled:
            launched = host.block * HOST_COMPILED * units
            forward = forward.compiled(TRACED_COMPILED, launched * UNIT_FORWARD)
            backward = backward.compiled(TRACED_COMPILED, launched * (1 - UNIT_FORWARD))
            again = again.compiled(TRACED_COMPILED, 0.0)
        forward, again = forward + Work(host=hosted * HOST_FORWARD), again + Work(host=hosted * (1 - HOST_FORWARD))
        return Passes(forward, backward, again, Work())

    def _work(self, setup: Setup) -> tuple[Work, Work, Work, Work]:
        """Return the work of forward, of backward, of what is repeated, and of the whole blocks among that."""
        again, repeated = Work(), Work()
        for each, share in self._shares(setup).items():
            counts = each.of(self.layers)
            forward, backward, more = self.work[setup.zero.gradients, each]
            again += more.times(share)
            repeated += more.times(share * counts.whole / max(1, counts.count))
        return forward, backward, again, repeated

    def model_flops(self, setup: Setup) -> float:
        """Return the operations of a step of all ranks, as MFU counts them: without repetition."""
        forward, backward, *_ = self._work(setup)
        once = forward.products + backward.products + 3 * forward.attention
        return once * setup.accumulate * setup.dp

    @property
    def numel(self) -> int:
        return sum(each.numel for unit in self.parts for each in unit.parameters)

    @property
    def trainable_numel(self) -> int:
        return sum(each.numel for unit in self.parts for each in unit.parameters if each.trainable)


def way(setup: Setup) -> tuple[bool, Recompute]:
    """Return what in a setup changes the temporary bytes: (gradients are partitioned, blocks that are recomputed)."""
    return setup.zero.gradients, setup.recomputed
