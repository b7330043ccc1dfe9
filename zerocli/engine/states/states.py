"""Whole states: full, unsharded tensors under the model's own names, read from whichever tier holds their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zerocli.engine.comm import Collectives
from zerocli.engine.optimizer.counts import Counts
from zerocli.engine.optimizer.optim import FlatOptimizer
from zerocli.engine.states.buffers import write_buffer
from zerocli.engine.states.named import IncompatibleKeys, match, named_tensors
from zerocli.engine.states.own_states import Loaded, Manner, load_own, manner_of, save_own
from zerocli.engine.tensor_parallel import TensorParallel
from zerocli.engine.units.master import REMAINDER, join, narrow, split
from zerocli.engine.units.unit import MASTER, REPLICATED, Flat


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
        parameters, remainder = split(values)
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


def whole_of(collectives: Collectives, total: int, held: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of `total` elements, on the CPU, from every rank's held part. Collective."""
    if held.numel() == total:
        return held.detach().to("cpu", copy=True)
    whole = torch.empty(total, dtype=held.dtype, device=collectives.device)
    collectives.all_gather(whole, held).wait()
    return whole.cpu()


def join_parts(collectives: Collectives, flat: Flat, held: torch.Tensor) -> torch.Tensor:
    """Return the whole flat, on the CPU, from every rank's held part. Collective."""
    return whole_of(collectives, flat.layout.total, held)


def whole_parameters(collectives: Collectives, flat: Flat) -> torch.Tensor:
    """Return a flat's whole parameters, from the fp32 master if there is one. Collective."""
    if flat.trainable:
        return join_parts(collectives, flat, read_held(flat, MASTER, collectives.device))
    if flat.resident is not None:
        return flat.resident.cpu()
    held = flat.shard
    if held is None:
        held = _held_parameters(flat, collectives.device)
    return join_parts(collectives, flat, held)


def _forget_traffic(collectives: Collectives, tensor_parallel: TensorParallel) -> None:
    """Exclude the bytes moved here from the training traffic counts."""
    collectives.take_nbytes()
    tensor_parallel.take_nbytes()


@torch.no_grad()
def parameter_values(
    flats: Iterable[Flat],
    collectives: Collectives,
    tensor_parallel: TensorParallel,
    held: Mapping[int, torch.Tensor] | None = None,
) -> dict[int, torch.Tensor]:
    """Return whole parameters, on the CPU, by their ids. Collective.

    `held` maps a flat's id to this rank's part of other values for its parameters.
    """
    values: dict[int, torch.Tensor] = {}
    for flat in flats:
        if held is not None and id(flat) in held:
            whole = join_parts(collectives, flat, held[id(flat)].to(collectives.device))
        else:
            whole = whole_parameters(collectives, flat)
        for parameter, entry, view in zip(flat.parameters, flat.layout.entries, flat.views(whole), strict=True):
            values[id(parameter)] = tensor_parallel.join(entry.name, view.clone())
    _forget_traffic(collectives, tensor_parallel)
    return values


@torch.no_grad()
def model_state(
    model: nn.Module,
    flats: Iterable[Flat],
    collectives: Collectives,
    tensor_parallel: TensorParallel,
    held: Mapping[int, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """See `Engine.state_dict`; `held` as in `parameter_values`."""
    state: dict[str, torch.Tensor] = save_own(model, parameter_values(flats, collectives, tensor_parallel, held))
    return state


@torch.no_grad()
def load_model_state(
    model: nn.Module,
    flats: Iterable[Flat],
    collectives: Collectives,
    tensor_parallel: TensorParallel,
    state: Mapping[str, Any],
    strict: bool,
) -> IncompatibleKeys:
    """See `Engine.load_state_dict`."""
    flats = list(flats)

    def current() -> dict[int, torch.Tensor]:
        return parameter_values(flats, collectives, tensor_parallel)

    loaded = read_state(model, state, strict, tensor_parallel, current)
    for flat in flats:
        load_parameters(flat, loaded.tensors, collectives, tensor_parallel)
    sharded = {id(parameter) for flat in flats for parameter in flat.parameters}
    for name, tensor in named_tensors(model):
        if id(tensor) in loaded.tensors and id(tensor) not in sharded:
            write_buffer(name, tensor, loaded.tensors[id(tensor)])
    for module, name, new in loaded.replaced:
        module._buffers[name] = new.to(collectives.device)
    for module, extra in loaded.extra:
        module.set_extra_state(extra)
    _forget_traffic(collectives, tensor_parallel)
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


def load_parameters(
    flat: Flat, values: Mapping[int, torch.Tensor], collectives: Collectives, tensor_parallel: TensorParallel
) -> None:
    """Overwrite the flat's parameters that have whole values, by id. Collective."""
    given = [values.get(id(parameter)) for parameter in flat.parameters]
    if all(value is None for value in given):
        return
    dtype = torch.float32 if flat.dtype.is_floating_point else flat.dtype
    whole = torch.zeros(flat.layout.total, dtype=dtype, device=collectives.device)
    if any(value is None for value in given):
        whole.copy_(whole_parameters(collectives, flat))  # the others stay as they are
    for value, entry, view in zip(given, flat.layout.entries, flat.views(whole), strict=True):
        if value is not None:
            view.copy_(tensor_parallel.part(entry.name, value))
    load_whole(flat, whole)


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


def histories(flats: Iterable[Flat], counts: Counts, rule: FlatOptimizer) -> dict[str, History]:
    """Return the history of every parameter of these trainable flats; waits for the device."""
    by_name, found = counts.by_name(), {}
    for flat in flats:
        for entry in flat.layout.entries:
            at, group = counts.class_of(entry.name), entry.group % REPLICATED
            numbers, tensors = rule.numbers(entry.name, at, group), rule.tensors(entry.name)
            found[entry.name] = History(by_name[entry.name], numbers, tensors)
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
def optimizer_state(
    flats: list[Flat], counts: Counts, rule: FlatOptimizer, collectives: Collectives, tensor_parallel: TensorParallel
) -> dict[str, Any]:
    """Return what the optimizer keeps of each parameter, as in `Engine.optimizer_state_dict`. Collective."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for flat in flats:
        for key in rule.state_names:
            whole = join_parts(collectives, flat, read_held(flat, key, collectives.device))
            for entry, view in zip(flat.layout.entries, flat.views(whole), strict=True):
                states.setdefault(entry.name, {})[key] = tensor_parallel.join(entry.name, view.clone())
    _forget_traffic(collectives, tensor_parallel)
    kept = histories(flats, counts, rule)
    for name, history in kept.items():
        copies = {key: value.detach().cpu().clone() for key, value in history.tensors.items()}
        states.setdefault(name, {}).update(copies)
    return {
        "state": states,
        "counts": {name: history.count for name, history in kept.items()},
        "numbers": {name: dict(history.numbers) for name, history in kept.items() if history.numbers},
    }


@torch.no_grad()
def load_optimizer_state(
    flats: list[Flat],
    counts: Counts,
    rule: FlatOptimizer,
    device: torch.device,
    tensor_parallel: TensorParallel,
    saved: Mapping[str, Any],
) -> None:
    """Load the result of `optimizer_state`; `saved` also has the number of all updates."""
    known, loaded = set(rule.state_names), {}
    saved_counts, numbers = saved.get("counts", {}), saved.get("numbers", {})
    for flat in flats:
        for key in rule.state_names:
            whole = torch.zeros(flat.layout.total, device=device)
            for entry, view in zip(flat.layout.entries, flat.views(whole), strict=True):
                view.copy_(tensor_parallel.part(entry.name, saved["state"][entry.name][key]))
            write_held(flat, key, whole[flat.held.start : flat.held.stop])
        for entry in flat.layout.entries:
            own = saved["state"].get(entry.name, {})
            tensors = {key: value for key, value in own.items() if key not in known}
            # Older states have one count for all parameters.
            count = int(saved_counts.get(entry.name, saved["updates"]))
            loaded[entry.name] = History(count, numbers.get(entry.name, {}), tensors)
    load_histories(flats, counts, rule, device, loaded)
