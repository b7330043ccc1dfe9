"""Updates that need whole parameters: a unit's states are gathered, updated, and sharded again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerocli.engine.grouped import Shards
from zerocli.engine.optimizer.counts import Counts
from zerocli.engine.optimizer.optim import Row, StepValues, WholeRule
from zerocli.engine.states.held import load_whole, read_held, write_held
from zerocli.engine.units.unit import MASTER, REPLICATED, Flat


def update_whole(
    flats: Sequence[Flat],
    rule: WholeRule,
    values: StepValues,
    counts: Counts,
    inactive: frozenset[str],
    collectives: Shards,
) -> None:
    """Update the parameters of these flats in their own shapes, identically on every rank. Collective.

    Meanwhile each rank holds the flats' whole masters, gradients and states in fp32; a parameter in `inactive` has no
    gradient.
    """
    if values.on_host[1]:
        return
    wholes, rows = [], []
    for flat in flats:
        master, grads, states = _gather(flat, rule.state_names, values, inactive, collectives)
        wholes.append((flat, master, states))
        views = {name: flat.views(array) for name, array in states.items()}
        for i, (entry, value, grad) in enumerate(zip(flat.layout.entries, flat.views(master), grads, strict=True)):
            group, at = values.groups[entry.group % REPLICATED], values.at(counts.class_of(entry.name))
            grad = None if entry.name in inactive else grad
            rows.append(Row(entry.name, value, grad, {name: own[i] for name, own in views.items()}, group, at))
    rule.update_rows(rows)
    for flat, master, states in wholes:  # keep this rank's part
        load_whole(flat, master)
        for name, array in states.items():
            write_held(flat, name, array[flat.held.start : flat.held.stop])


def _gather(
    flat: Flat,
    state_names: Sequence[str],
    values: StepValues,
    inactive: frozenset[str],
    collectives: Shards,
) -> tuple[torch.Tensor, Sequence[torch.Tensor | None], dict[str, torch.Tensor]]:
    """Return a flat's whole master, the gradient of each parameter, and whole states. Collective."""
    device = collectives.device

    def together(held: torch.Tensor) -> torch.Tensor:
        if held.numel() == flat.layout.total:
            return held.to(device, torch.float32, copy=True)
        whole = torch.empty(flat.layout.total, dtype=held.dtype, device=device)
        collectives.all_gather(whole, held, f"states of {flat.unit.title}").wait()
        return whole.float()

    master = together(read_held(flat, MASTER, device))
    grads: Sequence[torch.Tensor | None] = [None] * len(flat.layout.entries)
    if any(entry.name not in inactive for entry in flat.layout.entries):
        grads = flat.views(together(flat.gradient.read(device)).mul_(1 / values.grad_scale))
    return master, grads, {name: together(read_held(flat, name, device)) for name in state_names}
