"""Quick plans, for a search among many placements: exact but for fragmentation and a per cent, and far faster.

What a step allocates beside states and buffers hardly depends on where those rest. So one replay of a step, without the
allocator's arenas, serves all placements; what is kept is counted for each.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

from offload.placement import ACTIVATIONS, HBM, Placement
from zerocli.layout.buffers import buckets, gather_buffers, gradient_arenas, update_slots
from zerocli.layout.recompute import NOTHING
from zerocli.plan.memory.build import check, plan_peaks
from zerocli.plan.memory.flats import Flats, plan_flats
from zerocli.plan.memory.ledger import Peak
from zerocli.plan.memory.replayable import Replayable
from zerocli.plan.memory.runtime import constant, usual_fragments
from zerocli.plan.memory.step import Peaks, Replay, StepPeak
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup


def quick_plan(model: Replayable, setup: Setup) -> Plan:
    """Return a plan that is close to the exact one; setups that differ in placement, say, share a replay."""
    alike = replace(setup, stage=0, offload=Placement(), recompute=NOTHING, compiled=False)
    return _plans(model, alike).plan(setup)


@functools.lru_cache(maxsize=16)
def _plans(model: Replayable, alike: Setup) -> QuickPlans:
    return QuickPlans(model)


class QuickPlans:
    """Plans of one model."""

    def __init__(self, model: Replayable) -> None:
        self._model = model
        self._plans: dict[Setup, Plan] = {}
        self._steps: dict[tuple[object, ...], StepPeak] = {}
        self._initial: dict[tuple[object, ...], tuple[int, int]] = {}
        """The peak of initialisation, and the bytes of states and buffers that are kept."""

    def plan(self, setup: Setup) -> Plan:
        """Return a plan that is close to that of `plan_model`."""
        eager = replace(setup, compiled=False)
        if eager not in self._plans:
            self._plans[eager] = self._plan_eager(eager)
        return replace(self._plans[eager], setup=setup)

    def _plan_eager(self, setup: Setup) -> Plan:
        check(setup)
        self._model.check(setup)
        flats = plan_flats(self._model, setup)
        held = _held(flats, setup)
        step, gradients = self._step(setup), held.pop("gradients", 0)
        kept = sum(held.values())
        highest = step.with_gradients(gradients)
        held.update(gradients=gradients, activations=highest - gradients)
        peak = Peak(kept + highest, "a step", dict(held))
        initialisation = Peak(self._initialised(setup, flats, kept), "initialisation", dict(held))
        reserved = max(peak.nbytes, initialisation.nbytes)
        reserved += usual_fragments(reserved) + constant("workspace", setup.runtime)
        away, each = step.offloaded, step.checkpoint_nbytes
        peaks = Peaks(initialisation, peak, peak, away, kept, each, reserved=reserved)
        return plan_peaks(self._model, setup, flats, peaks)

    def _step(self, setup: Setup) -> StepPeak:
        checkpoints = setup.offload.shares.get(ACTIVATIONS, ())
        kinds = (setup.zero.optimizer, setup.zero.gradients)  # partitioned parameters change what is kept, not the step
        sizes = (setup.ranks, setup.group, setup.copies, setup.tp, setup.batch, setup.seq, setup.accumulate)
        key = (kinds, sizes, setup.recomputed, checkpoints)
        if key not in self._steps:
            here = Placement({ACTIVATIONS: checkpoints} if checkpoints else {})
            setup = replace(setup, offload=here)
            self._steps[key] = Replay(self._model, setup, plan_flats(self._model, setup), arenas=False).run_step()
        return self._steps[key]

    def _initialised(self, setup: Setup, flats: Flats, kept: int) -> int:
        """Return the peak of initialisation, for which what is on which tier counts and no activations do."""
        tiers = tuple((kind, tuple(share.tier for share in each)) for kind, each in setup.offload.shares.items())
        states = tuple(each for each in tiers if each[0] != ACTIVATIONS)
        sizes = (setup.ranks, setup.group, setup.copies, setup.tp, setup.seq)
        key = (setup.stage, sizes, setup.offload.policy, states)
        if key not in self._initial:
            self._initial[key] = Replay(self._model, setup, flats, arenas=False).initial_peak(), kept
        peak, then = self._initial[key]
        return peak + kept - then


def _held(flats: Flats, setup: Setup) -> Counter[str]:
    """Return the bytes on the device that stay from step to step, and all gradients, by category."""
    held: Counter[str] = Counter()
    sizing = replace(setup.sizing, keep_gradients=True)
    for category, blocks in flats.pieces(sizing, HBM).items():
        held[category] += sum(blocks)
    for unit, times in flats.runs:
        for spec in gradient_arenas([flat for flat in unit if flat.trainable], sizing):
            held[spec.category] += spec.nbytes * times * (spec.tier == HBM)
    some = flats.enough(sizing)
    trainable = [flat for unit in some for flat in unit if flat.trainable]
    for spec in (*gather_buffers(some, sizing), *buckets(trainable, sizing), *update_slots(trainable, sizing)):
        held[spec.category] += spec.nbytes * (spec.tier == HBM)
    return held
