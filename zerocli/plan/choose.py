"""`--auto`: the fastest run of a model that fits a machine, over stages, placements with budgets, and recomputation.

For each stage and number of recomputed blocks, states leave the device in a fixed order until the rest fits: optimizer
states, then gradients, then parameters, and of the last kind that leaves only as much as must. That order frees most
bytes for each byte that crosses the host link: optimizer states are 10 to 12 bytes per parameter and cross it twice in
a step, parameters are 2 and cross it four times. What host memory cannot hold of the optimizer states goes to disks.
Of these candidates, each checked by its plan, the one with the fewest estimated seconds is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from offload.placement import ACTIVATIONS, HBM, Placement, Share
from zerocli.config import AUTO
from zerocli.errors import UserError
from zerocli.layout.recompute import NOTHING, Recompute
from zerocli.plan.hardware import Hardware
from zerocli.plan.recompute import MARGIN, TRACED, choices
from zerocli.plan.search import Candidate, Model, weigh
from zerocli.plan.setup import Setup
from zerocli.plan.traced import Traced

HOST_MARGIN = 0.05
"""Share of host memory and disk space that a choice leaves free."""
GRAIN, COARSE, LARGE = 64 << 20, 1 << 30, 100 << 30
"""Budgets are multiples of the first many bytes, or of the second from the third on."""
TIE = 5e-4
"""Of choices whose estimates differ by less than this share, the one that leaves most device memory free is taken."""
LEVELS = 8
"""Amounts of recomputation are first tried at so many steps, then between the best and its neighbours."""
KINDS = ("optimizer", "gradients", "parameters")
"""States in the order in which they leave the device."""


@dataclass(frozen=True)
class Choice:
    """The candidates that fit, best first; without any, `nearest` is the one that exceeds the machine least."""

    fitting: tuple[Candidate, ...]
    nearest: Candidate | None

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
) -> Choice:
    """Return the choice for a model; `offload`, and a `setup.recompute` other than `auto`, are kept as they are.

    `batches` are micro-batches to choose from: with each, as many are accumulated as give the setup's step.
    """
    search = _Search(model, setup, _with_margins(hardware), hardware)
    whole = setup.batch * setup.accumulate
    for size in batches or (setup.batch,):
        for stage in stages:
            search.stage(replace(setup, stage=stage, batch=size, accumulate=whole // size), offload)
    return search.choice()


def _with_margins(hardware: Hardware) -> Hardware:
    return replace(
        hardware,
        gpu_memory=int(hardware.gpu_memory * (1 - MARGIN)),
        host_memory=int(hardware.host_memory * (1 - HOST_MARGIN)),
        nvme_space=int(hardware.nvme_space * (1 - HOST_MARGIN)),
    )


def kind_of(setup: Setup) -> tuple[object, ...]:
    """Return what distinguishes two choices other than numbers: stage, tiers of each kind, whether it recomputes."""
    tiers = tuple(
        (kind, tuple(share.tier for share in shares)) for kind, shares in sorted(setup.offload.shares.items())
    )
    recompute = setup.recomputed
    return setup.stage, setup.batch, setup.offload.policy, tiers, bool(recompute.whole), bool(recompute.selective)


class _Search:
    """Collects the candidates of one model on one machine."""

    def __init__(self, model: Model, setup: Setup, limits: Hardware, hardware: Hardware) -> None:
        self._model, self._setup, self._limits, self._hardware = model, setup, limits, hardware
        self._off = "dram" if setup.device == "cuda" else "nvme"
        """The tier that states leave the device for; without a GPU, host memory is the device's."""
        self._found: dict[tuple[object, ...], Candidate] = {}
        self._refused: list[UserError] = []

    def choice(self) -> Choice:
        if not self._found:
            raise self._refused[0] if self._refused else UserError("there is nothing to choose from")
        fitting = sorted((each for each in self._found.values() if each.fits), key=lambda each: each.cost)
        if fitting:  # ties go to the roomier one
            limit = fitting[0].cost * (1 + TIE)
            equal = [each for each in fitting if each.cost <= limit]
            best = min(equal, key=lambda each: (each.plan.needed(HBM), each.plan.needed("dram")))
            fitting = [best, *(each for each in fitting if each is not best)]
        nearest = min(self._found.values(), key=lambda each: sum(each.over.values()))
        return Choice(tuple(map(self._shown, fitting)), self._shown(nearest))

    def _shown(self, candidate: Candidate) -> Candidate:
        """Return the candidate beside what the machine really has, without the margins."""
        rooms = {"hbm": "gpu_memory", "dram": "host_memory", "nvme": "nvme_space"}
        available = {
            tier: getattr(self._hardware, rooms[tier]) if tier in rooms else there
            for tier, there in candidate.available.items()
        }
        return dataclasses.replace(candidate, available=available)

    def stage(self, setup: Setup, offload: Placement | None) -> None:
        """Try the setup's stage and batch with all amounts of recomputation that are worth it."""
        order = self._amounts()
        tried: dict[int, float] = {}

        def attempt(at: int) -> None:
            if 0 <= at < len(order) and at not in tried:
                tried[at] = self._place(replace(setup, recompute=order[at]), offload)

        step = max(1, len(order) // LEVELS)
        for at in (*range(0, len(order), step), len(order) - 1):
            attempt(at)
        while step > 1:
            best = min(tried, key=lambda at: tried[at])
            step //= 2
            attempt(best - step)
            attempt(best + step)

    def _amounts(self) -> list[Recompute]:
        """Return what may be recomputed, from nothing to all of every block."""
        if self._setup.recompute != AUTO:
            return [self._setup.recomputed]
        if isinstance(self._model, int):
            return [NOTHING]
        return list(TRACED) if isinstance(self._model, Traced) else choices(self._model.layers)

    def _place(self, setup: Setup, offload: Placement | None) -> float:
        """Try the placements of a setup until one fits; return the fewest seconds found, infinity if none fits."""
        seconds = [float("inf")]
        if offload is not None:
            found = self._weigh(setup, offload)
            return found.cost if found is not None and found.fits else seconds[0]
        for checkpoints in ((), (Share(self._off),)) if setup.recomputed.count else ((),):
            for placement in self._placements(setup, checkpoints):
                found = self._weigh(setup, placement)
                if found is not None and found.fits:
                    seconds.append(found.cost)
                    break
        return min(seconds)

    def _placements(self, setup: Setup, checkpoints: tuple[Share, ...]) -> Iterator[Placement]:
        """Yield placements from those that keep most on the device to those that keep least."""
        shares = {ACTIVATIONS: checkpoints} if checkpoints else {}
        yield Placement(shares)
        for kind in (kind for kind in KINDS if getattr(setup.zero, kind)):
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
            budget = _rounded(room)
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
            budget = _rounded(there - over)
            middle = (Share("dram", budget),) if budget > 0 else ()
            spilled = Placement({**placement.shares, "optimizer": (*near, *middle, Share("nvme"))})
            found = self._weigh(setup, spilled)
            if found is None or "dram" not in found.over or not middle:
                return spilled
            over += max(GRAIN, found.over["dram"])
        return spilled

    def _weigh(self, setup: Setup, placement: Placement) -> Candidate | None:
        """Return the candidate of a placement; None if the setup does not allow it."""
        key = (setup.stage, setup.batch, str(placement), setup.recompute)
        if key not in self._found:
            try:
                self._found[key] = weigh(self._model, replace(setup, offload=placement), self._limits)
            except UserError as error:
                self._refused.append(error)
                return None
        return self._found[key]


def _rounded(nbytes: int) -> int:
    """Return the largest budget of at most `nbytes`."""
    grain = COARSE if nbytes >= LARGE else GRAIN
    return nbytes // grain * grain
