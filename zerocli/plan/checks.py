"""Candidates of `--auto` checked by exact plans: one that needs more than its rough plan said is changed until it fits.

Then it is decided where its update runs and whether its blocks are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from offload.placement import HBM, Placement, Share
from zerocli.config import AUTO
from zerocli.layout.recompute import Recompute
from zerocli.plan.hardware import Hardware
from zerocli.plan.model import Model
from zerocli.plan.recompute import needed_by
from zerocli.plan.search import Candidate, judge, weigh
from zerocli.plan.setup import Setup

GRAIN, COARSE, LARGE = 64 << 20, 1 << 30, 100 << 30
"""Budgets are multiples of the first many bytes, or of the second from the third on."""
SHORT = 0.8
"""An update on the CPU is chosen if it is estimated to take less than this: estimates of it are that much too short."""
COMPILING = 15.0
"""Seconds that compiling the blocks takes at most (measured on an H200: 3 to 12)."""


@dataclass
class Checks:
    """Checks the candidates of one search."""

    model: Model
    limits: Hardware
    """The machine without the margins that stay free."""
    amounts: Callable[[Setup], Sequence[Recompute]]
    """Returns what may be recomputed with a setup's stage and batch, from least to most."""
    roughly: Callable[[Setup], Candidate]
    """Returns a candidate by its quick plan."""
    places: bool
    """Whether budgets may be changed."""
    spilled: Callable[[Setup], Setup]
    """Returns a setup with what host memory cannot hold on disks."""
    steps: int
    """Of a run whose blocks may be compiled; 0: they are as the setup says."""
    _beyond: dict[tuple[object, ...], int] = field(default_factory=dict)
    """By how much exact plans were above rough ones, by stage and tiers."""
    _exactly: dict[tuple[object, ...], Candidate] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """How many exact plans were made."""
        return len(self._exactly)

    @property
    def beyond(self) -> int:
        """The most bytes by which an exact plan was above its rough one."""
        return max(self._beyond.values(), default=0)

    def corrected(self, candidate: Candidate) -> Candidate | None:
        """Return a candidate of the search with less on the device if its rough plan is known to be too low.

        None if nothing is left to change.
        """
        setup = self._corrected(candidate.setup, self.roughly)
        if setup is None:
            return None
        return self.roughly(setup) if setup != candidate.setup else candidate

    def fitted(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate by an exact plan, changed as far as it needs more than the rough one said."""
        roughly = self.roughly
        setup = candidate.setup
        for _ in range(3):
            corrected = self._corrected(setup, roughly)
            if corrected is None:
                return None
            setup = corrected
            exact, rough = self.exact(setup), roughly(setup)
            beyond = needed_by(exact.plan) - needed_by(rough.plan)
            self._beyond[where(setup)] = max(self._beyond.get(where(setup), 0), beyond)
            if exact.fits:
                return self.finished(exact)
        return None

    def finished(self, candidate: Candidate) -> Candidate:
        """Return a candidate that fits, with its update where it is faster, and compiled if that pays."""
        return self._compiled(self._updated_there(candidate))

    def _updated_there(self, candidate: Candidate) -> Candidate:
        """Return the candidate with its offloaded states updated on the CPU, if that is faster by measured rates."""
        setup, plan = candidate.setup, candidate.plan
        away = any(plan.of("optimizer_states", tier) for tier in plan.tiers if tier != HBM)
        if not away or setup.device != "cuda" or setup.update != AUTO or not self.limits.products:
            return candidate
        there = weigh(self.model, replace(setup, update="cpu"), self.limits)
        return there if there.fits and there.cost < candidate.cost * SHORT else candidate

    def _compiled(self, candidate: Candidate) -> Candidate:
        """Return the candidate with compiled blocks, if what they save in all steps is more than compiling takes."""
        if not self.steps or not self.model.whole:
            return candidate
        plan = replace(candidate.plan, setup=replace(candidate.setup, compiled=True))  # they need no more memory
        compiled = judge(self.model, plan, self.limits)
        return compiled if (candidate.cost - compiled.cost) * self.steps > COMPILING else candidate

    def _corrected(self, setup: Setup, roughly: Callable[[Setup], Candidate]) -> Setup | None:
        """Return the setup with a smaller budget or more recomputation, if its rough plan is known to be too low."""
        beyond = self._beyond.get(where(setup), 0)

        def over(changed: Setup) -> int:
            return needed_by(roughly(changed).plan) + beyond - self.limits.gpu_memory

        missing = over(setup)
        if missing <= 0:
            return setup
        if self.places and (smaller := with_less(setup, missing)) is not None:
            return self.spilled(smaller)
        order = self.amounts(setup)
        if setup.recomputed not in order:
            return None
        low, high = order.index(setup.recomputed), len(order)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if over(replace(setup, recompute=order[middle])) > 0 else (low, middle)
        return replace(setup, recompute=order[high]) if high < len(order) else None

    def exact(self, setup: Setup) -> Candidate:
        """Return the candidate of a setup by an exact plan."""
        key = key_of(setup, setup.offload)
        if key not in self._exactly:
            self._exactly[key] = weigh(self.model, setup, self.limits)
        return self._exactly[key]


def kind_of(setup: Setup) -> tuple[object, ...]:
    """Return what distinguishes two choices other than numbers: stage, tiers of each kind, whether it recomputes."""
    tiers = tuple(
        (kind, tuple(share.tier for share in shares)) for kind, shares in sorted(setup.offload.shares.items())
    )
    recompute = setup.recomputed
    return setup.stage, setup.batch, setup.offload.policy, tiers, bool(recompute.whole), bool(recompute.selective)


def where(setup: Setup) -> tuple[object, ...]:
    """Return what decides how far a rough plan is off: stage and tiers."""
    stage, _, policy, tiers, *_ = kind_of(setup)
    return stage, policy, tiers


def key_of(setup: Setup, placement: Placement) -> tuple[object, ...]:
    """Return what two candidates of a search differ in."""
    return setup.stage, setup.batch, str(placement), setup.recompute


def rounded(nbytes: int) -> int:
    """Return the largest budget of at most `nbytes`."""
    grain = COARSE if nbytes >= LARGE else GRAIN
    return nbytes // grain * grain


def with_less(setup: Setup, nbytes: int) -> Setup | None:
    """Return the setup with `nbytes` less in a budget of the device; None without such a budget."""
    for kind, shares in setup.offload.shares.items():
        first = shares[0]
        if first.tier == HBM and first.budget is not None:
            left = rounded(first.budget - nbytes)
            kept = (Share(HBM, left),) if left > 0 else ()
            return replace(setup, offload=Placement({**setup.offload.shares, kind: (*kept, *shares[1:])}))
    return None
