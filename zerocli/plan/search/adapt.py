"""Adapting: whether a run under way changes where its states are, from what its steps have measured. Needs no torch.

Steps are watched in windows. Where a window differs from the plan by more than `TOLERANCE`, the run is planned again on
a machine with the measured rates: each link is as fast as the seconds in which it had transfers say, and all else as
the seconds of a step without waits. The fastest placement by that plan is taken if it pays for its own cost within
`PAYBACK` steps, and after a change nothing changes for as many steps. So a load that comes and goes costs at most one
change in that time.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from offload.placement import HBM, Placement
from zerocli.config import AUTO
from zerocli.errors import UserError
from zerocli.layout.sizes import format_bytes, format_seconds
from zerocli.plan.models.model import Model
from zerocli.plan.rows import Plan
from zerocli.plan.search.auto import choose, kind_of
from zerocli.plan.search.candidates import Candidate, weigh
from zerocli.plan.search.recompute import needed_by
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import HOST, Hardware
from zerocli.plan.time.seconds import GB

TOLERANCE = 0.15
"""Share by which a window may differ from the plan."""
PAYBACK = 50
"""Steps within which a change must pay for itself, and after which another may follow."""
WINDOW = 5
"""Steps of a window; their medians count."""
SETTLING = 2
"""Steps that do not count at first, and after a change: memory is allocated in them."""
SEARCH_EVERY = 8
"""Steps between two searches at least."""
MIN_GAIN = 0.05
"""Share of a step that a change must save: estimates of two placements are off by about as much."""
MATTERS = 0.05
"""Seconds below this share of a step are not compared."""
SMALLER = 0.9
"""After a failed allocation the next placement needs at most this share of the device memory of the one before."""
LINKS = {"pcie": ("pcie", "the link to host memory"), "nvme": ("disk", "the disk")}
"""By the plan's name of what moves bytes: the rate of the hardware, and words."""
WORDS = {"hbm": "the device has", "dram": "the host has", "nvme": "the disks have"}
UNBOUND = 1e12
"""A rate so high that nothing waits for it."""


@dataclass(frozen=True)
class Measured:
    """One step, or the medians of some: of the slowest rank, and the smallest memory of any."""

    seconds: float
    """Of the step, without waits for data."""
    computing: float
    """Of the step in which compute did not stand still."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Seconds in which a transfer was under way, by the names in `LINKS`; empty where links were not timed."""
    rooms: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the run may use, free ones and its own, by tier."""


def median(steps: Sequence[Measured]) -> Measured:
    """Return the medians of what some steps measured."""
    return Measured(
        statistics.median(each.seconds for each in steps),
        statistics.median(each.computing for each in steps),
        {name: statistics.median(each.busy.get(name, 0.0) for each in steps) for name in LINKS if steps[-1].busy},
        {tier: int(statistics.median(each.rooms[tier] for each in steps)) for tier in steps[0].rooms},
    )


def differences(measured: Measured, planned: Measured) -> Iterator[tuple[float, str]]:
    """Yield (how much, in words) for whatever differs from the plan by more than `TOLERANCE`."""
    now, then = measured.busy, planned.busy
    links = LINKS.items() if now else ()
    rows = [(f"{words} is busy", now.get(name, 0.0), then.get(name, 0.0)) for name, (_, words) in links]
    rows.append(("compute takes", measured.computing, planned.computing))
    rows.append(("a step takes", measured.seconds, planned.seconds))
    for words, took, expected in rows:
        if max(took, expected) > MATTERS * measured.seconds and abs(took - expected) > TOLERANCE * expected:
            difference = abs(took - expected) / measured.seconds
            yield difference, f"{words} {format_seconds(took)}, {format_seconds(expected)} planned"
    for tier, room in measured.rooms.items():
        there = planned.rooms.get(tier, 0)
        if there and abs(room - there) > TOLERANCE * there:
            yield abs(room - there) / there, f"{WORDS[tier]} {format_bytes(room)}, {format_bytes(there)} planned"


class StepWindows:
    """Follows the steps of a run; the same on all ranks, as all give it the same numbers."""

    def __init__(self, planned: Measured) -> None:
        self._planned = planned
        self._steps: list[Measured] = []
        self._skip = SETTLING
        self._searched = self._changed = -PAYBACK
        self.times_links = True
        """Whether links are timed, which takes a GPU's host a hundredth of a step: in the first window, and while steps
        differ from the plan."""

    @property
    def window(self) -> Measured:
        """The medians of the last steps."""
        return median(self._steps)

    def add(self, step: int, measured: Measured) -> str:
        """Add a step; return why the run should be planned again after it, "" if it should not."""
        if self._skip:
            self._skip -= 1
            return ""
        self._steps = [*self._steps[1 - WINDOW :], measured]
        if len(self._steps) < WINDOW or step < max(self._searched + SEARCH_EVERY, self._changed + PAYBACK):
            return ""
        found = max(differences(self.window, self._planned), default=(0.0, ""))
        timed, self.times_links = self.times_links, bool(found[1])
        if found[1] and not timed:  # what the links do is needed to plan again, from the next window on
            self._steps = []
            return ""
        return found[1]

    def keep(self, step: int) -> None:
        """Take what was measured as the plan: nothing better was found."""
        self._searched, self._planned = step, self.window

    def change(self, step: int, planned: Measured) -> None:
        """Begin anew with another placement, and what is planned for it."""
        self._searched = self._changed = step
        self._planned, self._steps, self._skip, self.times_links = planned, [], SETTLING, False


# -- the decision ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A placement that a run could change to."""

    name: str
    seconds: float
    """Estimated, of a step."""
    cost: float = 0.0
    """Seconds that the change takes."""
    measured: float = 0.0
    """What a step took when the run had such a placement before; 0: it had none."""
    fits: bool = True


@dataclass(frozen=True)
class Decision:
    """The option to change to, None to stay; and why."""

    option: Option | None
    reason: str
    seconds: float = 0.0
    """What a step is expected to take."""


def decide(measured: Measured, current: Option, options: Sequence[Option], steps: int) -> Decision:
    """Return what to change to with `steps` left to train: the fastest that pays for its cost, or any if it must be.

    Estimates are scaled to what the current placement was measured to take. A placement that the run has had before is
    expected to take what it took: a change that turned out to be none for the better is undone, and not made again.
    """
    others = [each for each in options if each.fits and each.name != current.name]
    if not others:
        return Decision(None, "nothing else fits" if options else "nothing fits")
    scale = measured.seconds / current.seconds if current.seconds else 1.0
    horizon = min(PAYBACK, steps)

    def expected_of(option: Option) -> float:
        return option.measured or option.seconds * scale

    def saved(option: Option) -> float:
        """Seconds that a change saves within the horizon, less what it costs."""
        return (measured.seconds - expected_of(option)) * horizon - option.cost

    if not current.fits:
        best = min(others, key=expected_of)
        return Decision(best, "it does not fit any more", expected_of(best))
    best = max(others, key=saved)
    expected = expected_of(best)
    if measured.seconds - expected < MIN_GAIN * measured.seconds:
        return Decision(None, f"{best.name} would take {format_seconds(expected)} per step")
    if saved(best) <= 0:
        return Decision(None, f"{best.name} would not pay for its {format_seconds(best.cost)} within {horizon} steps")
    return Decision(best, f"about {format_seconds(expected)} per step expected", expected)


# -- planning again ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replanned:
    """The outcome of planning again: where to, what a step should then measure, and the machine as it is."""

    decision: Decision
    setup: Setup
    planned: Measured
    hardware: Hardware


def planned_steps(candidate: Candidate, model: Model, hardware: Hardware) -> Measured:
    """Return what steps of a candidate should measure on this machine."""
    timed = candidate.estimate
    assert timed is not None
    busy, setup = {name: timed.parts.get(name, 0.0) for name in LINKS}, candidate.setup
    return Measured(timed.seconds, _computing(model, setup, hardware), busy, rooms_of(hardware, setup))


def rooms_of(hardware: Hardware, setup: Setup) -> dict[str, int]:
    """Return the memory that is watched: without a GPU host memory is the device's."""
    tiers = (HBM, "dram", "nvme") if setup.device == "cuda" else (HBM, "nvme")
    return {tier: hardware.room[tier] for tier in tiers}


def _computing(model: Model, setup: Setup, hardware: Hardware) -> float:
    """Return the seconds of a step on this machine if nothing waited for a transfer, a collective or an update."""
    free: dict[str, Any] = {name: UNBOUND for name in ("pcie", "disk", "links", "network", "adam", "adam_beside")}
    found = weigh(model, setup, dataclasses.replace(hardware, **free)).estimate
    assert found is not None
    return found.seconds


def as_measured(model: Model, setup: Setup, hardware: Hardware, measured: Measured) -> Hardware:
    """Return the machine with the rates and the memory that steps of this setup have measured.

    A link without transfers, or that is not planned to have any, keeps its rate.
    """
    timed = weigh(model, setup, hardware).estimate
    assert timed is not None
    changes: dict[str, Any] = {}
    for name, (rate, _) in LINKS.items():
        planned, took = timed.parts.get(name, 0.0), measured.busy.get(name, 0.0)
        if planned > 0 and took > 0:
            changes[rate] = getattr(hardware, rate) * planned / took
    slower = measured.computing / _computing(model, setup, hardware)
    if slower > 0:
        changes |= {name: getattr(hardware, name) / slower for name in ("tflops", "products", "hbm")}
        changes |= {name: getattr(hardware, name) * slower for name in HOST}
    now = dataclasses.replace(hardware, **changes, source="this machine, measured by the run")
    return with_rooms(now, measured.rooms, setup)


def with_rooms(hardware: Hardware, rooms: Mapping[str, int], setup: Setup) -> Hardware:
    fields = {HBM: "gpu_memory", "dram": "host_memory", "nvme": "nvme_space"}
    changes: dict[str, Any] = {fields[tier]: nbytes for tier, nbytes in rooms.items()}
    if setup.device != "cuda" and HBM in rooms:
        changes["host_memory"] = rooms[HBM] * setup.local_ranks
    return dataclasses.replace(hardware, **changes)


def plan_again(
    model: Model,
    setup: Setup,
    hardware: Hardware,
    measured: Measured,
    steps: int,
    recompute: bool,
    before: Mapping[str, float] = MappingProxyType({}),
) -> Replanned:
    """Plan a run's setup again with what it has measured, and decide; `steps` are left to train.

    Stage, batch and where states are updated stay; what is recomputed stays unless `recompute`. `before` are the
    seconds of a step at placements that the run has left, by `like`.
    """
    now = as_measured(model, setup, hardware, measured)
    current = weigh(model, setup, now)
    found = _fitting(model, setup, now, recompute)
    options = {name_of(each.setup): each for each in found}

    def option(candidate: Candidate) -> Option:
        cost = moving_seconds(current.plan, candidate.plan, now)
        known = before.get(like(candidate.setup), 0.0)
        return Option(name_of(candidate.setup), candidate.cost, cost, known, candidate.fits)

    decision = decide(measured, option(current), [option(each) for each in options.values()], steps)
    chosen = current if decision.option is None else options[decision.option.name]
    planned = planned_steps(chosen, model, now)
    if decision.option is not None:
        planned = dataclasses.replace(planned, seconds=decision.seconds)
    return Replanned(decision, chosen.setup, planned, now)


def plan_smaller(model: Model, setup: Setup, hardware: Hardware, room: int, recompute: bool) -> Candidate | None:
    """Return the fastest candidate that needs less of the device than a setup for which memory did not suffice.

    `room` is the device's memory as it is now. None if there is no such candidate.
    """
    limit = min(room, int(needed_by(weigh(model, setup, hardware).plan) * SMALLER))
    found = _fitting(model, setup, with_rooms(hardware, {HBM: limit}, setup), recompute)
    return min(found, key=lambda each: each.cost, default=None)


def _fitting(model: Model, setup: Setup, hardware: Hardware, recompute: bool) -> Sequence[Candidate]:
    """Return the fastest candidates that fit with the margins of `--auto`, one of each kind of placement."""
    free = dataclasses.replace(setup, offload=Placement(), recompute=AUTO if recompute else setup.recompute)
    if setup.device == "cuda":
        free = dataclasses.replace(free, update="cpu" if setup.updates_on_cpu else setup.update)
    try:
        return choose(model, free, hardware, (setup.stage,)).fitting
    except UserError:
        return ()


def like(setup: Setup) -> str:
    """Return what placements that differ only in numbers have in common."""
    return str(kind_of(setup))


def name_of(setup: Setup) -> str:
    """Return a placement and what is recomputed, as flags."""
    offload = f"--offload {setup.offload or 'none'}"
    return f"{offload} --set activations.policy={setup.recomputed.policy}"


def moving_seconds(before: Plan, after: Plan, hardware: Hardware) -> float:
    """Return the seconds of a change: what leaves a tier or comes to it crosses that tier's link once.

    Pieces move one after another, so that nothing overlaps. Gradients are not kept from step to step.
    """
    ranks = before.setup.local_ranks
    rates = {"nvme": hardware.disk * GB / ranks, "dram": hardware.pcie * GB}
    seconds = 0.0
    for kind in ("parameters", "optimizer_states"):
        for tier in {*before.tiers, *after.tiers} - {HBM}:
            moved = abs(after.of(kind, tier) - before.of(kind, tier)) / ranks
            seconds += moved / rates.get(tier, rates["dram"])
    return seconds
