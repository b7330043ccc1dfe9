"""Adapting in a run: what its steps measure, one decision for all ranks, and the move between two steps.

Ranks gather what each measured after every step, so that all of them watch the same numbers and find a difference from
the plan after the same step. Only then rank 0 plans again and the others take its choice.
`zerocli.plan.search.adapt` has the decision itself.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.placement import HBM
from tiers.base import Block
from tiers.events import NOTHING, Scope
from tiers.transfer import Transfer
from zerocli import machine
from zerocli.config import read_placement, to_dict
from zerocli.console import say
from zerocli.engine.agreement import is_out_of_memory
from zerocli.engine.events import Events
from zerocli.engine.streams import TimedEvent
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout.recompute import Recompute, read_recompute
from zerocli.layout.sizes import format_seconds
from zerocli.plan.models.model import Model
from zerocli.plan.search import adapt
from zerocli.plan.search.adapt import LINKS, WINDOW, Measured, StepWindows, name_of
from zerocli.plan.search.candidates import weigh
from zerocli.plan.search.recompute import MARGIN, needed_by
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import Hardware
from zerocli.profile.clock import length, union
from zerocli.ranks.exchange import gather_json
from zerocli.regular_files import write_text
from zerocli.run.automatic import FILE, Chosen
from zerocli.run.recompute import device_room

if TYPE_CHECKING:
    from zerocli.run.steps import Run

EARLY = 3
"""In the first steps, the memory of the device has not shown yet that it suffices."""


class LinkTimes(Events):
    """Measures for how long each link of a rank has a transfer under way."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.Lock()
        self._spans: dict[str, list[tuple[float, float]]] = {name: [] for name in LINKS}
        self._copies: deque[tuple[TimedEvent, TimedEvent]] = deque(maxlen=1 << 14)
        """Copies between host and GPU, each with the events before and after it on its stream."""
        self.on = True
        """Whether transfers are timed."""

    def transfer(self, block: Block, transfer: Transfer, writes: bool, began: float) -> None:
        name = {"nvme": "nvme", "dram": "pcie" if self._device.type == "cpu" else ""}.get(block.tier.name, "")
        if not (self.on and name):
            return
        requested = time.perf_counter()  # a tier may keep the caller waiting until now

        def ended(_: object = None) -> None:
            with self._lock:
                self._spans[name].append((began, max(requested, time.perf_counter())))

        if transfer.future is not None and not transfer.done:
            transfer.future.add_done_callback(ended)
        else:
            ended()

    def copy(self, direction: str, nbytes: int) -> Scope:
        return self._copy() if self.on else NOTHING

    @contextmanager
    def _copy(self) -> Iterator[None]:
        before = TimedEvent(self._device)
        yield
        self._copies.append((before, TimedEvent(self._device)))

    def take(self) -> list[float]:
        """Return the seconds of each link since the last call, of what has ended; never waits for the device."""
        with self._lock:
            spans, self._spans = self._spans, {name: [] for name in LINKS}
        if self._copies:
            first = self._copies[0][0]
            while self._copies and self._copies[0][1].done:
                before, after = self._copies.popleft()
                spans["pcie"].append((before.since(first), after.since(first)))
        return [length(union(spans[name])) for name in LINKS]


@dataclasses.dataclass(frozen=True)
class Change:
    """What a run changes to, and why."""

    offload: str
    policy: str
    reason: str
    """What was measured."""
    expected: str
    seconds: float
    """Expected, of a step."""
    cost: float
    """Estimated seconds of the change."""

    @classmethod
    def to(cls, setup: Setup, *about: Any) -> Change:
        return cls(str(setup.offload), setup.recomputed.policy, *about)


class PlacementAdapter:
    """Watches one rank of a run, and moves its states when all ranks do; every rank makes one."""

    def __init__(self, run: Run, chosen: Chosen, setup: Setup, recompute: bool) -> None:
        """Take the run, what its choice was made from, its setup, and whether what is recomputed may change."""
        assert chosen.hardware is not None and chosen.model is not None
        self._run, self._engine, self._document = run, run.engine, dict(chosen.document)
        self._model: Model = chosen.model
        self._setup, self._hardware, self._recompute = setup, chosen.hardware, recompute
        self._links = LinkTimes(run.engine.device)
        run.engine.events.add(self._links)
        candidate = weigh(self._model, setup, self._hardware)
        self._windows = StepWindows(adapt.planned_steps(candidate, self._model, self._hardware))
        self._rooms: list[int] = []
        self._most = 0
        """Bytes of the device that a placement may need after an allocation has failed; 0: all."""
        self._left: dict[str, float] = {}
        """What steps took at placements that the run has left, by what `adapt.like` returns."""
        self._count = 0
        self.disturbed = self._saving = False
        """Whether something else ran between steps: the step does not count."""
        self._failed = False
        self.before: dict[int, str] = {}
        """What the run changed to before a step, and why, until its line is written."""
        self.is_saving: Callable[[], bool] = lambda: False

    # -- measuring -------------------------------------------------------------------------------------------------

    def shares(self) -> list[float]:
        """Return this rank's part of what is measured, for all ranks; zeros where a step does not count.

        Seconds are of the last step whose line is there, as the device may still be in the one after it.
        """
        busy, lines = self._links.take(), self._run.lines
        if self._count % WINDOW == 0:
            self._rooms = list(self._rooms_here().values())
        self._count += 1
        saving, self._saving = self._saving, self.is_saving()  # a save that lasts: it reads the tiers too
        counts, self.disturbed = not (self.disturbed or (saving and self._saving)), False
        if not lines or not counts:
            return [0.0] * (2 + len(LINKS) + len(self._rooms))
        seconds = lines[-1].seconds - lines[-1].wait["data"]
        waits = sum(each for cause, each in lines[-1].wait.items() if cause != "data")
        return [seconds, max(0.0, seconds - waits), *busy, *map(float, self._rooms)]

    def _rooms_here(self) -> dict[str, int]:
        """Return the bytes of each watched tier that are free or the run's own."""
        engine, setup = self._engine, self._setup
        cap, ranks = self._run.config.train.gpu_memory, setup.local_ranks
        if setup.device == "cuda":
            rooms = {HBM: device_room(cap, setup)}
            rooms["dram"] = machine.memory().available + ranks * engine.tiers.footprint().get("dram", 0)
        else:
            own = sum(engine.memory().values())
            rooms = {HBM: machine.memory().available // ranks + own}
            rooms[HBM] = min(rooms[HBM], cap) if cap else rooms[HBM]
        rooms[HBM] = min(rooms[HBM], self._most) if self._most else rooms[HBM]
        disks = {machine.file_system(path): machine.disk(path)[1] for path in engine.settings.nvme_path}
        own = sum(tier.file_nbytes for tier in engine.tiers.opened())
        return {**rooms, "nvme": sum(disks.values()) + ranks * own if disks else 0}

    def observe(self, step: int, everyone: Sequence[Sequence[float]]) -> str:
        """Take what all ranks measured; return why to plan again after this step, "" if there is no reason."""
        if self._failed or not everyone or any(row[0] == 0.0 for row in everyone):
            return ""
        columns = list(zip(*everyone, strict=True))
        slowest, least = [max(each) for each in columns[: 2 + len(LINKS)]], [min(each) for each in columns]
        tiers = adapt.rooms_of(self._hardware, self._setup)
        rooms = dict(zip(tiers, map(int, least[2 + len(LINKS) :]), strict=True))
        busy = dict(zip(LINKS, slowest[2:], strict=True)) if self._links.on else {}
        reason = self._windows.add(step, Measured(slowest[0], slowest[1], busy, rooms))
        self._links.on = self._windows.times_links
        return reason

    # -- deciding --------------------------------------------------------------------------------------------------

    def plan_again(self, step: int, steps: int, reason: str) -> Change | None:
        """Return what to change to after a step, with `steps` left; None to stay. Collective."""
        told = self._as_first(lambda: self._plan(steps, reason))
        if "failed" in told:
            self._failed = True
            self._run.tell(f"note: the run goes on as it is, as it could not be planned again: {told['failed']}")
            return None
        self._hardware = Hardware(**told["hardware"])
        if "change" not in told:
            self._windows.keep(step)
            return None
        self._left[adapt.like(self._setup)] = self._windows.window.seconds
        self._windows.change(step, Measured(**told["planned"]))
        return Change(**told["change"])

    def _plan(self, steps: int, reason: str) -> dict[str, Any]:
        about = (self._model, self._setup, self._hardware, self._windows.window, steps, self._recompute, self._left)
        found = adapt.plan_again(*about)
        planned, decision = found.planned, found.decision
        told = {"planned": dataclasses.asdict(planned), "hardware": dataclasses.asdict(found.hardware)}
        if decision.option is None:
            return told
        change = Change.to(found.setup, reason, decision.reason, planned.seconds, decision.option.cost)
        return told | {"change": dataclasses.asdict(change)}

    def _as_first(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `act` returns on rank 0, on all ranks; {"failed": why} if it fails. Collective."""
        mine: dict[str, Any] = {}
        if self._run.rank == 0:
            try:
                mine = act()
            except Exception as error:  # the other ranks wait for the answer
                mine = {"failed": f"{type(error).__name__}: {error}"}
        told: dict[str, Any] = gather_json(mine, self._engine.gather_control, self._engine.device)[0]
        return told

    # -- changing --------------------------------------------------------------------------------------------------

    def change(self, step: int, change: Change) -> None:
        """Move this rank's states after a step, and say so. Collective."""
        before, began = name_of(self._setup), time.perf_counter()
        recompute = read_recompute(change.policy)
        assert isinstance(recompute, Recompute)
        stays = recompute == self._setup.recomputed
        for line in self._engine.move(change.offload, None if stays else recompute):
            say(f"note: {line}")
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)
        self._engine.meet("the end of a move")  # it is recorded once all ranks have moved
        seconds = time.perf_counter() - began
        self._links.take()
        self._rooms, self._count = list(self._rooms_here().values()), 1
        placement = read_placement(change.offload)
        self._setup = dataclasses.replace(self._setup, offload=placement, recompute=recompute)
        self._left.pop(adapt.like(self._setup), None)
        changed = {"offload.placement": placement, "activations.policy": change.policy}
        self._run.config = self._run.config.with_values(changed)
        line = (
            f"{name_of(self._setup)}, as {change.reason}; {change.expected}; the change took "
            f"{format_seconds(seconds)} ({format_seconds(change.cost)} expected)"
        )
        if self._run.rank == 0:
            self._record(step, before, change, seconds)
        self._run.tell(f"adapted before step {step + 1}: {line}")
        self.before[step + 1] = f"{name_of(self._setup)}, as {change.reason}"

    def _record(self, step: int, before: str, change: Change, seconds: float) -> None:
        """Write the run's config and choice anew, so that a resumed run goes on from here."""
        entry = {"step": step, "from": before, "to": name_of(self._setup), "reason": change.reason}
        entry |= {"expected": change.seconds, "cost": change.cost, "seconds": seconds}
        changes = [*self._document.get("changes", ()), entry]
        self._document |= {"schema": 1, "changes": changes, "measured": dataclasses.asdict(self._hardware)}
        folder = Path(self._run.options.run_dir)
        write_text(folder / "config.json", json.dumps(to_dict(self._run.config), indent=2) + "\n")
        write_text(folder / FILE, json.dumps(self._document, indent=2) + "\n")

    # -- out of memory ---------------------------------------------------------------------------------------------

    def retries(self, step: int) -> bool:
        """Whether a step is run again with less of the device if its memory does not suffice."""
        return step < self._run.first + EARLY

    def attempt(self, step: int, act: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `act` returns, which runs all forwards and backwards of a step.

        If the device's memory does not suffice on some rank, in one of the first steps, the step is run again from the
        same data with a placement that needs less. Nothing that forward changes may have been changed by then.
        """
        while True:
            versions = [buffer._version for buffer in self._engine.model.buffers()]
            try:
                return act()
            except Exception as error:
                unchanged = versions == [buffer._version for buffer in self._engine.model.buffers()]
                if not (is_out_of_memory(error) and unchanged and self._engine.passes.can_give_up):
                    raise
                self._engine.passes.give_up(error)
                fact = str(error).partition("\n")[0].partition(". ")[0]
            self._shrink(step, fact)  # after the frames of the error, which hold memory, are gone

    def _shrink(self, step: int, fact: str) -> None:
        """Move to a placement that needs less of the device; UserError if there is none. Collective."""
        gc.collect()
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()
        room = min(gather_json(self._rooms_here()[HBM], self._engine.gather_control, self._engine.device))

        def smaller() -> dict[str, Any]:
            found = adapt.plan_smaller(self._model, self._setup, self._hardware, room, self._recompute)
            if found is None:
                return {}
            limit = int(needed_by(found.plan) / (1 - MARGIN))
            cost = adapt.moving_seconds(
                weigh(self._model, self._setup, self._hardware).plan, found.plan, self._hardware
            )
            reason = f"memory did not suffice ({fact})"
            change = Change.to(found.setup, reason, "the step is run again", found.cost, cost)
            return {"change": dataclasses.asdict(change), "limit": limit}

        told = self._as_first(smaller)
        if "change" not in told:
            raise UserError(
                f"out of memory in step {step}: {fact}; no placement of stage {self._setup.stage} needs less",
                hint="a smaller --batch, a higher --stage, or more ranks",
                exit_code=DOES_NOT_FIT,
            )
        self._most = told["limit"]
        self.change(step - 1, Change(**told["change"]))
        candidate = weigh(self._model, self._setup, self._hardware)
        self._windows.change(step, adapt.planned_steps(candidate, self._model, self._hardware))
