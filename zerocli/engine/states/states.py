"""Whole states: full, unsharded tensors under the model's own names, read from whichever tier holds their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocli.engine.optimizer.counts import Counts
from zerocli.engine.optimizer.optim import FlatOptimizer, History
from zerocli.engine.states import torch_states
from zerocli.engine.states.buffers import write_buffer
from zerocli.engine.states.held import joined, load_whole, whole_array, whole_of, whole_parameters, write_held
from zerocli.engine.states.named import IncompatibleKeys, match, named_tensors
from zerocli.engine.states.own_states import Loaded, Manner, load_own, manner_of, save_own
from zerocli.engine.tensor_parallel import TensorParallel
from zerocli.engine.units.unit import REPLICATED, Flat

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


@torch.no_grad()
def parameter_values(engine: Engine, held: Mapping[int, torch.Tensor] | None = None) -> dict[int, torch.Tensor]:
    """Return whole parameters, on the CPU, by their ids. Collective.

    `held` maps a flat's id to this rank's part of other values for its parameters.
    """
    values: dict[int, torch.Tensor] = {}
    for flat in engine.flats():
        if held is not None and id(flat) in held:
            whole = whole_of(engine.shards, flat.layout.total, held[id(flat)].to(engine.device))
        else:
            whole = whole_parameters(engine.shards, flat)
        for parameter, entry, view in zip(flat.parameters, flat.layout.entries, flat.views(whole), strict=True):
            values[id(parameter)] = engine.tensor_parallel.join(entry.name, view.clone())
    engine.forget_traffic()
    return values


def model_state(engine: Engine, held: Mapping[int, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """See `Engine.state_dict`; `held` as in `parameter_values`."""
    state: dict[str, torch.Tensor] = save_own(engine.model, parameter_values(engine, held))
    return state


@torch.no_grad()
def load_model_state(engine: Engine, module: nn.Module, state: Mapping[str, Any], strict: bool) -> IncompatibleKeys:
    """See `Engine.load_state_dict`; `module` is the model or a part of it."""
    flats = list(engine.flats())
    engine.hooks.parameters_changed(flats)
    loaded = read_state(module, state, strict, engine.tensor_parallel, lambda: parameter_values(engine))
    for flat in flats:
        _load_parameters(engine, flat, loaded.tensors)
    sharded = {id(parameter) for flat in flats for parameter in flat.parameters}
    for name, tensor in named_tensors(module):
        if id(tensor) in loaded.tensors and id(tensor) not in sharded:
            write_buffer(name, tensor, loaded.tensors[id(tensor)])
    for owner, name, new in loaded.replaced:
        owner._buffers[name] = new.to(engine.device)
    for owner, extra in loaded.extra:
        owner.set_extra_state(extra)
    engine.forget_traffic()
    return IncompatibleKeys(loaded.missing, loaded.unexpected)


def read_state(
    model: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    tensor_parallel: TensorParallel,
    current: Callable[[], Mapping[int, torch.Tensor]],
) -> Loaded:
    """Return what a state contains for the model; nothing is written. `current` as in `load_own`."""
    if manner_of(model) is not Manner.BY_NAME:
        return load_own(model, state, strict, tensor_parallel.whole_shape, current)
    matched = match(model, state, tensor_parallel)
    matched.require(strict)
    tensors = {key: state[name] for key, name in matched.names.items()}
    return Loaded(tensors, [], [], matched.missing, matched.unexpected)


def _load_parameters(engine: Engine, flat: Flat, values: Mapping[int, torch.Tensor]) -> None:
    """Overwrite the flat's parameters that have whole values, by id. Collective."""
    rows = zip(flat.layout.entries, flat.parameters, strict=True)
    given = [engine.tensor_parallel.part(e.name, values[id(p)]) if id(p) in values else None for e, p in rows]
    if all(value is None for value in given):
        return
    if any(value is None for value in given):  # the others stay as they are
        kept = flat.views(whole_parameters(engine.shards, flat))
        given = [old if value is None else value for old, value in zip(kept, given, strict=True)]
    load_whole(flat, joined(flat, given, engine.device))


def histories(flats: Iterable[Flat], counts: Counts, rule: FlatOptimizer) -> dict[str, History]:
    """Return the history of every parameter of these trainable flats; waits for the device."""
    by_name, found = counts.by_name(), {}
    for flat in flats:
        for entry in flat.layout.entries:
            at, group = counts.class_of(entry.name), entry.group % REPLICATED
            numbers, tensors = rule.numbers(entry.name, at, group), rule.tensors(entry.name)
            found[entry.name] = History(by_name[entry.name], numbers, tensors)
    for name, first in list(found.items())[:1]:  # what is frozen has no history
        found[name] = dataclasses.replace(first, tensors={**first.tensors, **rule.own_tensors()})
    return found


def load_histories(
    flats: Iterable[Flat], counts: Counts, rule: FlatOptimizer, device: torch.device, saved: Mapping[str, History]
) -> None:
    """Load the histories of all parameters of these trainable flats."""
    rule.forget()
    # Parameters with equal histories share a class of counts, regardless of the previous classes.
    counts.adopt(
        {name: history.count for name, history in saved.items()},
        lambda name: tuple(sorted(saved[name].numbers.items())),
    )
    for flat in flats:
        for entry in flat.layout.entries:
            at, group, one = counts.class_of(entry.name), entry.group % REPLICATED, saved[entry.name]
            tensors = {key: value.to(device, copy=True) for key, value in one.tensors.items()}
            rule.load(entry.name, at, group, History(one.count, one.numbers, tensors))


@torch.no_grad()
def optimizer_state(engine: Engine) -> dict[str, Any]:
    """See `Engine.optimizer_state_dict`."""
    flats, states = list(engine.trainable()), dict[str, dict[str, torch.Tensor]]()
    for flat in flats:
        for key in engine.rule.state_names:
            views = flat.views(whole_array(engine.shards, flat, key))
            for entry, view in zip(flat.layout.entries, views, strict=True):
                states.setdefault(entry.name, {})[key] = engine.tensor_parallel.join(entry.name, view.clone())
    engine.forget_traffic()
    kept = histories(flats, engine.counts, engine.rule)
    for name, history in kept.items():
        copies = {key: value.detach().cpu().clone() for key, value in history.tensors.items()}
        states.setdefault(name, {}).update(copies)
    return {
        "state": states,
        "counts": {name: history.count for name, history in kept.items()},
        "numbers": {name: dict(history.numbers) for name, history in kept.items() if history.numbers},
        "steps": engine.steps,
        "updates": engine.updates.item(),
        "loss_scale": engine.loss_scale.state(),
        "param_groups": engine.optimizer.saved_groups(),
    }


@torch.no_grad()
def load_optimizer_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """See `Engine.load_optimizer_state_dict`."""
    rule, flats = engine.rule, list(engine.trainable())
    if torch_states.is_torchs(saved):
        named = {n: p for n, p in engine.model.named_parameters() if n in engine.arranged.group_of}
        scale = engine.loss_scale.state()
        trained = [entry.name for flat in flats for entry in flat.layout.entries]
        saved = torch_states.translate(saved, engine.optimizer.param_groups, named, trained, rule, scale)
    known, loaded = set(rule.state_names), {}
    saved_counts, numbers = saved.get("counts", {}), saved.get("numbers", {})
    for flat in flats:
        for key in rule.state_names:
            parts = (engine.tensor_parallel.part(e.name, saved["state"][e.name][key]) for e in flat.layout.entries)
            whole = joined(flat, parts, engine.device)
            write_held(flat, key, whole[flat.held.start : flat.held.stop])
        for entry in flat.layout.entries:
            own = saved["state"].get(entry.name, {})
            tensors = {key: value for key, value in own.items() if key not in known}
            # Older states have one count for all parameters.
            count = int(saved_counts.get(entry.name, saved["updates"]))
            loaded[entry.name] = History(count, numbers.get(entry.name, {}), tensors)
    load_histories(flats, engine.counts, rule, engine.device, loaded)
    engine.steps = saved["steps"]
    # A new tensor: an update may still be reading the old one.
    engine.updates = torch.full_like(engine.updates, float(saved["updates"]))
    engine.loss_scale.load(saved["loss_scale"])
    engine.optimizer.load_groups(saved.get("param_groups"), engine.steps)
