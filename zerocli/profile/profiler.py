"""The profiler: an observer that follows memory in some steps of a run and times the others.

Following an operation often takes longer than the operation itself, so steps are divided. Memory is followed while the
engine is built and in the first two steps (the second is like all later ones). In the others only the clock runs, at
negligible cost. Neither changes any result: operations are the same, in the same order.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zerocli.config import Config
from zerocli.config.options import RunOptions
from zerocli.engine.engine import Engine
from zerocli.plan.time import bench
from zerocli.profile import clock as clocks
from zerocli.profile import places
from zerocli.profile.clock import Clock, Segment, Span
from zerocli.profile.follow import RUNTIME, Follower
from zerocli.profile.ledger import UNATTRIBUTED, Ledger, describe
from zerocli.profile.lines import Line
from zerocli.profile.nvml import process_nbytes
from zerocli.profile.observer import Observer, facts, record
from zerocli.profile.peak_rates import best_links
from zerocli.profile.recorder import EventRecorder
from zerocli.profile.timeline import make_timeline
from zerocli.profile.units import unit_rows

NUM_FOLLOWED = 2
"""Steps in which memory is followed."""
GRANULARITY = {"cuda": 512, "cpu": 1}
"""Granularity of the device's allocator, in bytes."""


class Profiler(Observer):
    """Profiles a run; `told` gets rank 0's document at the end, `follow` says whether memory can be followed."""

    reports = True

    def __init__(
        self, told: Callable[[Config, RunOptions, dict[str, Any]], None] = lambda *_: None, follow: bool = True
    ) -> None:
        self._told, self._follow = told, follow
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.ledger = Ledger(GRANULARITY[self._device.type])
        self._follower = Follower(self.ledger, self._device, self._category, self._unseen)
        self._done = 0
        self._ends: list[int] = []
        """Length of the ledger's log at the end of each step."""
        self._boundaries: list[tuple[str, int, int | None]] = []
        """(moment, index in the ledger's log, bytes of the device's allocator) at the ends of followed phases."""
        self._clock: Clock
        self._recorder: EventRecorder | None = None
        self._engine: Engine
        self._hooks: list[Any] = []
        self._process_nbytes: int | None = None
        """Host memory of the process outside the tiers, after the first step has loaded its libraries."""
        self._lines: list[Line] = []

    # -- watching --------------------------------------------------------------------------------------------------

    def build(self, make: Callable[[], Engine]) -> Engine:
        """Build the engine with its memory followed from the first allocation, and profile it from then on."""
        if self._device.type == "cuda":
            torch.zeros(1, device=self._device)  # creates the context, so that the baseline includes it
            torch.cuda.reset_peak_memory_stats()
        places.forget_rss_peak()
        self._follower.follow(self._follow)
        try:
            engine = make()
        finally:
            self._follower.follow(False)
        self.attach(engine)
        return engine

    def attach(self, engine: Engine) -> None:
        """Profile an engine from its next step on; what it holds already is named."""
        self._engine = engine
        self._follow = self._follow and not engine.hooks.blocks.on  # compiled code allocates memory unseen
        self._clock = Clock(engine.device)
        self._recorder = EventRecorder(engine, self._clock, self._entered, self._inputs, self._stepped)
        for name, parameter in engine.model.named_parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(functools.partial(self._name_gradient, name)))
        self._name_places()
        self._boundary("initialisation")
        self.ledger.moment = clocks.BETWEEN

    def detach(self) -> None:
        """Leave the engine as it was."""
        self._follower.follow(False)
        if self._recorder is not None:
            self._recorder.close()
        for hook in self._hooks:
            hook.remove()

    def _follows(self, step: int) -> bool:
        return self._follow and step <= NUM_FOLLOWED

    @property
    def timed(self) -> list[int]:
        """The steps not affected by following memory; all steps if there are none.

        Metrics are read back one step late, so the step right after a followed one may include some of its time.
        """
        free = [step for step in range(2, self._done + 1) if not self._follows(step)]
        return free[1:] or free or list(range(1, self._done + 1))

    def _category(self) -> str:
        """Return the category of memory that an operation makes now."""
        if self._recorder is not None and self._recorder.in_loss:
            return "logits"
        return "activations" if self.ledger.moment[0] in ("forward", "backward") else "buffers"

    def _unseen(self) -> str:
        """Return the category of memory whose creation was not seen: inside a collective it is gloo's own copy."""
        return RUNTIME if self._recorder is not None and self._recorder.in_collective else UNATTRIBUTED

    def _entered(self, label: tuple[str, str]) -> None:
        before, self.ledger.moment = self.ledger.moment, label
        if label[0] == "forward":  # a step starts here; memory between steps belongs to none
            self._follower.follow(self._follows(self._done + 1))
        if label[0] != before[0] and self._follows(self._done + 1):
            self._name_places()
            self._boundary(before[0])

    def _inputs(self, values: Any) -> None:
        if self._follows(self._done + 1):
            for value in tree_leaves(values):
                if isinstance(value, torch.Tensor):
                    self._follower.name(value, "activations", "batch")

    def _name_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Name a parameter's gradient before it is copied to the bucket: temporary, so a buffer."""
        found = self._follower.find(gradient) if self._follows(self._done + 1) else None
        if found is not None and found.category == "activations":
            found.category, found.name = "buffers", f"{name} gradient"

    def _stepped(self) -> None:
        if self._process_nbytes is None:
            self._process_nbytes = max(0, places.rss()[0] - places.footprint(self._engine)["dram"])
        if self._done < NUM_FOLLOWED:
            self._name_places()  # also without following: what the engine keeps is known
        self._done += 1
        self._ends.append(len(self.ledger.events))
        self._follower.follow(False)

    def _name_places(self) -> None:
        seen: set[int] = set()
        with torch.no_grad():
            for category, name, tensor in (*self._engine.holdings(), *self._engine.scalars()):
                key = tensor.untyped_storage()._cdata
                if key not in seen:
                    seen.add(key)
                    self._follower.name(tensor, category, name)
            for memory in places.host_memory(self._engine):
                self._follower.disown(memory)

    def _boundary(self, phase: str) -> None:
        if phase != clocks.BETWEEN[0]:
            there = _requested(self._device)[0] if self._device.type == "cuda" else None
            moment = phase if phase == "initialisation" else f"{phase}, step {self._done + 1}"
            self._boundaries.append((f"end of {moment}", len(self.ledger.events) - 1, there))

    def boundaries(self) -> list[dict[str, Any]]:
        """Return what was alive at the end of each followed phase, and the allocator's count (None: no allocator)."""
        found = []
        for moment, index, there in self._boundaries:
            held = self.ledger.held(index)
            found.append({"moment": moment, "ledger": held.nbytes, "allocator": there, "rows": held.rows})
        return found

    # -- the profile at the end --------------------------------------------------------------------------------------

    def report(self, config: Config, options: RunOptions, engine: Engine, lines: list[Line]) -> None:
        self.detach()
        self._lines = lines
        super().report(config, options, engine, lines)

    def local(self, engine: Engine) -> dict[str, Any]:
        """Return what this rank recorded at the peaks; on a GPU also the allocator's counters."""
        peak = self.ledger.peak()
        held = {name: nbytes for name, nbytes in peak.rows.items() if nbytes and name != UNATTRIBUTED}
        hbm: dict[str, Any] = {
            "rows": held,
            "measured": peak.nbytes,
            "moment": peak.moment if self._follow else "",
            "holders": peak.holders,
        }
        if self._device.type == "cuda":
            hbm |= self._device_total(held)
        return record(engine, hbm, self._process_nbytes) | {"time": self._time()}

    def _time(self) -> dict[str, float]:
        """Return this rank's mean seconds per timed step: in all, computing and waiting."""
        found = [clocks.split(self._clock.step(number)[0]) for number in self.timed]
        compute = sum(each for each, _ in found) / len(found)
        wait = sum(sum(causes.values()) for _, causes in found) / len(found)
        return {"seconds": compute + wait, "compute": compute, "wait": wait}

    def _device_total(self, held: dict[str, int]) -> dict[str, Any]:
        """Return the device's peak as the allocator and the driver count it, with `runtime` in the rows.

        `runtime` is what operations did not make: cuBLAS workspaces, the allocator's slack in and between blocks, and
        memory outside the allocator (the context, kernels, NCCL).
        """
        allocated = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        outside = max(0, self._taken() - torch.cuda.memory_reserved(self._device))
        slack = max(0, allocated - _counter(self._device, "peak"))
        _, workspace = _requested(self._device)
        rows = held | {"runtime": outside + reserved - allocated + slack + workspace}
        return {"rows": rows, "measured": reserved + outside}

    def _taken(self) -> int:
        """Return the device memory of this process; if unknown to the driver, an equal share of all memory in use."""
        mine = process_nbytes(self._device)
        if mine is not None:
            return mine
        free, total = torch.cuda.mem_get_info(self._device)
        ranks: int = facts(self._engine)["ranks_per_node"]
        return (total - free) // max(1, ranks // torch.cuda.device_count())

    def facts(self, config: Config, engine: Engine) -> dict[str, Any]:
        """Return the seconds and the timeline of rank 0, and what the engine is."""
        steps = [(number, *self._clock.step(number)) for number in self.timed]
        computes, overlaps = [], []
        phases: dict[str, float] = defaultdict(float)
        waits: dict[str, float] = defaultdict(float)
        before = self._lines[0].step - 1 if self._lines else 0  # steps before the resume
        lines = {line.step - before: line for line in self._lines}
        for number, segments, spans in steps:
            compute, stood = clocks.split(segments)
            between = sum(s.seconds for s in segments if s.label == clocks.BETWEEN)
            # Only the loader measures the wait for data: the engine sees it as time between steps.
            stood["data"] = min(lines[number].wait.get("data", 0.0) if number in lines else 0.0, between)
            computes.append(compute - stood["data"])
            for cause, seconds in stood.items():
                waits[cause] += seconds / len(steps)
            overlaps.append(clocks.overlap(segments, spans))
            for segment in segments:
                phase, cause = segment.label
                phases[describe(phase, cause) if phase == clocks.WAIT else phase] += segment.seconds / len(steps)
        shares = [share for share in overlaps if share is not None]
        typical = sorted(steps, key=lambda step: step[1][-1].end - step[1][0].begin)[len(steps) // 2]
        found = facts(engine) | {
            "followed": self._follow,
            "timed": [number + before for number, _, _ in steps],
            "compute": sum(computes) / len(computes),
            "waits": dict(waits),
            "overlap": sum(shares) / len(shares) if shares else None,
            "phases": dict(phases),
            "links": links([spans for _, _, spans in steps], config),
            "boundaries": self.boundaries(),
            "notes": self._notes(config),
        }
        names = self.ledger.peak().names
        found["units"] = unit_rows(engine, [(segments, spans) for _, segments, spans in steps], names)
        return found | {"timeline": self._timeline(typical, before)}

    def _notes(self, config: Config) -> list[str]:
        notes = []
        if not self._follow:
            where = "in `unattributed`" if self._device.type == "cuda" else "not in these rows"
            notes.append(f"compiled blocks cannot be followed: activations, logits and temporaries are {where}")
        if self._follows(self.timed[0]):
            enough = self._lines[0].step + NUM_FOLLOWED if self._lines else NUM_FOLLOWED + 1
            notes.append(f"every step was followed, so seconds are too many: give --steps {enough} or more")
        return notes

    def _timeline(self, typical: tuple[int, list[Segment], list[Span]], before: int) -> dict[str, Any]:
        """Return rank 0's typical step, combined with the memory of the last followed step.

        Steps are numbered as in the run's metrics: after the `before` steps that precede a resume.
        """
        number, segments, spans = typical
        followed = min(self._done, NUM_FOLLOWED)
        window = (self._ends[followed - 2] if followed > 1 else 0, self._ends[followed - 1])
        other = self._clock.step(followed)[0]
        rows = places.tier_rows(self._engine)
        made = make_timeline(number + before, segments, spans, self.ledger, window, other, rows)
        return made | {"memory_step": followed + before}

    def publish(self, config: Config, options: RunOptions, document: dict[str, Any]) -> None:
        super().publish(config, options, document)
        self._told(config, options, document)


def _requested(device: torch.device) -> tuple[int, int]:
    """Return the bytes requested from the device's allocator by operations, and by cuBLAS for its workspaces.

    No operation makes the workspaces. They are measured by freeing them; cuBLAS allocates them again when needed.
    """
    before = _counter(device, "current")
    torch._C._cuda_clearCublasWorkspaces()
    after = _counter(device, "current")
    return after, before - after


def _counter(device: torch.device, which: str) -> int:
    """Return the bytes requested from the allocator: now (`current`) or at most (`peak`)."""
    nbytes: int = torch.cuda.memory_stats(device)[f"requested_bytes.all.{which}"]
    return nbytes


def links(steps: list[list[Span]], config: Config) -> list[dict[str, Any]]:
    """Return, for each lane that moved bytes, the rate achieved while busy and the link's peak, in GB/s."""
    known = best_links(bench.remembered(bench.gather(()), tuple(config.offload.nvme_path)))
    found = []
    for lane in clocks.MOVES:
        nbytes = sum(span.nbytes for spans in steps for span in spans if span.lane == lane)
        busy = sum(clocks.length(clocks.union((s.begin, s.end) for s in spans if s.lane == lane)) for spans in steps)
        if nbytes and busy:
            each = {"lane": lane, "bytes": nbytes // len(steps), "seconds": busy / len(steps)}
            at_least = any(span.bounded for spans in steps for span in spans if span.lane == lane)
            found.append(each | {"achieved": nbytes / busy / 1e9, "at_least": at_least, "best": known.get(lane)})
    return found
