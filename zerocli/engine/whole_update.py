"""Updates that need whole parameters: a unit's states are gathered, updated, and sharded again."""

from __future__ import annotations

import torch

from zerocli.engine.comm import Collectives
from zerocli.engine.counts import Counts
from zerocli.engine.optim import StepValues
from zerocli.engine.rules import MuonWithAdamW
from zerocli.engine.states import load_whole, read_held, write_held
from zerocli.engine.torchrule import WholeOptimizer
from zerocli.engine.unit import MASTER, REPLICATED, Flat


def update_whole(
    flat: Flat,
    rule: WholeOptimizer | MuonWithAdamW,
    values: StepValues,
    counts: Counts,
    inactive: frozenset[str],
    collectives: Collectives,
) -> None:
    """Update a flat's parameters one by one in their own shapes, identically on every rank. Collective.

    Meanwhile each rank holds the flat's whole master, gradient and states in fp32.
    """
    device = collectives.device
    if values.skip.item():
        return

    def together(held: torch.Tensor) -> torch.Tensor:
        if held.numel() == flat.layout.total:
            return held.to(device, torch.float32, copy=True)
        whole = torch.empty(flat.layout.total, dtype=held.dtype, device=device)
        collectives.all_gather(whole, held, f"states of {flat.unit.title}").wait()
        return whole.float()

    master = together(read_held(flat, MASTER, device))
    grad = together(_gradient(flat, device)).mul_(1 / values.grad_scale)
    states = {name: together(read_held(flat, name, device)) for name in rule.state_names}
    views = {name: flat.views(array) for name, array in states.items()}
    rows = zip(flat.layout.entries, flat.views(master), flat.views(grad), strict=True)
    for index, (entry, parameter, gradient) in enumerate(rows):
        if entry.name in inactive or not entry.numel:
            continue
        own = {name: arrays[index] for name, arrays in views.items()}
        group = values.groups[entry.group % REPLICATED]
        rule.update_whole(entry.name, parameter, gradient, own, group, values.at(counts.class_of(entry.name)))
    load_whole(flat, master)
    for name, array in states.items():
        write_held(flat, name, array[flat.held.start : flat.held.stop])


def _gradient(flat: Flat, device: torch.device) -> torch.Tensor:
    """Return the reduced gradient of what this rank holds, on the device."""
    if flat.grad is not None:
        return flat.grad
    assert flat.grad_store is not None
    target = torch.empty(flat.held.numel, dtype=flat.grad_store.dtype, device=device)
    flat.grad_store.fetch(0, target).synchronize()
    return target
