"""`--auto`: the fastest run of a model that fits a machine, over stages, placements with budgets, and recomputation.

For each stage and number of recomputed blocks, states leave the device in a fixed order until the rest fits: optimizer
states, then gradients and parameters (or these first), and of the last kind that leaves only as much as must. Optimizer
states free most bytes for each byte that crosses the host link: they are 10 to 12 bytes per parameter and cross it
twice in a step, parameters are 2 and cross it four times. What host memory cannot hold of them goes to disks.
Of these candidates the one with the fewest estimated seconds is chosen. The search goes by rough plans (rough.py); the
fastest are then checked by exact ones (checks.py).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.placement import ACTIVATIONS, HBM, Placement, Share
from zerocli.config import AUTO
from zerocli.errors import UserError
from zerocli.layout.recompute import NOTHING, Recompute
from zerocli.plan.checks import GRAIN, Checks, key_of, kind_of, rounded
from zerocli.plan.hardware import Hardware
from zerocli.plan.model import TREATED_ALIKE, Model
from zerocli.plan.recompute import MARGIN, choices, needed_by, whole_choices
from zerocli.plan.rough import TOO_HIGH
from zerocli.plan.search import Candidate, judge, lightest_setups, may_fit
from zerocli.plan.setup import Setup

HOST_MARGIN = 0.05
"""Share of host memory and disk space that a choice leaves free."""
TIE = 5e-4
"""Of choices whose estimates differ by less than this share, the one that leaves most device memory free is taken."""
LEVELS, FINEST = 6, 64
"""Amounts of recomputation are first tried at so many steps, then between the best and its neighbours, down to steps of
one part in so many."""
FEW = 12
"""After so many exact plans, the fastest two are enough for a table of the best."""
WORTH = 0.02
"""A placement with budgets is shown if it is faster than the others by more than this share."""
NEAR = 6
"""Where no rough plan fits, so many that exceed the machine least are made exactly."""
SEARCHES = 3
"""The search is repeated up to so many times in all if no exact plan fits.

A repetition keeps as much of the device free as exact plans were above rough ones."""
ORDERS = (("optimizer", "gradients", "parameters"), ("optimizer", "parameters", "gradients"))
"""Kinds of states in the orders in which they leave the device."""


@dataclass(frozen=True)
class Choice:
    """The candidates that fit, best first; without any, `nearest` is the one that exceeds the machine least."""

    fitting: tuple[Candidate, ...]
    nearest: Candidate | None
    number: int = 0
    """How many candidates were weighed."""

    @property
    def best(self) -> Candidate | None:
        return self.fitting[0] if self.fitting else None

    @property
    def runner_up(self) -> Candidate | None:
        """The best candidate that differs from the best one in more than its budgets."""
        best = self.best
        for each in self.fitting[1:]:
            if best is not None and kind_of(each.setup) != kind_of(best.setup):
                return each
        return None


def choose(
    model: Model,
    setup: Setup,
    hardware: Hardware,
    stages: Sequence[int],
    offload: Placement | None = None,
    batches: Sequence[int] = (),
    steps: int = 0,
    shown: int = 4,
) -> Choice:
    """Return the choice for a model; `offload`, and a `setup.recompute` other than `auto`, are kept as they are.

    `batches` are micro-batches to choose from: with each, as many are accumulated as give the setup's step. `steps` is
    the length of a run whose blocks are compiled if that pays for itself; 0: they are as the setup says. `shown` is the
    number of different choices that are wanted.
    """

    def searched(setup: Setup, steps: int) -> Choice:
        whole = setup.batch * setup.accumulate
        setups = [
            replace(setup, stage=stage, batch=size, accumulate=whole // size)
            for size in batches or (setup.batch,)
            for stage in sorted(stages, reverse=True)  # the last one is the likeliest to fit
        ]
        kept_free = 0
        for _ in range(SEARCHES):
            search = _Search(model, setup, hardware, offload is None, steps, kept_free)
            for each in setups:
                search.stage(each, offload)
            choice = search.choice(shown)
            if choice.best is not None or search.beyond <= kept_free:
                break
            kept_free = search.beyond
        return choice if choice.best is not None else search.last_resort(choice, setups, offload)

    found = searched(setup, steps)
    if not steps or found.best is None or not found.best.setup.compiled:
        return found
    compiled = searched(replace(setup, compiled=True), 0)  # whose blocks may be recomputed at another price
    return compiled if compiled.best is not None and compiled.best.cost < found.best.cost else found


def with_budgets(
    model: Model, setup: Setup, hardware: Hardware, stages: Sequence[int], best: Candidate | None
) -> list[Candidate]:
    """Return the fastest candidate of all placements with budgets, if it is faster than the best so far."""
    try:
        found = choose(model, setup, hardware, stages).best
    except UserError:
        return []
    if found is None or (best is not None and best.cost <= found.cost * (1 + WORTH)):
        return []
    return [found]


def with_margins(hardware: Hardware) -> Hardware:
    """Return the machine without what a choice leaves free."""
    return replace(
        hardware,
        gpu_memory=int(hardware.gpu_memory * (1 - MARGIN)),
        host_memory=int(hardware.host_memory * (1 - HOST_MARGIN)),
        nvme_space=int(hardware.nvme_space * (1 - HOST_MARGIN)),
    )


class _Search:
    """Collects the candidates of one model on one machine."""

    def __init__(
        self,
        model: Model,
        setup: Setup,
        hardware: Hardware,
        places: bool,
        steps: int,
        kept_free: int,
    ) -> None:
        """Take `places` to choose placements too, and the `steps` of a run that may be compiled.

        Quick plans leave `kept_free` bytes of the device.
        """
        self._model, self._setup, self._hardware = model, setup, hardware
        limits = with_margins(hardware)
        self._limits = replace(limits, gpu_memory=limits.gpu_memory - kept_free)
        self._off = "dram" if setup.device == "cuda" else "nvme"
        """The tier that states leave the device for; without a GPU, host memory is the device's."""
        self._roughly: dict[tuple[object, ...], Candidate] = {}
        self._found: dict[tuple[object, ...], Candidate] = {}
        self._orders: dict[tuple[object, ...], list[Recompute]] = {}
        """What may be recomputed, by stage and batch."""
        self._refused: list[UserError] = []
        self._checks = Checks(model, limits, self._amounts, self._weigh_roughly, places, self._with_spilled, steps)
        self._best = float("inf")
        """The fewest seconds of a candidate that fits."""

    def choice(self, shown: int) -> Choice:
        """Return the choice, with so many of its kinds as are to be shown."""
        if not self._found:
            raise self._refused[0] if self._refused else UserError("there is nothing to choose from")
        fitting = self._checked(shown)
        nearest = fitting[0] if fitting else None
        if not fitting:  # rough plans may be too high
            near = sorted(self._found.values(), key=lambda each: sum(each.over.values()))[:NEAR]
            fitting, nearest = self._exactly(each.setup for each in near)
        return self._choice(fitting, nearest)

    @property
    def beyond(self) -> int:
        """The most bytes by which an exact plan was above its rough one."""
        return self._checks.beyond

    def last_resort(self, choice: Choice, setups: Sequence[Setup], offload: Placement | None) -> Choice:
        """Return a choice among the setups that need least memory; `choice`, which has none, if none of them fits."""
        tried = []
        for setup in setups:
            for each in lightest_setups(setup, (setup.stage,), offload):
                with contextlib.suppress(UserError):  # the search has said why
                    if may_fit(self._model, each, self._checks.limits):
                        tried.append(each)
        fitting, nearest = self._exactly(tried)
        return self._choice(fitting, nearest) if fitting else choice

    def _exactly(self, setups: Iterable[Setup]) -> tuple[list[Candidate], Candidate | None]:
        """Return the setups that fit by exact plans, best first, and that which exceeds the machine least."""
        exact = sorted((self._checks.exact(each) for each in setups), key=lambda each: sum(each.over.values()))
        fitting = sorted((self._checks.finished(each) for each in exact if each.fits), key=_rank)
        return fitting, exact[0] if exact else None

    def _choice(self, fitting: list[Candidate], nearest: Candidate | None) -> Choice:
        """Return the choice on the machine without margins."""
        without_margins = tuple(each.on(self._hardware) for each in fitting)
        return Choice(without_margins, nearest.on(self._hardware) if nearest else None, len(self._found))

    def _checked(self, shown: int) -> list[Candidate]:
        """Return the fastest that fit by exact plans, best first, one of each kind; after `FEW` plans, only two."""
        waiting = [(_rank(each), number, False, each) for number, each in enumerate(self._found.values()) if each.fits]
        heapq.heapify(waiting)
        fitting: dict[tuple[object, ...], Candidate] = {}
        while waiting and len(fitting) < (shown if self._checks.number < FEW else min(shown, 2)):
            rank, number, exact, candidate = heapq.heappop(waiting)
            kind = kind_of(candidate.setup)
            if exact:
                fitting.setdefault(kind, candidate)
            elif kind not in fitting and (likely := self._checks.corrected(candidate)) is not None:
                if _rank(likely) > rank:  # by what exact plans of others have shown; another may come first now
                    heapq.heappush(waiting, (_rank(likely), number, False, likely))
                elif (found := self._checks.fitted(likely)) is not None:
                    heapq.heappush(waiting, (_rank(found), number, True, found))
        return list(fitting.values())

    def stage(self, setup: Setup, offload: Placement | None) -> None:
        """Try the setup's stage and batch with all amounts of recomputation that are worth it."""
        order = self._amounts(setup)
        if self._found and not self._may_fit(replace(setup, recompute=order[-1]), offload):
            return  # the first one is searched in any case, for the nearest if nothing fits
        tried: dict[int, float] = {}

        def attempt(at: int) -> None:
            if 0 <= at < len(order) and at not in tried:
                tried[at] = self._place(replace(setup, recompute=order[at]), offload)

        step = max(1, len(order) // LEVELS)
        for at in (*range(0, len(order), step), len(order) - 1):
            attempt(at)
        while step > max(1, len(order) // FINEST):
            best = min(tried, key=lambda at: tried[at])
            step //= 2
            attempt(best - step)
            attempt(best + step)

    def _may_fit(self, setup: Setup, offload: Placement | None) -> bool:
        """Whether a device may have room for a stage that recomputes all it may, with all off the device that may be.

        A stage that cannot fit has no other candidate than this one.
        """
        away = (Share(self._off),)
        kinds = [kind for kind in ORDERS[0] if getattr(setup.zero, kind)]
        kinds += [ACTIVATIONS] if setup.recomputed.count else []
        least = Placement(dict.fromkeys(kinds, away)) if offload is None else offload
        try:
            found = self._weigh_roughly(replace(setup, offload=least))
        except UserError:  # the search says why
            return True
        if found.over.get(HBM, 0) <= TOO_HIGH * self._limits.gpu_memory:
            return True
        self._weigh(setup, least)
        return False

    def _amounts(self, setup: Setup) -> Sequence[Recompute]:
        """Return what may be recomputed with a stage and a batch, from nothing to all of every block."""
        if self._setup.recompute != AUTO:
            return [self._setup.recomputed]
        layers = self._model.blocks
        if not layers:
            return TREATED_ALIKE if self._model.whole else [NOTHING]
        key = (setup.stage, setup.batch)
        if key not in self._orders:
            self._orders[key] = self._order(setup, layers)
        return self._orders[key]

    def _order(self, setup: Setup, layers: int) -> list[Recompute]:
        """Return the order in which blocks are recomputed: selectively first, unless whole frees more bytes a second.

        That is so where the host is slower than the device: it takes longer for a block that is recomputed selectively.
        """
        ways = (NOTHING, Recompute(0, layers), Recompute(layers))
        try:
            found = [self._weigh_roughly(replace(setup, recompute=each, offload=Placement({}))) for each in ways]
        except UserError:  # the search says why
            return choices(layers)
        kept, partly, whole = found
        freed = [needed_by(kept.plan) - needed_by(each.plan) for each in (partly, whole)]
        taken = [each.cost - kept.cost for each in (partly, whole)]
        return choices(layers) if taken[0] * freed[1] <= taken[1] * freed[0] else whole_choices(layers)

    def _place(self, setup: Setup, offload: Placement | None) -> float:
        """Try the placements of a setup until one fits; return the fewest seconds found, infinity if none fits."""
        seconds = [float("inf")]
        if offload is not None:
            found = self._weigh(setup, offload)
            return found.cost if found is not None and found.fits else seconds[0]
        resting = ((), (Share(self._off),)) if setup.recomputed.count else ((),)
        orders = ORDERS if setup.zero.parameters else ORDERS[:1]
        for checkpoints, order in itertools.product(resting, orders):
            for placement in self._placements(setup, checkpoints, order):
                found = self._weigh(setup, placement)
                if found is not None and found.fits:
                    seconds.append(found.cost)
                    self._best = min(self._best, found.cost)
                    break
                if found is not None and found.cost > self._best * (1 + TIE):  # what leaves the device takes more time
                    break
        return min(seconds)

    def _placements(self, setup: Setup, checkpoints: tuple[Share, ...], order: tuple[str, ...]) -> Iterator[Placement]:
        """Yield placements from those that keep most on the device to those that keep least."""
        shares = {ACTIVATIONS: checkpoints} if checkpoints else {}
        yield Placement(shares)
        for kind in (kind for kind in order if getattr(setup.zero, kind)):
            whole = Placement(shares | {kind: (Share(self._off),)})
            without = self._weigh(setup, whole)
            if without is not None and HBM not in without.over:
                yield from self._with_budget(setup, whole, kind, without)
            shares[kind] = (Share(self._off),)
        if "parameters" in shares and self._off == "dram":
            yield self._spilled(setup, Placement(shares | {"parameters": (Share("nvme"),)}))

    def _with_budget(self, setup: Setup, whole: Placement, kind: str, without: Candidate) -> Iterator[Placement]:
        """Yield the placement that keeps as much of a kind on the device as fits beside the rest."""
        room = self._limits.gpu_memory - without.plan.needed(HBM)
        for _ in range(4):
            budget = rounded(room)
            if budget <= 0:
                break
            placement = Placement({**whole.shares, kind: (Share(HBM, budget), Share(self._off))})
            found = self._weigh(setup, self._spilled(setup, placement))
            if found is None:
                break
            if found.fits:
                yield found.setup.offload
                return
            room = budget - max(GRAIN, found.over.get(HBM, 0))
        yield self._spilled(setup, whole)

    def _spilled(self, setup: Setup, placement: Placement) -> Placement:
        """Return the placement with optimizer states on disks as far as host memory cannot hold them."""
        shares = placement.shares.get("optimizer")
        found = self._weigh(setup, placement)
        if not shares or found is None or self._off != "dram" or "dram" not in found.over:
            return placement
        there = found.plan.of("optimizer_states", "dram")
        near = tuple(share for share in shares if share.tier == HBM)
        over = found.over["dram"]
        for _ in range(3):
            budget = rounded(there - over)
            middle = (Share("dram", budget),) if budget > 0 else ()
            spilled = Placement({**placement.shares, "optimizer": (*near, *middle, Share("nvme"))})
            found = self._weigh(setup, spilled)
            if found is None or "dram" not in found.over or not middle:
                return spilled
            over += max(GRAIN, found.over["dram"])
        return spilled

    def _with_spilled(self, setup: Setup) -> Setup:
        return replace(setup, offload=self._spilled(setup, setup.offload))

    def _weigh_roughly(self, setup: Setup) -> Candidate:
        key = key_of(setup, setup.offload)
        if key not in self._roughly:
            self._roughly[key] = judge(self._model, self._model.quick_plan(setup), self._limits)
        return self._roughly[key]

    def _weigh(self, setup: Setup, placement: Placement) -> Candidate | None:
        """Return the candidate of a placement; None if the setup does not allow it."""
        key = key_of(setup, placement)
        if key not in self._found:
            try:
                self._found[key] = self._weigh_roughly(replace(setup, offload=placement))
            except UserError as error:
                self._refused.append(error)
                return None
        return self._found[key]


def _rank(candidate: Candidate) -> tuple[int, int, int]:
    """Return the order of candidates: by seconds, and of about equal ones the roomier first."""
    return round(math.log(max(candidate.cost, 1e-9)) / TIE), candidate.plan.needed(HBM), candidate.plan.needed("dram")
