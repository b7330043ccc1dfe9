"""Updates that need whole parameters: a unit's states are gathered, updated, and sharded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocli.engine.grouped import Shards
from zerocli.engine.optimizer.counts import Counts
from zerocli.engine.optimizer.optim import Row, StepValues, WholeRule
from zerocli.engine.optimizer.whole_rule import PersistentOptimizer
from zerocli.engine.states.held import load_whole, read_held, write_held
from zerocli.engine.units.unit import MASTER, REPLICATED, Flat


def update_whole(
    flat: Flat,
    rule: WholeRule,
    values: StepValues,
    counts: Counts,
    inactive: frozenset[str],
    collectives: Shards,
) -> None:
    """Update a flat's parameters one by one in their own shapes, identically on every rank. Collective.

    Meanwhile each rank holds the flat's whole master, gradient and states in fp32.
    """
    if values.on_host[1]:
        return
    whole = _gather(flat, rule.state_names, values, inactive, collectives)
    for entry, row in zip(flat.layout.entries, whole.rows, strict=True):
        if row.grad is None or not entry.numel:
            continue
        group = values.groups[entry.group % REPLICATED]
        at = values.at(counts.class_of(entry.name))
        rule.update_whole(row, group, at)
    whole.write()


def update_together(
    flats: Sequence[Flat],
    rule: PersistentOptimizer,
    values: StepValues,
    inactive: frozenset[str],
    collectives: Shards,
) -> None:
    """Update the parameters of all flats in one step of the user's optimizer, identically on every rank. Collective.

    Meanwhile each rank holds all masters, gradients and states in fp32.
    """
    if values.on_host[1]:
        return
    wholes = [_gather(flat, rule.state_names, values, inactive, collectives) for flat in flats]
    rule.update_all([row for whole in wholes for row in whole.rows])
    for whole in wholes:
        whole.write()


@dataclass(frozen=True)
class _Whole:
    """A flat's whole master, gradient and states in fp32, and the parameters as views of them."""

    flat: Flat
    master: torch.Tensor
    states: dict[str, torch.Tensor]
    rows: list[Row]

    def write(self) -> None:
        """Keep this rank's part of the master and of the states."""
        load_whole(self.flat, self.master)
        for name, array in self.states.items():
            write_held(self.flat, name, array[self.flat.held.start : self.flat.held.stop])


def _gather(
    flat: Flat,
    state_names: Sequence[str],
    values: StepValues,
    inactive: frozenset[str],
    collectives: Shards,
) -> _Whole:
    """Return a flat's whole values; a parameter in `inactive` has no gradient. Collective."""
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
    states = {name: together(read_held(flat, name, device)) for name in state_names}
    views = {name: flat.views(array) for name, array in states.items()}
    rows = [
        Row(entry.name, value, None if entry.name in inactive else grad, {n: own[at] for n, own in views.items()})
        for at, (entry, value, grad) in enumerate(zip(flat.layout.entries, flat.views(master), grads, strict=True))
    ]
    return _Whole(flat, master, states, rows)
