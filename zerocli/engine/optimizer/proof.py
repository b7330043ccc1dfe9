"""Proof of how a user's optimizer may be run: on flat slices, on whole parameters one by one, or on all at once.

The optimizer first makes a few steps as plain torch would run it: one object over parameters like the model's. What
its operations do is observed (dataflow.py), and what it keeps on itself (outside.py). It is run on slices, or
parameter by parameter, only if nothing speaks against it and if the engine's own way gives the same bits. Otherwise all
parameters are given to it at once, as plain torch does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerocli.engine.optimizer.copies import Source
from zerocli.engine.optimizer.dataflow import Dataflow, Traced, TracedCount
from zerocli.engine.optimizer.outside import constants, kept_outside, without_hooks
from zerocli.errors import Refused

State = dict[str, Any]
ELEMENTWISE, ONE_BY_ONE, TOGETHER = "elementwise", "one by one", "together"

STEPS = 4
SKIPS = 2
"""The step (from 0) in which every other parameter has no gradient."""
SCALES = (1.0, 1e-3, 40.0, 1e3)
"""Factors on the gradients, by step: a rule may have a threshold."""
MAX_PARAMETERS = 32
"""Parameters in a trial."""
MAX_LATE_PARAMETERS = 6
"""Parameters in its late steps."""
NUMEL = 1 << 10
"""Elements of a parameter in a trial with values; a larger one's sizes are reduced there, and kept without values."""
TARGETS = 20


@dataclass(frozen=True)
class Specimen:
    """A parameter that stands for others in a trial."""

    shape: tuple[int, ...]
    group: int
    real: nn.Parameter | None = None
    trains: bool = True
    whole: bool = False
    """Whether its size must not be reduced."""

    @property
    def small(self) -> tuple[int, ...]:
        """Its shape with sizes reduced until it is affordable."""
        shape = list(self.shape)
        while not self.whole and math.prod(shape) > NUMEL:
            largest = shape.index(max(shape))
            shape[largest] = max(2, shape[largest] // 2)
        return tuple(shape)

    def make(self, shape: Sequence[int], device: str, values: torch.Tensor | None = None) -> Traced:
        made = Traced(torch.empty(shape, device=device) if values is None else values.clone(), self.trains)
        if self.real is not None:
            own = {key: value for key, value in vars(self.real).items() if not key.startswith("_zerocli")}
            object.__getattribute__(made, "__dict__").update(own)
        return made


SYNTHETIC = tuple(Specimen(shape, 0) for shape in ((6,), (2, 3), (7,), (5, 3), (2, 3, 2, 2)))
"""Parameters to try a rule on when there is no model."""


@dataclass
class Verdict:
    """How a rule may be run, and why."""

    way: str
    reason: str
    arrays: tuple[str, ...] = ()
    """States in the shape of their parameter, in fp32, of all parameters that have them."""
    changed: tuple[str, ...] = ()
    """What it changes outside of its states, in words such as `self.count`."""

    def __str__(self) -> str:
        ways = {
            ELEMENTWISE: "runs on each rank's slice of the parameters",
            ONE_BY_ONE: "runs on whole parameters, one after another",
            TOGETHER: "runs on all parameters at once, whole on every rank during a step",
        }
        return f"{ways[self.way]}: {self.reason}"


def specimens(named: Iterable[tuple[str, nn.Parameter]], group_of: Mapping[str, int]) -> list[Specimen]:
    """Return parameters that stand for the model's: up to two of each shape, group and set of attributes."""
    found: dict[Any, list[Specimen]] = {}
    for name, p in named:
        if name in group_of:
            attributes = tuple(sorted((k, repr(v)) for k, v in vars(p).items() if not isinstance(v, torch.Tensor)))
            kind = (group_of[name], p.requires_grad, tuple(p.shape), attributes)
            members = found.setdefault(kind, [])
            if len(members) < 2 and p.numel():
                members.append(Specimen(tuple(p.shape), group_of[name], p, p.requires_grad))
    firsts = [members[0] for members in found.values() if members]
    seconds = [members[1] for members in found.values() if len(members) > 1]
    if len(firsts) > MAX_PARAMETERS:  # of each group some
        keep = {specimen.group: specimen for specimen in firsts}
        firsts = [*keep.values(), *firsts[:: len(firsts) // MAX_PARAMETERS + 1]]
    return [*firsts, *seconds[: max(0, MAX_PARAMETERS - len(firsts))]]


class Trial:
    """One object over specimens, run as plain torch would, step by step."""

    def __init__(self, source: Source, members: Sequence[Specimen], values: Sequence[torch.Tensor] | None) -> None:
        self.members = members
        device = values[0].device.type if values else "meta"
        shapes = [m.small if values is not None else m.shape for m in members]
        starts: Sequence[torch.Tensor | None] = values or [None] * len(members)
        self.parameters = [m.make(s, device, v) for m, s, v in zip(members, shapes, starts, strict=True)]
        rows = zip(members, self.parameters, strict=True)
        self.optimizer = source.make([(m.group, m.real, p) for m, p in rows])
        self.groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self._fit_states(device)
        for at, group in enumerate(self.optimizer.param_groups):
            if isinstance(group.get("lr"), int | float):  # a warm-up begins at 0, and groups may differ later
                group["lr"] = (group["lr"] or 0.1) * 0.875**at

    def _fit_states(self, device: str) -> None:
        """Bring states that exist from the start to the sizes of the trial."""
        for member, p in zip(self.members, self.parameters, strict=True):
            state = self.optimizer.state.get(p, {})
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == member.shape:
                    state[name] = value[tuple(slice(0, n) for n in p.shape)].to(device, copy=True)
                elif isinstance(value, torch.Tensor):
                    state[name] = value.to("cpu" if device == "meta" else device)

    def step(self, grads: Sequence[torch.Tensor | None], only: int | None = None) -> None:
        """Make a step; with `only`, of one parameter."""
        for at, (p, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            p.grad = grad if only is None or at == only else None
        if only is not None:
            for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
                group["params"] = [p for p in members if p is self.parameters[only]]
        with torch.enable_grad(), without_hooks(self.optimizer):
            self.optimizer.step()
        for group, members in zip(self.optimizer.param_groups, self.groups, strict=True):
            group["params"] = list(members)

    def states(self) -> list[State]:
        return [dict(self.optimizer.state[p]) if p in self.optimizer.state else {} for p in self.parameters]

    def set_counts(self, counters: Sequence[set[str]], value: int) -> None:
        """Set every count that the rule keeps of a parameter."""
        for p, names in zip(self.parameters, counters, strict=True):
            state = self.optimizer.state[p]
            for name in names:
                old = state[name]
                if isinstance(old, torch.Tensor):
                    state[name] = torch.full_like(old, value)
                else:
                    state[name] = TracedCount(value) if isinstance(old, int) else type(old)(value)


def gradients(
    members: Sequence[Specimen], step: int, device: str, chosen: Collection[int] | None = None, needed: bool = False
) -> list[torch.Tensor | None]:
    """Return the gradients of a step; those of frozen parameters are missing, and unless `needed`, some others once."""
    generator = torch.Generator().manual_seed(1000 + step)
    found: list[torch.Tensor | None] = []
    for at, member in enumerate(members):
        there = member.trains and (needed or not skipped(at, step)) and (chosen is None or at in chosen)
        scale = SCALES[step % len(SCALES)]
        found.append((torch.randn(member.small, generator=generator) * scale).to(device) if there else None)
    return found


def skipped(at: int, step: int) -> bool:
    return step == SKIPS and at % 2 == 1


@dataclass
class Reference:
    """What plain torch does with the specimens."""

    source: Source
    members: list[Specimen]
    starts: list[torch.Tensor]
    steps: list[list[torch.Tensor | None]]
    """The gradients of each step."""
    values: list[torch.Tensor]
    states: list[State]
    changed: list[str]
    """What the optimizer changes outside of its states."""
    flow: Dataflow
    asked: list[str]
    """Attributes of parameters that the rule reads, other than those of every parameter."""
    touches_all: bool
    needs_all: bool
    """Whether it fails if a parameter has no gradient."""

    def grads(self) -> Iterator[list[torch.Tensor | None]]:
        """Yield the gradients of each step; a rule may change them."""
        for step in range(STEPS):
            yield [None if grad is None else grad.clone() for grad in self.steps[step]]


def observe(source: Source, members: Sequence[Specimen], device: str = "cpu", needs_all: bool = False) -> Reference:
    """Run the optimizer as plain torch would, and return what was seen; Refused if it cannot be run so.

    That is on the CPU, whose operations are the same for any shape, or else on the device of the parameters. What fails
    because a gradient is missing is tried with all of them: `needs_all`.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(m.small, generator=generator).to(device) for m in members]
    TracedCount.seen = set()
    flow = Dataflow()
    try:
        trial = Trial(source, members, starts)
        before = kept_outside(trial.optimizer)
        steps = [gradients(members, step, device, needed=needs_all) for step in range(STEPS)]
        found = Reference(source, list(members), starts, steps, [], [], [], flow, [], False, needs_all)
        for step, grads in enumerate(found.grads()):
            found.touches_all |= _watched(trial, flow, grads)
            if step == 0:
                _trace_counts(trial)
        found.values, found.states = [p.detach().clone() for p in trial.parameters], _copies(trial.states())
        if not needs_all:
            _observe_late(trial, flow, constants(source))
        after = kept_outside(trial.optimizer)
        found.changed = [key for key in after if after[key] != before.get(key)]
        if any(m.small != m.shape for m in members):
            _observe_large(source, members, flow)
    except Refused:
        raise
    except Exception as error:
        if not needs_all:
            with contextlib.suppress(Refused):
                return observe(source, members, device, needs_all=True)
        there = {m.real.device.type for m in members if m.real is not None} - {"meta", device}
        if there:
            return observe(source, members, there.pop())
        raise Refused(
            f"the optimizer {source.name} cannot be run on parameters like the model's: "
            f"{type(error).__name__}: {error}. It must make a step by step() alone, from the parameters' gradients"
        ) from error
    found.asked = sorted({name for p in trial.parameters for name in vars(p).get("_asked", ())})
    return found


def _copies(states: list[State]) -> list[State]:
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()} for state in states]


def _observe_late(trial: Trial, flow: Dataflow, known: set[int]) -> None:
    """Observe steps after many updates: counts that the rule keeps are set to numbers that it may compare them with.

    One parameter of each group and number of dimensions is enough.
    """
    counters = _counters(trial)
    near = known | TracedCount.seen | flow.compared | {10, 100, 1000, 10**4, 10**5}
    kinds = {(m.group, len(m.shape)): at for at, m in reversed(list(enumerate(trial.members))) if m.trains}
    chosen = set(list(kinds.values())[:MAX_LATE_PARAMETERS])
    if not any(counters):
        return
    for target in sorted(n for n in near if n > STEPS)[:TARGETS]:
        trial.set_counts(counters, target - 1)
        for step in (0, 1):
            _watched(trial, flow, gradients(trial.members, step, trial.parameters[0].device.type, chosen))


def _watched(trial: Trial, flow: Dataflow, grads: Sequence[torch.Tensor | None]) -> bool:
    """Make an observed step; return whether a parameter without a gradient was read or changed."""
    for at, (p, grad) in enumerate(zip(trial.parameters, grads, strict=True)):
        flow.own(p.detach(), at)
        if grad is not None:
            flow.own(grad, at)
    before = [p._version for p in trial.parameters]
    sizes = [len(state) for state in trial.states()]
    flow.begin()
    with flow:
        trial.step(grads)
    rows = enumerate(zip(trial.parameters, before, grads, sizes, trial.states(), strict=True))
    return any(g is None and (p._version != v or len(s) != n or at in flow.used) for at, (p, v, g, n, s) in rows)


def _observe_large(source: Source, members: Sequence[Specimen], flow: Dataflow) -> None:
    """Observe two steps on parameters of the real sizes, without memory; what fails there cannot be proved."""
    try:
        trial = Trial(source, members, None)
        for _ in range(2):
            _watched(trial, flow, [torch.empty(m.shape, device="meta") if m.trains else None for m in members])
    except Exception as error:
        flow.mixes = flow.mixes or f"code that fails without memory ({type(error).__name__})"
        flow.joins = flow.joins or flow.mixes


def _trace_counts(trial: Trial) -> None:
    for p in trial.parameters:
        state = trial.optimizer.state.get(p, {})
        for name, value in state.items() if isinstance(state, dict) else ():
            if type(value) is int:
                state[name] = TracedCount(value)


def _counters(trial: Trial) -> list[set[str]]:
    found = []
    for at, state in enumerate(trial.states()):
        count = STEPS - skipped(at, SKIPS)
        found.append({name for name, value in state.items() if is_number(value) and float(value) in (count, STEPS)})
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=0.0, atol=0.0, equal_nan=True)


def one_by_one(reference: Reference) -> str:
    """Return what differs if one object steps parameter by parameter; empty if nothing does."""
    trial = Trial(reference.source, reference.members, reference.starts)
    try:
        for grads in reference.grads():
            for at, grad in enumerate(grads):
                if grad is not None:
                    trial.step(grads, only=at)
    except Exception as error:
        return f"it fails on a single parameter ({type(error).__name__}: {error})"
    for p, state, value, wanted in zip(
        trial.parameters, trial.states(), reference.values, reference.states, strict=True
    ):
        if not same_bits(p.detach(), value) or state.keys() != wanted.keys():
            return "parameters updated one by one end in other values"
    return ""


def arrays_of(reference: Reference) -> tuple[str, ...]:
    """Return the states that are fp32 tensors in the shape of their parameter, wherever they exist."""
    names = dict.fromkeys(name for state in reference.states for name in state)
    return tuple(name for name in names if isinstance(name, str) and _is_array(name, reference))


def _is_array(name: str, reference: Reference) -> bool:
    rows = [(s[name], v) for s, v in zip(reference.states, reference.values, strict=True) if s.get(name) is not None]
    shaped = [isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.shape == v.shape for x, v in rows]
    return bool(shaped) and all(shaped) and any(v.dim() for _, v in rows)
