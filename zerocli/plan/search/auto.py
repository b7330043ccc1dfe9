"""`--auto`: the fastest run of a model that fits a machine, over stages, placements with budgets, and recomputation.

For each stage and number of recomputed blocks, states leave the device in a fixed order until the rest fits: optimizer
states, then gradients and parameters (or these first), and of the last kind that leaves only as much as must. Optimizer
states free most bytes for each byte that crosses the host link: they are 10 to 12 bytes per parameter and cross it
twice in a step, parameters are 2 and cross it four times. What host memory cannot hold of them goes to disks.

Quick plans (`Model.quick_plan`) find these candidates. Their seconds are exact, as these do not depend on the device's
peak; what they guess is the allocator's fragmentation. So candidates are then taken from the fastest on, and the first
that fits by its exact plan is the choice. One that does not fit is replaced by one that needs less. The placements of a
table (`search.PLACEMENTS`) with nothing, all blocks selectively or all blocks whole recomputed are candidates too, and
none of them that may fit is passed over: no choice is slower than a plain placement that fits.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.placement import ACTIVATIONS, HBM, Placement, Share
from zerocli.config import AUTO
from zerocli.errors import UserError
from zerocli.layout.recompute import NOTHING, Recompute
from zerocli.plan.models.model import TREATED_ALIKE, Model
from zerocli.plan.search.candidates import Candidate, judge, lightest_setups, may_fit, setups, weigh
from zerocli.plan.search.recompute import MARGIN, choices, needed_by
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import Hardware

HOST_MARGIN = 0.05
"""Share of host memory and disk space that a choice leaves free."""
SAME_SECONDS = 5e-4
"""Of choices whose estimates differ by less than this share, the one that leaves most device memory free is taken."""
LEVELS, FINEST = 6, 64
"""Amounts of recomputation are first tried at this many steps, then between the best and its neighbours, down to steps
of one part in this many."""
ENOUGH_EXACT_PLANS = 12
"""After this many exact plans, the fastest two are enough for a table of the best."""
MAX_CHANGES = 3
"""How often a candidate is changed until its exact plan fits."""
MIN_GAIN = 0.02
"""A placement with budgets is shown if it is faster than the others by more than this share."""
NUM_NEAREST = 6
"""Where nothing fits, this many that exceed the machine least are planned exactly."""
ORDERS = (("optimizer", "gradients", "parameters"), ("optimizer", "parameters", "gradients"))
"""Kinds of states in the orders in which they leave the device."""
BUDGET_STEP, LARGE_BUDGET_STEP, LARGE_BUDGET = 64 << 20, 1 << 30, 100 << 30
"""Budgets are multiples of the first many bytes, or of the second from the third on."""
COMPILING = 15.0
"""Seconds that compiling the blocks takes at most (measured on an H200: 3 to 12)."""
Key = tuple[object, ...]


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
        kinds = [kind_of(each.setup) for each in self.fitting]
        return next((each for kind, each in zip(kinds, self.fitting, strict=True) if kind != kinds[0]), None)


def choose(
    model: Model,
    setup: Setup,
    hardware: Hardware,
    stages: Sequence[int],
    offload: Placement | None = None,
    batches: Sequence[int] = (),
    steps: int = 0,
    shown: int = 4,
    groups: Sequence[tuple[int, str]] = (),
) -> Choice:
    """Return the choice for a model; `offload`, and a `setup.recompute` other than `auto`, are kept as they are.

    `batches` are micro-batches to choose from: with each, as many are accumulated as give the setup's step. `groups`
    are groups of ranks to choose from (`shard_ranks`, `shard_states`). `steps` is the length of a run whose blocks are
    compiled if that pays for itself; 0: they are as the setup says. `shown` is the number of different choices that are
    wanted.
    """

    def searched(setup: Setup, steps: int) -> Choice:
        whole = setup.batch * setup.accumulate
        search = _Search(model, setup, hardware, offload is None, steps)
        asked = groups or [(setup.shard_ranks, setup.shard_states)]
        for (group, states), size in itertools.product(asked, batches or (setup.batch,)):
            tried = replace(setup, batch=size, accumulate=whole // size, shard_ranks=group, shard_states=states)
            for stage in sorted(stages, reverse=True):  # the last one is the likeliest to fit
                search.stage(replace(tried, stage=stage), offload)
        return search.choice(shown)

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
    if found is None or (best is not None and best.cost <= found.cost * (1 + MIN_GAIN)):
        return []
    return [found]


def with_margins(hardware: Hardware) -> Hardware:
    """Return the machine without what a choice leaves free."""
    return hardware.leaving(gpu_memory=MARGIN, host_memory=HOST_MARGIN, nvme_space=HOST_MARGIN)


class _Search:
    """Collects the candidates of one model on one machine."""

    def __init__(self, model: Model, setup: Setup, hardware: Hardware, places: bool, steps: int) -> None:
        """Take `places` to choose placements too, and the `steps` of a run that may be compiled."""
        self._model, self._setup, self._hardware = model, setup, hardware
        self._places, self._steps = places, steps
        self._limits = with_margins(hardware)
        self._off = "dram" if setup.device == "cuda" else "nvme"
        """The tier that states leave the device for; without a GPU, host memory is the device's."""
        self._quick: dict[Key, Candidate] = {}
        """All candidates that were planned, by quick plans."""
        self._found: dict[Key, Candidate] = {}
        """Those of them that may be chosen."""
        self._exact: dict[Key, Candidate] = {}
        self._plain: dict[Key, Candidate] = {}
        """Plain placements that may fit: each is planned exactly before a slower candidate is chosen."""
        self._underestimates: defaultdict[Key, int] = defaultdict(int)
        """By how much exact plans were above quick ones, by what `_alike` returns."""
        self._refused: list[UserError] = []
        self._best = float("inf")
        """The fewest seconds of a candidate that fits."""

    def choice(self, shown: int) -> Choice:
        """Return the choice on the machine without margins, with as many of its kinds as are to be shown."""
        if not self._found:
            raise self._refused[0]
        fitting = self._checked(shown)
        if not fitting:
            for each in sorted(self._found.values(), key=Candidate.excess)[:NUM_NEAREST]:
                self._exactly(each.setup)
            fitting = sorted(map(self._finished, (each for each in self._exact.values() if each.fits)), key=_rank)
        nearest = fitting[0] if fitting else min(self._exact.values(), key=Candidate.excess)
        without_margins = tuple(replace(each, hardware=self._hardware) for each in fitting)
        return Choice(without_margins, replace(nearest, hardware=self._hardware), len(self._found))

    def _checked(self, shown: int) -> list[Candidate]:
        """Return the fastest that fit by exact plans, best first, one of each kind.

        After `ENOUGH_EXACT_PLANS` only two are looked for."""
        waiting: list[tuple[tuple[int, int, int], int, int, Candidate]] = []
        numbers = itertools.count()
        fitting: dict[Key, Candidate] = {}
        checked: set[Key] = set()

        def wait(candidate: Candidate, changes: int) -> None:
            heapq.heappush(waiting, (_rank(candidate), next(numbers), changes, candidate))

        found = {key: each for key, each in self._found.items() if each.fits} | self._plain
        for each in found.values():
            wait(each, 0)
        while waiting and len(fitting) < (shown if len(self._exact) < ENOUGH_EXACT_PLANS else min(shown, 2)):
            _, _, changes, candidate = heapq.heappop(waiting)
            kind, key = kind_of(candidate.setup), key_of(candidate.setup, candidate.setup.offload)
            if changes < 0:
                fitting.setdefault(kind, candidate)
                continue
            if kind in fitting or key in checked:
                continue
            checked.add(key)
            if key in self._plain or self._excess(candidate.setup, self._underestimates[_alike(candidate.setup)]) <= 0:
                exact = self._exactly(candidate.setup)
                if exact.fits:
                    wait(self._finished(exact), -1)
                    continue
                changes += 1
            if changes <= MAX_CHANGES:
                for less in self._lighter(candidate.setup):
                    wait(less, changes)
        return list(fitting.values())

    def _exactly(self, setup: Setup) -> Candidate:
        """Return the candidate of a setup by its exact plan, and remember how far the quick one was off."""
        key, alike = key_of(setup, setup.offload), _alike(setup)
        if key not in self._exact:
            self._exact[key] = weigh(self._model, setup, self._limits)
            underestimate = needed_by(self._exact[key].plan) - needed_by(self._weigh_quickly(setup).plan)
            self._underestimates[alike] = max(self._underestimates[alike], underestimate)
        return self._exact[key]

    def _excess(self, setup: Setup, underestimate: int) -> int:
        """Return by how much a setup exceeds the device if its quick plan is too low by `underestimate` bytes."""
        return needed_by(self._weigh_quickly(setup).plan) + underestimate - self._limits.gpu_memory

    def _lighter(self, setup: Setup) -> Iterator[Candidate]:
        """Yield candidates that need less, as the quick plan of this one is too low.

        With a budget that is smaller. Without one, with more recomputation, or with a further kind of states off the
        device.
        """
        underestimate = self._underestimates[_alike(setup)]
        missing = self._excess(setup, underestimate)
        if missing <= 0:
            return
        if self._places and (smaller := with_less(setup, missing)) is not None:
            yield self._weigh_quickly(replace(smaller, offload=self._spilled(smaller, smaller.offload)))
            return
        order = self._amounts(setup)
        if setup.recomputed in order:
            low, high = order.index(setup.recomputed), len(order)
            while high - low > 1:
                middle = (low + high) // 2
                over = self._excess(replace(setup, recompute=order[middle]), underestimate) > 0
                low, high = (middle, high) if over else (low, middle)
            if high < len(order):
                yield self._weigh_quickly(replace(setup, recompute=order[high]))
        if self._places:
            yield from self._with_more_off(setup, underestimate)

    def _with_more_off(self, setup: Setup, underestimate: int) -> Iterator[Candidate]:
        """Yield candidates with a further kind of states off the device, as much of it as must be."""
        shares, away = setup.offload.shares, (Share(self._off),)
        left = [[kind for kind in order if kind not in shares and getattr(setup.zero, kind)] for order in ORDERS]
        for kind in dict.fromkeys(kinds[0] for kinds in left if kinds):
            whole = replace(setup, offload=Placement({**shares, kind: away}))
            budget = rounded(-self._excess(whole, underestimate))
            kept = (Share(HBM, budget),) if budget > 0 else ()
            placement = self._spilled(whole, Placement({**shares, kind: (*kept, *away)}))
            found = self._weigh(whole, placement)
            if found is not None and found.fits:
                yield found

    def _finished(self, candidate: Candidate) -> Candidate:
        """Return a candidate that fits, compiled if that pays."""
        if not self._steps or not self._model.whole:
            return candidate
        plan = replace(candidate.plan, setup=replace(candidate.setup, compiled=True))  # they need no more memory
        compiled = judge(self._model, plan, self._limits)
        return compiled if (candidate.cost - compiled.cost) * self._steps > COMPILING else candidate

    def stage(self, setup: Setup, offload: Placement | None) -> None:
        """Try the setup's stage and batch with all amounts of recomputation that are worth it."""
        order = self._amounts(setup)
        if self._found and not self._may_fit(replace(setup, recompute=order[-1]), offload):
            return  # the first one is searched in any case, for the nearest if nothing fits
        tried: dict[int, float] = {}

        def attempt(at: int) -> None:
            if 0 <= at < len(order) and at not in tried:
                tried[at] = self._place(replace(setup, recompute=order[at]), offload)

        self._place_plainly(setup, order, offload)
        step = max(1, len(order) // LEVELS)
        for at in (*range(0, len(order), step), len(order) - 1):
            attempt(at)
        while step > max(1, len(order) // FINEST):
            best = min(tried, key=lambda at: tried[at])
            step //= 2
            attempt(best - step)
            attempt(best + step)

    def _place_plainly(self, setup: Setup, order: Sequence[Recompute], offload: Placement | None) -> None:
        """Find the plain placements of a stage that may fit, with every block kept, selective or whole."""
        layers = self._model.blocks
        alike = (NOTHING, Recompute(0, layers), Recompute(layers)) if layers else TREATED_ALIKE
        ways = alike if len(order) > 1 else order
        tried = [each for way in ways for each in setups(replace(setup, recompute=way), (setup.stage,), offload)]
        tried += lightest_setups(replace(setup, recompute=order[-1]), (setup.stage,), offload)
        for each in tried:
            near = {share.tier for shares in each.offload.shares.values() for share in shares}
            if offload is None and self._off != "dram" and (near or each.offload.policy) and near != {"nvme"}:
                continue  # without a GPU, host memory is the device's
            found = self._weigh(each, each.offload)
            if found is not None and may_fit(found):
                self._plain[key_of(each, each.offload)] = found

    def _may_fit(self, setup: Setup, offload: Placement | None) -> bool:
        """Whether a device may have room for a stage that recomputes all it may, with all off the device that may be.

        A stage that cannot fit has no other candidate than this one.
        """
        away = (Share(self._off),)
        kinds = [kind for kind in ORDERS[0] if getattr(setup.zero, kind)]
        kinds += [ACTIVATIONS] if setup.recomputed.count else []
        least = Placement(dict.fromkeys(kinds, away)) if offload is None else offload
        try:
            found = self._weigh_quickly(replace(setup, offload=least))
        except UserError:  # the search says why
            return True
        if may_fit(found, (HBM,)):
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
        # Blocks are recomputed selectively first, unless whole frees more bytes a second. That is so where the host is
        # slower than the device: it takes longer for a block that is recomputed selectively.
        ways = (NOTHING, Recompute(0, layers), Recompute(layers))
        try:
            found = [self._weigh_quickly(replace(setup, recompute=each, offload=Placement({}))) for each in ways]
        except UserError:  # the search says why
            return choices(layers)
        kept, partly, whole = found
        freed = [needed_by(kept.plan) - needed_by(each.plan) for each in (partly, whole)]
        taken = [each.cost - kept.cost for each in (partly, whole)]
        selectively = taken[0] * freed[1] <= taken[1] * freed[0]
        return choices(layers) if selectively else [Recompute(count) for count in range(layers + 1)]

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
                # What leaves the device takes more time.
                if found is not None and found.cost > self._best * (1 + SAME_SECONDS):
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
            room = budget - max(BUDGET_STEP, found.over.get(HBM, 0))
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
            over += max(BUDGET_STEP, found.over["dram"])
        return spilled

    def _weigh_quickly(self, setup: Setup) -> Candidate:
        key = key_of(setup, setup.offload)
        if key not in self._quick:
            self._quick[key] = judge(self._model, self._model.quick_plan(setup), self._limits)
        return self._quick[key]

    def _weigh(self, setup: Setup, placement: Placement) -> Candidate | None:
        """Return the candidate of a placement; None if the setup does not allow it."""
        key = key_of(setup, placement)
        if key not in self._found:
            try:
                self._found[key] = self._weigh_quickly(replace(setup, offload=placement))
            except UserError as error:
                self._refused.append(error)
                return None
        return self._found[key]


def _rank(candidate: Candidate) -> tuple[int, int, int]:
    """Return the order of candidates: by seconds, and of about equal ones the roomier first."""
    plan, seconds = candidate.plan, max(candidate.cost, 1e-9)
    return round(math.log(seconds) / SAME_SECONDS), plan.needed(HBM), plan.needed("dram")


def kind_of(setup: Setup) -> Key:
    """Return what distinguishes two choices other than numbers: stage, group, tiers of each kind, if it recomputes."""
    tiers = tuple(
        (kind, tuple(share.tier for share in shares)) for kind, shares in sorted(setup.offload.shares.items())
    )
    recompute = setup.recomputed
    recomputes = bool(recompute.whole), bool(recompute.selective)
    return setup.stage, setup.batch, setup.group, setup.copies, setup.offload.policy, tiers, recomputes


def _alike(setup: Setup) -> Key:
    """Return what decides how far a quick plan is off: the fragmentation that tiers and recomputed blocks cause."""
    return *kind_of(setup), setup.recompute


def key_of(setup: Setup, placement: Placement) -> Key:
    """Return what two candidates of a search differ in."""
    return setup.stage, setup.batch, setup.group, setup.copies, str(placement), setup.recompute


def rounded(nbytes: int) -> int:
    """Return the largest budget of at most `nbytes`."""
    step = LARGE_BUDGET_STEP if nbytes >= LARGE_BUDGET else BUDGET_STEP
    return nbytes // step * step


def with_less(setup: Setup, nbytes: int) -> Setup | None:
    """Return the setup with `nbytes` less in a budget of the device; None without such a budget."""
    for kind, shares in setup.offload.shares.items():
        first = shares[0]
        if first.tier == HBM and first.budget is not None:
            left = rounded(first.budget - nbytes)
            kept = (Share(HBM, left),) if left > 0 else ()
            return replace(setup, offload=Placement({**setup.offload.shares, kind: (*kept, *shares[1:])}))
    return None
