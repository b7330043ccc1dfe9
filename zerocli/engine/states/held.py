"""This rank's part of a flat's values and states, on whichever tier it is, and the whole flat from all parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.checksum import checksums
from zerocli.engine.comm import Collectives
from zerocli.engine.grouped import Shards
from zerocli.engine.units.master import REMAINDER, join, narrow, split
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.errors import Refused


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


def whole_of(collectives: Shards, total: int, held: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of `total` elements, on the CPU, from every rank's held part. Collective."""
    if held.numel() == total:
        return held.detach().to("cpu", copy=True)
    whole = torch.empty(total, dtype=held.dtype, device=collectives.device)
    collectives.all_gather(whole, held).wait()
    return whole.cpu()


def whole_array(collectives: Shards, flat: Flat, name: str) -> torch.Tensor:
    """Return a flat's whole optimizer array (or the fp32 master), on the CPU. Collective."""
    return whole_of(collectives, flat.layout.total, read_held(flat, name, collectives.device))


def joined(flat: Flat, values: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return a whole flat of these values, in fp32 if floating-point; zero for missing values."""
    dtype = torch.float32 if flat.dtype.is_floating_point else flat.dtype
    whole = torch.zeros(flat.layout.total, dtype=dtype, device=device)
    for view, value in zip(flat.views(whole), values, strict=True):
        if value is not None:
            view.copy_(value)
    return whole


def whole_parameters(collectives: Shards, flat: Flat) -> torch.Tensor:
    """Return a flat's whole parameters, from the fp32 master if there is one. Collective."""
    if flat.trainable:
        return whole_array(collectives, flat, MASTER)
    if flat.resident is not None:
        return flat.resident.cpu()
    return whole_of(collectives, flat.layout.total, flat.read_own(collectives.device))


def load_whole(flat: Flat, whole: torch.Tensor) -> None:
    """Overwrite this rank's part of the flat's parameters from whole values."""
    if flat.trainable:
        write_held(flat, MASTER, whole[flat.held.start : flat.held.stop])
    mine = whole[flat.own.start : flat.own.stop]
    if flat.resident is not None:
        flat.resident.copy_(narrow(whole, flat.dtype))
    else:
        flat.write_own(narrow(mine, flat.dtype))


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
    else:
        flat.write_own(mine)


def adopt_edits(flats: Iterable[Flat], device: torch.device) -> None:
    """See `Engine.adopt_edits`."""
    for flat in flats:
        if flat.resident is not None:
            flat.restore_moved()
            if flat.trainable and flat.dtype != torch.float32 and flat.edited():
                adopt(flat, flat.resident, device)
                flat.note_values(compared=False)


_MOST_FLATS = 62


def may_differ(flats: Iterable[Flat], data_read: bool) -> int:
    """Return the flats whose whole parameters this rank may have edited since all ranks had the same, as bits.

    Of more flats than bits several share one.
    """
    mask = 0
    for place, flat in enumerate(flats):
        if flat.may_differ(data_read):
            mask |= 1 << place % _MOST_FLATS
    return mask


def refuse_different(flats: Iterable[Flat], mask: int, collectives: Collectives) -> None:
    """Raise Refused on all ranks unless they have the same parameters in these flats. Collective.

    Each rank updates its slices from its own values: another rank's edit of them would be lost without a word.
    """
    chosen = [flat for place, flat in enumerate(flats) if mask >> place % _MOST_FLATS & 1 and flat.resident is not None]
    if not chosen:
        return
    rows = collectives.gather_control(torch.cat([_sums(flat) for flat in chosen]))
    same = (rows == rows[0]).all(0).tolist()
    if all(same):
        for flat in chosen:
            flat.compared = flat.own_versions()
        return
    names = [entry.name for flat in chosen for entry in flat.layout.entries]
    differ = [name for name, equal in zip(names, same, strict=True) if not equal]
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    raise Refused(
        f"the ranks have changed {differ[0]}{more} in place to different values: make the same change on every rank "
        f"(random values from the same seed), or inside `with engine.gathered({differ[0]!r}, write=True)`, which keeps "
        "rank 0's"
    )


def _sums(flat: Flat) -> torch.Tensor:
    """Return a checksum of each parameter of a flat that this rank has whole."""
    assert flat.resident is not None
    memory, size = flat.resident.detach().view(torch.uint8), flat.resident.element_size()
    parts = [memory[each.offset * size : (each.offset + each.numel) * size] for each in flat.layout.entries]
    return torch.cat([checksums(part, (0, part.numel())) for part in parts])


def _edited(flat: Flat, held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return, for what this rank holds, where new parameters replace others."""
    if flat.resident is None:
        return held != _held_parameters(flat, device)
    edited, names = torch.zeros(flat.layout.total, dtype=torch.bool, device=device), set(flat.edited())
    for entry in flat.layout.entries:
        edited[entry.offset : entry.offset + entry.numel] = entry.name in names
    return edited[flat.held.start : flat.held.stop]
