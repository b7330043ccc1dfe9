"""The values of an optimizer step: which parameters are updated, by what their gradients are divided, if at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocli.engine.comm import Collectives
from zerocli.engine.optimizer.optim import Group
from zerocli.engine.tensor_parallel import TensorParallel
from zerocli.engine.units.reduce import Reducer
from zerocli.engine.units.unit import Flat


@dataclass(frozen=True)
class StepResult:
    """The result of a step; its tensors are still on the device, so reading one makes the host wait."""

    step: int
    lr: float
    grad_norm: torch.Tensor
    """Norm of the whole averaged gradient, before clipping."""
    skipped: torch.Tensor
    """1.0 if the gradients were not finite and nothing was updated."""


@dataclass(frozen=True)
class Scaling:
    """What a step does with all gradients, as values on the device."""

    norm: torch.Tensor
    """Norm of the whole averaged gradient, before clipping."""
    grad_scale: torch.Tensor
    """What each accumulated gradient is divided by: averages it and clips it."""
    skip: torch.Tensor
    """1.0 if nothing may be updated, else 0.0."""


def exchange_norms(
    flats: list[Flat], reducer: Reducer, collectives: Collectives, tensor_parallel: TensorParallel
) -> tuple[torch.Tensor, frozenset[str]]:
    """Return the squared norm of all gradients, and the parameters that got none on any rank. Collective.

    Both come from one small all-reduce. A rank on which every gradient arrived knows that the set is empty, so its
    host waits for the device only if some gradient did not arrive.
    """
    received = [reducer.received(flat) for flat in flats]
    complete = all(len(got) == len(flat.parameters) for flat, got in zip(flats, received, strict=True))
    if complete:
        sums = torch.ones(1 + sum(map(len, received)), dtype=torch.float64, device=collectives.device)
    else:
        rows = zip(flats, received, strict=True)
        mine = [float(i in got) for flat, got in rows for i in range(len(flat.parameters))]
        sums = torch.tensor([0.0, *mine], dtype=torch.float64, device=collectives.device)
    sums[0] = reducer.norms.sum_of_squares()
    sums = tensor_parallel.total(collectives.sum_control(sums))
    if complete:
        return sums[0], frozenset()
    names = [entry.name for flat in flats for entry in flat.layout.entries]
    return sums[0], frozenset(n for n, active in zip(names, sums[1:].tolist(), strict=True) if not active)


def scaling(
    squares: torch.Tensor, divisor: torch.Tensor | float, clip: float | None, uneven: torch.Tensor | None
) -> Scaling:
    """Return the scaling of accumulated gradients with this squared norm, which `divisor` turns into averages.

    A step is skipped if the norm is not finite, or if `uneven` is 1.0: the ranks gathered different units.
    """
    norm = squares.sqrt().float() / divisor
    finite = torch.isfinite(norm)
    skip = (~finite).float() if uneven is None else torch.maximum((~finite).float(), uneven)
    factor = torch.ones_like(norm)
    if clip is not None:
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)
    # A skipped step must not divide by NaN, even though its result is ignored.
    return Scaling(norm, torch.where(finite, divisor / factor, torch.ones_like(norm)), skip)


def called_step(passes: int, groups: Sequence[Group]) -> str:
    """Return this rank's call of `step` in words."""
    rates = sorted({group.lr for group in groups})
    of = f"{passes} backward pass" + "es" * (passes != 1)
    return f"called engine.step() after {of} with lr {', '.join(f'{rate:g}' for rate in rates[:3])}"
