"""Candidates: stages and placements that fit a machine, the fastest one, the smallest change that would fit."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.placement import ACTIVATIONS, HBM, Placement, Share
from zerocli.config import AUTO, read_placement
from zerocli.config.schema import SHARD_STATES
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout.flats import FP32
from zerocli.layout.shards import divisors
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.model import Model
from zerocli.plan.rows import TIERS as OWN_TIERS
from zerocli.plan.rows import Plan
from zerocli.plan.search.recompute import needed_by, plan_decided
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import Hardware
from zerocli.plan.time.seconds import Estimate, estimate

PLACEMENTS = {
    0: ("",),
    1: ("", "optimizer=cpu"),
    2: ("", "optimizer=cpu", "cpu"),
    3: ("", "optimizer=cpu", "cpu", "params=cpu,grads=cpu,optimizer=nvme", "nvme"),
}
"""The placements to try at each stage, those closest to the device first."""
MIN_GAIN = 0.02
"""Least share of a step's time by which groups must be faster to be recommended."""
QUICK_PLAN_ERROR = 0.02
"""Share of a device's memory by which a quick plan without fragmentation may be too high."""


@dataclass(frozen=True)
class Candidate:
    """A setup with its plan, whether it fits, and its estimated seconds per step."""

    plan: Plan
    hardware: Hardware
    estimate: Estimate | None = None

    @property
    def setup(self) -> Setup:
        return self.plan.setup

    @functools.cached_property
    def available(self) -> dict[str, int | None]:
        """The bytes that the machine has of each tier; None for tiers that no machine lists."""
        return {tier: self.hardware.room.get(tier) for tier in self.plan.tiers}

    @functools.cached_property
    def over(self) -> dict[str, int]:
        """Return by how many bytes each tier is too small; without a GPU, host memory is the device's as well."""
        found = {}
        for tier, there in self.available.items():
            needed = needed_by(self.plan) if tier == HBM else self.plan.needed(tier)
            if there is not None and needed > there:
                found[tier] = needed - there
        return found

    def excess(self) -> int:
        """Return by how many bytes all tiers together are too small."""
        return sum(self.over.values())

    @property
    def fits(self) -> bool:
        return not self.over

    @property
    def cost(self) -> float:
        """The estimated seconds of a step; without an estimate, the bytes off the device, which take time to move."""
        if self.estimate is not None:
            return self.estimate.seconds
        return float(sum(self.plan.needed(t) * (10 if t == "nvme" else 1) for t in self.plan.tiers if t != HBM))

    @property
    def used(self) -> dict[str, float]:
        """Return the share of each tier that is needed."""
        return {tier: self.plan.needed(tier) / there for tier, there in self.available.items() if there}

    @property
    def unknown(self) -> dict[str, int]:
        """Return the bytes needed on each tier of another package, whose capacity is unknown."""
        return {tier: self.plan.needed(tier) for tier in self.plan.tiers if tier not in OWN_TIERS}


def weigh(model: Model, setup: Setup, hardware: Hardware) -> Candidate:
    return judge(model, plan_decided(model, setup, hardware.gpu_memory), hardware)


def weigh_groups(model: Model, setup: Setup, hardware: Hardware) -> list[Candidate]:
    """Return the candidates of a setup with groups of every size that tiles the ranks, and nodes or a node's ranks.

    Of each size, with states within a group and over all ranks, where that differs.
    """
    node = max(1, setup.local_ranks // setup.tp)
    sizes = [each for each in divisors(setup.dp) if each % node == 0 or node % each == 0]
    tried = [replace(setup, shard_ranks=size, shard_states=states) for size in sizes for states in SHARD_STATES]
    differ = [each for each in tried if each.shard_states == SHARD_STATES[0] or (each.copies > 1 and each.stage)]
    return [weigh(model, each, hardware) for each in differ]


def faster_groups(model: Model, best: Candidate, hardware: Hardware) -> Candidate | None:
    """Return the best candidate in groups of a node's ranks, if there are several nodes and it is faster."""
    setup, node = best.setup, best.setup.local_ranks // best.setup.tp
    if setup.group < setup.dp or not 1 < node < setup.dp or best.estimate is None:
        return None
    found = [weigh(model, replace(setup, shard_ranks=node, shard_states=states), hardware) for states in SHARD_STATES]
    faster = best_of(found)
    return faster if faster is not None and faster.cost < best.cost * (1 - MIN_GAIN) else None


def judge(model: Model, plan: Plan, hardware: Hardware) -> Candidate:
    work = model.computed(plan.setup, hardware.host)
    timed = None if work is None else estimate(plan, work, hardware)
    return Candidate(plan, hardware, timed)


def setups(setup: Setup, stages: Sequence[int], offload: Placement | None) -> Iterator[Setup]:
    """Yield the setups to evaluate: for each stage all placements to try, or the requested one."""
    asked = (offload if offload is not None else setup.offload).shares.get(ACTIVATIONS)
    extra = str(Placement({ACTIVATIONS: asked})) if asked else ""
    for stage in stages:
        if offload is not None:
            yield replace(setup, stage=stage, offload=offload)
            continue
        for text in PLACEMENTS[stage]:
            yield replace(setup, stage=stage, offload=_joined(text, stage, extra))


def lightest(setup: Setup) -> Setup:
    """Return the setup with every block recomputed where `auto` may choose: hardly any choice needs less."""
    return replace(setup, recompute=True) if setup.recompute == AUTO else setup


def lightest_setups(setup: Setup, stages: Sequence[int], offload: Placement | None) -> Iterator[Setup]:
    """Yield the setups of a table, then the same with activation checkpoints off the device, if there are any."""
    setup = lightest(setup)
    yield from setups(setup, stages, offload)
    if offload is None and setup.recomputes:
        away = Placement({**setup.offload.shares, ACTIVATIONS: (Share("dram"),)})
        yield from setups(replace(setup, offload=away), stages, None)


@functools.cache
def _joined(text: str, stage: int, extra: str) -> Placement:
    """Return a placement of states combined with one of activations; a policy such as `cpu` is written out for that."""
    if extra and text in ("cpu", "nvme"):
        kinds = ["optimizer", *(["grads"] if stage >= 2 else []), *(["params"] if stage == 3 else [])]
        text = ",".join(f"{kind}={'cpu' if kind == 'grads' else text}" for kind in kinds)
    return read_placement(",".join(part for part in (text, extra) if part))


def weigh_each(model: Model, tried: Iterable[Setup], hardware: Hardware) -> list[Candidate]:
    """Return the candidates of setups; those that are not allowed are left out if others remain.

    If none remains, raises the error of one that is allowed but has no room, else that of the last one.
    """
    found: list[Candidate] = []
    refused: list[UserError] = []
    for each in tried:
        try:
            found.append(weigh(model, each, hardware))
        except UserError as error:
            refused.append(error)
    if not found:
        # Of a placement for several stages, the first may refuse what the later ones allow but have no room for.
        raise next((error for error in refused if error.exit_code == DOES_NOT_FIT), refused[-1])
    return found


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest that fits, or None; of bare counts, which have no times, that which moves the fewest bytes."""
    return min((each for each in candidates if each.fits), key=lambda each: each.cost, default=None)


def nearest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate that exceeds the machine least."""
    return min(candidates, key=Candidate.excess)


def smallest_change(model: Model, setup: Setup, hardware: Hardware) -> tuple[str, Candidate] | None:
    """Return the smallest change of the setup that fits, as command-line arguments, and its candidate."""
    for words, changed in changes(model, setup):
        try:
            if not states_fit(model, changed, hardware):
                continue
            quick = Candidate(model.quick_plan(lightest(changed)), hardware)  # `auto` can recompute all blocks
            if not may_fit(quick):
                continue
            candidate = weigh(model, changed, hardware)
        except UserError:
            continue
        if candidate.fits:
            return words, candidate
    return None


def states_fit(model: Model, setup: Setup, hardware: Hardware) -> bool:
    """Whether the model states alone fit, which is quick to count; if they do not, no plan of the model does.

    Up to a budget whole pieces are placed, and a count does not know them: then this is true.
    """
    budgets = [share.budget for shares in setup.offload.shares.values() for share in shares]
    if not model.whole or any(budget is not None for budget in budgets):
        return True
    if model.trainable_numel < model.numel:  # a count is of trained parameters
        return True
    # As the paper counts them the master is whole; a split one takes less.
    papers = FP32 * (setup.num_states + (setup.width < FP32))
    count = model.numel * setup.state_width // papers if papers else model.numel
    return weigh(Counted(count), replace(setup, recompute=False), hardware).fits


def may_fit(candidate: Candidate, tiers: Sequence[str] = ()) -> bool:
    """Whether the exact plan of a candidate may fit these tiers (by default all).

    A quick plan guesses the fragmentation of the device's memory; beside that it is exact to a per cent or two.
    """
    slack = {HBM: candidate.plan.fragments + QUICK_PLAN_ERROR * candidate.hardware.gpu_memory}
    return all(nbytes <= slack.get(tier, 0) for tier, nbytes in candidate.over.items() if not tiers or tier in tiers)


def changes(model: Model, setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yield (arguments, setup), from changes that only cost time to those that change the run."""
    lighter = [("", setup)]
    smaller = []
    if model.resizable:
        lighter += [(f" --set activations.policy={each}", replace(setup, recompute=each)) for each in setup.lighter]
        smaller = [(f"--batch {n} ", replace(lighter[-1][1], batch=n)) for n in _halves(setup.batch)]
    tail, last = lighter[-1]
    for words, each in lighter:
        if words:
            yield words.strip(), each
        yield from _placements(each, setup.stage, "", words)
    if model.resizable:
        yield from _placements(last, 3, "", tail, "activations=cpu")
    for words, each in smaller:
        yield f"{words.strip()}{tail}", each
        yield from _placements(each, setup.stage, words, tail)
    ranks = setup.ranks
    while ranks < 65536:
        ranks *= 2
        yield from _placements(replace(last, ranks=ranks), 3, f"--ranks {ranks} ", tail)
    if model.resizable:
        for seq in _halves(setup.seq, least=256):
            yield from _placements(replace(last, batch=1, seq=seq), 3, f"--batch 1 --seq {seq} ", tail)


def _placements(setup: Setup, stage: int, before: str, after: str, extra: str = "") -> Iterator[tuple[str, Setup]]:
    """Yield the setup at this stage and the later ones, with each of their placements."""
    for number in range(max(1, stage), 4):
        for text in PLACEMENTS[number]:
            offload = _joined(text, number, extra)
            words = f"{before}--stage {number}{f' --offload {offload}' if offload else ''}{after}"
            yield words, replace(setup, stage=number, offload=offload)


def _halves(number: int, least: int = 1) -> Iterator[int]:
    while number // 2 >= least:
        number //= 2
        yield number
