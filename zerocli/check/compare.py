"""Differences between a run and the unsharded one, and how large rounding alone can make them.

[Note: tolerance] The unsharded run is made twice: from the model's initial values, and from values that each differ by
one rounding of the compute dtype. The difference between the two shows the effect of rounding on each number: tiny for
most, large for a bias whose true gradient is zero, as Adam divides noise by noise. Sharding adds the same numbers in
another order, which also changes rounding, so a row may differ by FACTOR times as much, plus FACTOR roundings of the
number itself. A fixed tolerance would be too wide for the first kind and too narrow for the second.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass
class Outcome:
    """The results of a run: losses and norms of each step, and final parameters (fp32, on the CPU)."""

    losses: list[float]
    norms: list[float]
    parameters: Tensors
    states: Mapping[str, Tensors] = field(default_factory=dict)
    """The optimizer's arrays, by parameter."""
    skipped: int = 0
    """Steps whose gradients were not finite."""

    def digest(self) -> str:
        """Return a hash of every loss, norm and parameter: equal if all bits are equal."""
        found = hashlib.blake2b(struct.pack(f"{2 * len(self.losses)}d", *self.losses, *self.norms), digest_size=16)
        for name in self.parameters:
            found.update(self.parameters[name].contiguous().view(-1).numpy().data)
        return found.hexdigest()


@dataclass(frozen=True)
class Gap:
    """The difference between one tensor of a run and that of the unsharded run."""

    name: str
    what: str
    """`parameter`, or the name of the optimizer's array."""
    rms: float
    """Root mean square of the difference."""
    scale: float
    """Root mean square of the tensor itself, unsharded."""
    largest: float
    """Largest difference of an element."""

    @property
    def relative(self) -> float:
        return _ratio(self.rms, self.scale)


@dataclass(frozen=True)
class Differences:
    """A run compared with the unsharded one: relative differences of losses and norms by step, and of each tensor."""

    losses: list[float]
    norms: list[float]
    gaps: list[Gap]

    @property
    def loss(self) -> float:
        return worst(self.losses)

    @property
    def norm(self) -> float:
        return worst(self.norms)

    def largest(self, parameters: bool) -> Gap | None:
        """Return the parameter, or the optimizer's array, with the largest relative difference."""
        found = [gap for gap in self.gaps if (gap.what == PARAMETER) == parameters]
        return max(found, key=lambda gap: _order(gap.relative), default=None)


PARAMETER = "parameter"


def differences(run: Outcome, reference: Outcome) -> Differences:
    """Return the differences between a run and the unsharded one, tensors in the model's order."""
    gaps = []
    for name, expected in reference.parameters.items():
        gaps.append(_gap(name, PARAMETER, run.parameters[name], expected))
        mine = run.states.get(name, {})
        for key, array in reference.states.get(name, {}).items():
            if key in mine and mine[key].shape == array.shape:
                gaps.append(_gap(name, key, mine[key], array))
    return Differences(_relative(run.losses, reference.losses), _relative(run.norms, reference.norms), gaps)


@dataclass(frozen=True)
class Tolerance:
    """What rounding may change; see [Note: tolerance]."""

    rounding: float
    """One rounding of the compute dtype, relative."""
    noise: Differences
    """Its effect on the unsharded run."""

    def first_over(self, found: Differences, factor: float) -> tuple[Gap, float] | None:
        """Return the first tensor, in the model's order, that differs by more than rounding, and what is allowed."""
        for gap, noise in zip(found.gaps, self.noise.gaps, strict=True):
            # Parameters have an fp32 master, whatever they compute in; gradients are rounded to the compute dtype.
            own = FP32_ROUNDING if gap.what == PARAMETER else self.rounding
            allowed = factor * max(noise.rms, own * gap.scale)
            if not gap.rms <= allowed:  # also true for NaN
                return gap, _ratio(allowed, gap.scale)
        return None

    def first_step(self, found: Differences, factor: float) -> tuple[str, int, float, float] | None:
        """Return (what, step, difference, tolerance) of the first loss or norm that differs by more."""
        limits = [factor * max(noise, self.rounding) for noise in (self.noise.loss, self.noise.norm)]
        for step, pair in enumerate(zip(found.losses, found.norms, strict=True), start=1):
            for what, value, allowed in zip(("loss", "gradient norm"), pair, limits, strict=True):
                if not value <= allowed:
                    return what, step, value, allowed

        return None


FP32_ROUNDING = torch.finfo(torch.float32).eps / 2


def rounding(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def worst(values: list[float]) -> float:
    """Return the largest value; NaN is larger than any number."""
    return max(values, key=_order, default=0.0)


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _gap(name: str, what: str, mine: torch.Tensor, expected: torch.Tensor) -> Gap:
    if torch.equal(mine, expected):
        return Gap(name, what, 0.0, _rms(expected), 0.0)
    delta = mine.double() - expected.double()
    return Gap(name, what, _rms(delta), _rms(expected), delta.abs().max().item())


def _rms(tensor: torch.Tensor) -> float:
    return math.sqrt(tensor.double().square().mean().item()) if tensor.numel() else 0.0


def _relative(mine: list[float], expected: list[float]) -> list[float]:
    """Return the relative differences; 0 for a step that both skipped because it overflowed."""
    pairs = zip(mine, expected, strict=True)
    same = [a == b or not (math.isfinite(a) or math.isfinite(b)) for a, b in zip(mine, expected, strict=True)]
    return [0.0 if equal else _ratio(abs(a - b), abs(b)) for equal, (a, b) in zip(same, pairs, strict=True)]


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf
