"""Whole states: full, unsharded tensors under the model's own names, read from whichever tier holds their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocli.engine.master import REMAINDER, join, narrow, split_
from zerocli.engine.named import IncompatibleKeys, match
from zerocli.engine.unit import MASTER, REPLICATED, Flat

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


def read_held(flat: Flat, name: str, device: torch.device) -> torch.Tensor:
    """Return this rank's part of an optimizer array (or the fp32 master) on the device."""
    if name == MASTER and flat.split:
        return join(_held_parameters(flat, device), read_held(flat, REMAINDER, device))
    if name == REMAINDER and flat.remainder is not None:
        return flat.remainder
    if flat.record is not None and name in flat.record.arrays:
        return flat.record.read(name, device)
    if name == MASTER:
        if flat.master is not None:
            return flat.master
        assert flat.dtype == torch.float32
        return _held_parameters(flat, device)
    return flat.states[name]


def _held_parameters(flat: Flat, device: torch.device) -> torch.Tensor:
    """Return what this rank holds of the parameters in the compute dtype, on the device."""
    if flat.held_parameters is not None:
        return flat.held_parameters
    assert flat.param_store is not None
    target = torch.empty(flat.own.numel, dtype=flat.dtype, device=device)
    flat.param_store.fetch(0, target).synchronize()
    return target


def write_held(flat: Flat, name: str, values: torch.Tensor) -> None:
    """Overwrite this rank's part of an optimizer array, or the fp32 master and with it the parameters."""
    if name == MASTER and flat.split:
        parameters = torch.empty_like(values, dtype=flat.dtype)
        remainder = torch.empty_like(values, dtype=torch.int16)
        split_(values.clone(), parameters, remainder)
        if flat.held_parameters is not None:
            flat.held_parameters.copy_(parameters)
        elif flat.param_store is not None:
            flat.param_store.put(0, parameters).synchronize()
        write_held(flat, REMAINDER, remainder)
    elif name == REMAINDER and flat.remainder is not None:
        flat.remainder.copy_(values)
    elif flat.record is not None and name in flat.record.arrays:
        flat.record.write(name, values)
    elif name != MASTER:
        flat.states[name].copy_(values)
    elif flat.master is not None:
        flat.master.copy_(values)


def whole_of(engine: Engine, total: int, held: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of `total` elements, on the CPU, from every rank's held part. Collective."""
    if held.numel() == total:
        return held.detach().to("cpu", copy=True)
    whole = torch.empty(total, dtype=held.dtype, device=engine.device)
    engine.collectives.all_gather(whole, held).wait()
    return whole.cpu()


def join_parts(engine: Engine, flat: Flat, held: torch.Tensor) -> torch.Tensor:
    """Return the whole flat, on the CPU, from every rank's held part. Collective."""
    return whole_of(engine, flat.layout.total, held)


def whole_parameters(engine: Engine, flat: Flat) -> torch.Tensor:
    """Return a flat's whole parameters, from the fp32 master if there is one."""
    if flat.trainable:
        return join_parts(engine, flat, read_held(flat, MASTER, engine.device))
    if flat.resident is not None:
        return flat.resident.cpu()
    held = flat.shard
    if held is None:
        held = _held_parameters(flat, engine.device)
    return join_parts(engine, flat, held)


def _forget_traffic(engine: Engine) -> None:
    """Exclude the bytes moved here from the training traffic counts."""
    engine.collectives.take_nbytes()
    engine.tensor_parallel.take_nbytes()


@torch.no_grad()
def model_state(engine: Engine, held: Mapping[int, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """See `Engine.state_dict`; `held` maps a flat's id to this rank's part of other values for its parameters."""
    engine.synchronize()
    values: dict[int, torch.Tensor] = {}
    for flat in engine.flats():
        if held is not None and id(flat) in held:
            whole = join_parts(engine, flat, held[id(flat)].to(engine.device))
        else:
            whole = whole_parameters(engine, flat)
        for parameter, entry, view in zip(flat.parameters, flat.layout.entries, flat.views(whole), strict=True):
            values[id(parameter)] = engine.tensor_parallel.join(entry.name, view.clone())
    _forget_traffic(engine)
    return {
        name: values[id(value)] if id(value) in values else value.detach().cpu().clone()
        for name, value in engine.model.state_dict(keep_vars=True).items()
    }


@torch.no_grad()
def load_model_state(engine: Engine, state: Mapping[str, torch.Tensor], strict: bool = True) -> IncompatibleKeys:
    """See `Engine.load_state_dict`."""
    engine.synchronize()
    own, tp = engine.model.state_dict(keep_vars=True), engine.tensor_parallel
    matched = match(engine.model, state, tp)
    matched.require(strict)
    for flat in engine.flats():
        sources = [matched.names.get(id(parameter)) for parameter in flat.parameters]
        if not any(sources):
            continue
        dtype = torch.float32 if flat.dtype.is_floating_point else flat.dtype
        whole = torch.zeros(flat.layout.total, dtype=dtype, device=engine.device)
        if not all(sources):
            whole.copy_(whole_parameters(engine, flat))  # the others stay as they are
        for source, entry, view in zip(sources, flat.layout.entries, flat.views(whole), strict=True):
            if source is not None:
                view.copy_(tp.part(entry.name, state[source]))
        load_whole(flat, whole)
    for value in own.values():
        if not isinstance(value, nn.Parameter) and id(value) in matched.names:
            value.copy_(state[matched.names[id(value)]])
    _forget_traffic(engine)
    return IncompatibleKeys(matched.missing, matched.unexpected)


def load_whole(flat: Flat, whole: torch.Tensor) -> None:
    """Overwrite this rank's part of the flat's parameters from whole values."""
    if flat.trainable:
        write_held(flat, MASTER, whole[flat.held.start : flat.held.stop])
    mine = whole[flat.own.start : flat.own.stop]
    if flat.resident is not None:
        flat.resident.copy_(narrow(whole, flat.dtype))
    elif flat.shard is not None:
        flat.shard.copy_(narrow(mine, flat.dtype))
    elif flat.param_store is not None:
        flat.param_store.put(0, narrow(mine, flat.dtype)).synchronize()


@dataclass(frozen=True)
class History:
    """Optimizer state of one parameter other than arrays of its shape."""

    count: int
    """Number of updates of the parameter."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def histories(engine: Engine) -> dict[str, History]:
    """Return the history of every trainable parameter; waits for the device."""
    counts, rule = engine.counts.by_name(), engine.rule
    found = {}
    for flat in engine.trainable():
        for entry in flat.layout.entries:
            at, group = engine.counts.class_of(entry.name), entry.group % REPLICATED
            numbers, tensors = rule.numbers(entry.name, at, group), rule.tensors(entry.name)
            found[entry.name] = History(counts[entry.name], numbers, tensors)
    return found


def load_histories(engine: Engine, saved: Mapping[str, History]) -> None:
    """Load the histories of all trainable parameters."""
    counts, rule = engine.counts, engine.rule
    rule.forget()
    # Parameters with equal histories share a class of counts, regardless of the previous classes.
    counts.adopt(
        {name: history.count for name, history in saved.items()},
        lambda name: tuple(sorted(saved[name].numbers.items())),
    )
    for flat in engine.trainable():
        for entry in flat.layout.entries:
            at, group, one = counts.class_of(entry.name), entry.group % REPLICATED, saved[entry.name]
            tensors = {key: value.to(engine.device, copy=True) for key, value in one.tensors.items()}
            rule.load(entry.name, at, group, one.count, one.numbers, tensors)


@torch.no_grad()
def adopt(flat: Flat, values: torch.Tensor, device: torch.device) -> None:
    """Set the flat's parameters from whole values in the compute dtype; masters of unchanged elements stay exact.

    If `values` are the resident parameters, edited in place, the former high bits of a split master are gone: the
    edited parameters then become their own master, all of their elements.
    """
    held = values[flat.held.start : flat.held.stop]
    if flat.trainable and flat.split:
        remainder = read_held(flat, REMAINDER, device)
        write_held(flat, REMAINDER, torch.where(_edited(flat, held, device), 0, remainder))
    elif flat.trainable and flat.dtype != torch.float32:
        master = read_held(flat, MASTER, device)
        write_held(flat, MASTER, torch.where(held != narrow(master, flat.dtype), held.float(), master))
    mine = values[flat.own.start : flat.own.stop]
    if flat.resident is not None:
        if flat.resident is not values:
            flat.resident.copy_(values)
    elif flat.shard is not None:
        flat.shard.copy_(mine)
    elif flat.param_store is not None:
        flat.param_store.put(0, mine.clone()).synchronize()


def _edited(flat: Flat, held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return, for what this rank holds, where new parameters replace others."""
    if flat.resident is None:
        return held != _held_parameters(flat, device)
    edited, names = torch.zeros(flat.layout.total, dtype=torch.bool, device=device), set(flat.edited())
    for entry in flat.layout.entries:
        edited[entry.offset : entry.offset + entry.numel] = entry.name in names
    return edited[flat.held.start : flat.held.stop]


@torch.no_grad()
def optimizer_state(engine: Engine) -> dict[str, Any]:
    """See `Engine.optimizer_state_dict`."""
    engine.synchronize()
    states: dict[str, dict[str, torch.Tensor]] = {}
    for flat in engine.trainable():
        for key in engine.rule.state_names:
            whole = join_parts(engine, flat, read_held(flat, key, engine.device))
            for entry, view in zip(flat.layout.entries, flat.views(whole), strict=True):
                states.setdefault(entry.name, {})[key] = engine.tensor_parallel.join(entry.name, view.clone())
    _forget_traffic(engine)
    kept = histories(engine)
    for name, history in kept.items():
        copies = {key: value.detach().cpu().clone() for key, value in history.tensors.items()}
        states.setdefault(name, {}).update(copies)
    return {
        "state": states,
        "steps": engine.steps,
        "updates": engine.updates.item(),
        "counts": {name: history.count for name, history in kept.items()},
        "numbers": {name: dict(history.numbers) for name, history in kept.items() if history.numbers},
        "loss_scale": engine.loss_scale.state(),
        "param_groups": engine.optimizer.saved_groups(),
    }


@torch.no_grad()
def load_optimizer_state(engine: Engine, saved: Mapping[str, Any]) -> None:
    """See `Engine.load_optimizer_state_dict`."""
    engine.synchronize()
    known, loaded = set(engine.rule.state_names), {}
    counts, numbers = saved.get("counts", {}), saved.get("numbers", {})
    for flat in engine.trainable():
        for key in engine.rule.state_names:
            whole = torch.zeros(flat.layout.total, device=engine.device)
            for entry, view in zip(flat.layout.entries, flat.views(whole), strict=True):
                view.copy_(engine.tensor_parallel.part(entry.name, saved["state"][entry.name][key]))
            write_held(flat, key, whole[flat.held.start : flat.held.stop])
        for entry in flat.layout.entries:
            own = saved["state"].get(entry.name, {})
            tensors = {key: value for key, value in own.items() if key not in known}
            count = int(counts.get(entry.name, saved["updates"]))  # older states have one count for all parameters
            loaded[entry.name] = History(count, numbers.get(entry.name, {}), tensors)
    load_histories(engine, loaded)
    engine.steps = saved["steps"]
    # A new tensor: an update may still be reading the old one.
    engine.updates = torch.full_like(engine.updates, float(saved["updates"]))
    engine.loss_scale.load(saved["loss_scale"])
    engine.optimizer.load_groups(saved.get("param_groups"), engine.steps)
