"""Capture and restore the state of an engine: parts under the model's parameter names, and values.

Names: `parameters/NAME` (the fp32 master, or a frozen parameter as it is), `optimizer/STATE/NAME`, `kept/STATE/NAME` (a
state whose shape differs from the parameter's, replicated on every rank), `encoded/CODEC/NAME` (a frozen matrix in 4 or
8 bits, as it is stored), and for what differs between ranks `buffers/RANK/NAME`, `objects/RANK/NAME` (extra states and
sparse buffers, as torch.save writes them) and `random/RANK/WHERE`. None depends on world size, stage or placement, and
only `encoded/CODEC/RofN/NAME` on the degree of tensor parallelism.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerocli.checkpoint.boxes import Block, Box, Extent, boxes_of, whole
from zerocli.checkpoint.manifest import Damaged, Manifest
from zerocli.checkpoint.members import rank_of
from zerocli.checkpoint.sources import Part, Source, parameters_of, source_of, tensor_part
from zerocli.engine.optimizer.optim import History
from zerocli.engine.precision import PRECISIONS
from zerocli.engine.states.buffers import is_plain, write_buffer
from zerocli.engine.states.named import named_tensors
from zerocli.engine.states.states import histories, load_histories
from zerocli.engine.units.master import narrow
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.errors import Refused, UserError
from zerocli.layout.codecs import GRAIN, GRAIN_NBYTES
from zerocli.layout.shards import Entry, Span
from zerocli.models.lora import tied_names
from zerocli.ranks.encoding import decode, encode

if TYPE_CHECKING:
    from zerocli.engine.engine import Engine


class Mismatch(Exception):
    """A checkpoint of another model or optimizer than the engine's."""


def extent_of(engine: Engine, name: str, shape: tuple[int, ...]) -> Extent:
    """Return which part of the global parameter this rank has: all of it, or its part under tensor parallelism."""
    tp = engine.tensor_parallel
    cut = tp.cuts.get(name)
    if cut is None:
        return whole(shape)
    runs = cut.runs(tp.rank, tp.world)
    if cut.dim > 0:
        assert len(runs) == 1, "only rows are cut in sections"
        offsets = tuple(runs[0][0] if dim == cut.dim else 0 for dim in range(len(shape)))
        return Extent(cut.shape, (Block(Span(0, shape[0]), offsets),))
    blocks, at = [], 0
    for start, length in runs:
        blocks.append(Block(Span(at, at + length), (start, *(0,) * (len(shape) - 1))))
        at += length
    return Extent(cut.shape, tuple(blocks))


def state_parts(engine: Engine, written: bool = False) -> Iterator[Part]:
    """Yield the parts of parameters and optimizer states that this rank owns, in the order of the next update.

    Only those that it writes if `written`: of ranks that hold the same values, the first writes them.
    """
    if written and engine.replicas.rank > 0:
        return
    for flat in (flat for unit in engine.gatherer.forward_order() for flat in unit.flats):
        if all(_elsewhere(engine, entry.name) for entry in flat.layout.entries):
            continue
        names = [(MASTER, "parameters"), *((n, f"optimizer/{n}") for n in engine.rule.state_names)]
        for array, prefix in names if flat.trainable else names[:1]:
            yield from _parts(engine, flat, array, prefix, written)


def _elsewhere(engine: Engine, name: str) -> bool:
    """Return whether a parameter belongs to a frozen base, which checkpoints do not hold."""
    base = engine.settings.loaded_base
    return base is not None and base.holds(name)


def _parts(engine: Engine, flat: Flat, array: str, prefix: str, written: bool) -> Iterator[Part]:
    source, covered = source_of(flat, array)
    tp = engine.tensor_parallel
    for entry in flat.layout.entries:
        mine = entry.span.intersect(flat.own)
        if not entry.numel or _elsewhere(engine, entry.name):
            continue
        if flat.codec:
            yield _encoded_part(engine, flat, entry, mine, source)
            continue
        if written and tp.rank > 0 and tp.replicates(entry.name):
            continue
        extent = extent_of(engine, entry.name, entry.shape)
        run = mine.shifted(-entry.offset) if mine.numel else Span(0, 0)
        found = _boxes_at(extent, entry.shape, run, mine.start - covered.start)
        yield Part(f"{prefix}/{entry.name}", extent.shape, source, found, flat)


def _encoded_part(engine: Engine, flat: Flat, entry: Entry, mine: Span, source: Source) -> Part:
    """Return what this rank owns of an encoded parameter: a row of bytes for each grain."""
    tp, width = engine.tensor_parallel, GRAIN_NBYTES[flat.codec]
    shape = (-(-entry.numel // GRAIN), width)
    first, last = (mine.start - entry.offset) // GRAIN, -(-(mine.stop - entry.offset) // GRAIN)
    run = Span(first * width, last * width) if mine.numel else Span(0, 0)
    part = f"{tp.rank}of{tp.world}/" if tp.world > 1 else ""
    found = _boxes_at(whole(shape), shape, run, (mine.start - flat.own.start) // GRAIN * width)
    return Part(f"encoded/{flat.codec}/{part}{entry.name}", shape, source, found, flat)


@functools.lru_cache(maxsize=1 << 16)
def _boxes_at(extent: Extent, shape: tuple[int, ...], run: Span, at: int) -> tuple[Box, ...]:
    """Return the boxes of a run that begins at element `at` of its array; cached, as every save asks for the same."""
    return tuple(Box(box.offsets, box.sizes, box.start + at) for box in boxes_of(extent, shape, run))


# -- capturing -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def capture(engine: Engine) -> tuple[list[Part], dict[str, Any]]:
    """Return this rank's parts and the values of a step; nothing large is copied. Collective."""
    engine.synchronize()
    rank = rank_of(engine)
    parts = list(state_parts(engine, written=True))
    buffers = {name: _packed(b) for name, b in persistent_buffers(engine.model)}
    objects = {name: _written(name, value) for name, value, _ in saved_objects(engine.model)}
    differs = _differs_from_first(engine, buffers | objects)  # collective: every rank calls it, rank 0 too
    if rank == 0 or differs:
        parts += [tensor_part(f"buffers/{rank}/{name}", b) for name, b in buffers.items() if b.numel()]
        parts += [tensor_part(f"objects/{rank}/{name}", written) for name, written in objects.items()]
    parts += [tensor_part(f"random/{rank}/{where}", state) for where, (state, _) in _random_states(engine).items()]
    kept = histories(engine.trainable(), engine.counts, engine.rule)
    if rank == 0:
        parts += [
            tensor_part(f"kept/{key}/{name}", value.clone())
            for name, history in kept.items()
            for key, value in history.tensors.items()
        ]
    values = {
        "world": len(engine.ranks),
        "precision": engine.precision.name,
        "steps": engine.steps,
        "updates": engine.updates.item(),
        "loss_scale": engine.loss_scale.state(),
        "optimizer": {
            "states": list(engine.rule.state_names),
            "groups": engine.optimizer.saved_groups(),
            **_summary(kept),
        },
        "reduce_order": engine.reducer.order(),
    }
    if engine.settings.loaded_base is not None:
        values["base"] = engine.settings.loaded_base.fingerprint
        values["tied"] = tied_names(engine.model)
    return parts, values


def _summary(kept: dict[str, History]) -> dict[str, Any]:
    """Return counts and scalars: the most common values, and by name those of parameters that differ."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, history in kept.items():
        alike.setdefault((history.count, tuple(sorted(history.numbers.items()))), []).append(name)
    if not alike:
        return {"count": 0, "scalars": {}, "others": []}
    common = max(alike, key=lambda key: len(alike[key]))
    others = [
        {"count": count, "scalars": dict(numbers), "parameters": names}
        for (count, numbers), names in alike.items()
        if (count, numbers) != common
    ]
    return {"count": common[0], "scalars": dict(common[1]), "others": others}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's persistent buffers whose values are elements of one storage; others are `saved_objects`."""
    for name, value in named_tensors(model):
        if not isinstance(value, nn.Parameter) and is_plain(value):
            yield name, value


def saved_objects(model: nn.Module) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    """Yield (name, value, function that restores it) of extra states and of buffers that are sparse or wrapped."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}_extra_state", module.get_extra_state(), module.set_extra_state
    for name, value in named_tensors(model):
        if not isinstance(value, nn.Parameter) and not is_plain(value):
            yield name, value.detach(), functools.partial(write_buffer, name, value)


def _packed(buffer: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a buffer."""
    return buffer.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _written(name: str, value: Any) -> torch.Tensor:
    """Return a plain value as bytes; Refused if it is none."""
    try:
        return torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    except (TypeError, ValueError, RuntimeError) as error:
        raise Refused(
            f"{name} is a {type(value).__name__} that a checkpoint cannot hold: make it of tensors, numbers, strings, "
            f"lists and dicts ({str(error).splitlines()[0][:120] if str(error) else type(error).__name__})"
        ) from None


def _restore_value(take: Callable[[Any], None], written: torch.Tensor) -> None:
    take(decode(written.numpy().tobytes()))


def _differs_from_first(engine: Engine, buffers: dict[str, torch.Tensor]) -> bool:
    """Return whether this rank's buffers (running statistics) differ from rank 0's. Collective if there are any."""
    if not buffers:
        return False
    digest = hashlib.sha256()
    for name, buffer in buffers.items():
        digest.update(name.encode() + buffer.cpu().view(-1).view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=engine.device)
    everyone = engine.gather_control(mine)
    return not torch.equal(everyone[0], mine)


def _random_states(engine: Engine) -> dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    """Return this rank's random states, each with the function that restores it."""
    states: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], None]]]
    states = {"cpu": (torch.get_rng_state(), torch.set_rng_state)}
    if engine.device.type == "cuda":
        restore = functools.partial(torch.cuda.set_rng_state, device=engine.device)
        states["cuda"] = torch.cuda.get_rng_state(engine.device), restore
    return states


# -- restoring -----------------------------------------------------------------------------------------------------


def wanted(
    engine: Engine, manifest: Manifest, training: bool = True
) -> tuple[dict[str, Part], list[Callable[[], None]]]:
    """Return the parts to fill from a checkpoint, and functions to call once they are filled.

    Without `training`, those are parameters and buffers: the engine's parameters are frozen, and it has no optimizer.
    Raises Mismatch, with every difference, if the checkpoint is of another model or optimizer, and UserError if its
    adapters are of another base.
    """
    base = engine.settings.loaded_base
    if base is not None and manifest.values.get("base", base.fingerprint) != base.fingerprint:
        raise UserError(
            "the checkpoint's adapters were trained on another base: other weights than those of train.init_from",
            hint="--set train.init_from=FOLDER of the model that the run began from",
        )
    parts = {part.name: part for part in state_parts(engine)}
    afterwards: list[Callable[[], None]] = []

    def land(name: str, shape: tuple[int, ...], dtype: torch.dtype, take: Callable[[torch.Tensor], Any]) -> None:
        landed = torch.zeros(shape, dtype=dtype)
        parts[name] = tensor_part(name, landed)
        afterwards.append(lambda: take(landed))

    rank = rank_of(engine)
    own = (f"buffers/{rank}/", f"objects/{rank}/")
    # A new rank, or one whose buffers equalled rank 0's, starts from rank 0's.
    source = rank if any(name.startswith(own) for name in manifest.tensors) else 0
    for name, buffer in persistent_buffers(engine.model):
        if buffer.numel():
            land(
                f"buffers/{source}/{name}",
                tuple(buffer.shape),
                buffer.dtype,
                functools.partial(write_buffer, name, buffer),
            )
    for name, _, restore in saved_objects(engine.model):
        written = manifest.tensors.get(f"objects/{source}/{name}")
        shape = written.shape if written is not None else (0,)  # compare() reports one that is missing
        land(f"objects/{source}/{name}", shape, torch.uint8, functools.partial(_restore_value, restore))
    compare(parts, manifest, ("parameters/", "optimizer/") if training else ("parameters/",))
    if not training:
        return parts, afterwards
    kept: dict[str, dict[str, torch.Tensor]] = {}
    for name, saved in manifest.tensors.items():
        if name.startswith("kept/"):
            _, key, owner = name.split("/", 2)
            land(name, saved.shape, saved.dtype, functools.partial(kept.setdefault(owner, {}).__setitem__, key))
    afterwards.append(lambda: restore_histories(engine, manifest.values, kept))
    for where, (now, take) in _random_states(engine).items():
        name = f"random/{rank}/{where}"
        # With another number of ranks the saved random states do not apply.
        if name not in manifest.tensors or manifest.values.get("world") != len(engine.ranks):
            continue
        saved = manifest.tensors[name]
        if (saved.dtype, saved.shape) != (now.dtype, tuple(now.shape)):
            raise Damaged(
                f"its {name} is not a random state of this version of torch: {list(saved.shape)} of {saved.dtype}"
            )
        land(name, saved.shape, saved.dtype, take)
    return parts, afterwards


def compare(parts: dict[str, Part], manifest: Manifest, kinds: tuple[str, ...]) -> None:
    """Raise Mismatch unless the checkpoint's tensors of these kinds are the parts, of their shapes and dtypes."""
    saved = manifest.tensors
    wrong = [
        f"{name} has shape {list(saved[name].shape)} in the checkpoint, {list(part.shape)} here"
        for name, part in parts.items()
        if name in saved and saved[name].shape != part.shape
    ]
    wrong += [
        f"{name} is {saved[name].dtype} in the checkpoint, {part.dtype} here"
        for name, part in parts.items()
        if name in saved and saved[name].dtype.is_floating_point != part.dtype.is_floating_point
    ]
    missing = [name for name in parts if name not in saved]
    unknown = [name for name in saved if name.startswith(kinds) and name not in parts]
    lines = [
        *wrong[:5],
        *([f"the checkpoint has no {_listed(missing)}"] if missing else []),
        *([f"only the checkpoint has {_listed(unknown)}"] if unknown else []),
    ]
    if lines:
        raise Mismatch("; ".join(lines))


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names, key=lambda name: (not name.startswith("parameters/"), name))[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def restore_values(engine: Engine, values: dict[str, Any]) -> None:
    """Restore the counters of a checkpoint; raise Damaged if they are invalid."""
    try:
        steps, updates, scale = values["steps"], values["updates"], values["loss_scale"]
        _check_numbers(steps, updates, *scale.values())
        if values["precision"] not in PRECISIONS:
            raise ValueError(f"precision {str(values['precision'])[:40]!r} is unknown")
        if steps < 0 or not 0 <= updates <= steps or scale["scale"] < 0:
            raise ValueError(f"{updates} updates in {steps} steps, loss scale {scale['scale']}")
        engine.steps = int(steps)
        # A new tensor: an update may still be reading the old one.
        engine.updates = torch.full_like(engine.updates, float(updates))
        if engine.precision.name == values["precision"]:  # a run in another precision starts with its own scale
            engine.loss_scale.load(scale)
        engine.optimizer.load_groups(values["optimizer"].get("groups"), engine.steps)
        engine.reducer.adopt(values["reduce_order"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Damaged(f"its values are malformed ({type(error).__name__}: {str(error)[:200]})") from None


def _check_numbers(*numbers: Any) -> None:
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{str(number)[:40]!r} is not a number")


def restore_histories(engine: Engine, values: dict[str, Any], tensors: dict[str, dict[str, torch.Tensor]]) -> None:
    """Restore the optimizer's per-parameter values other than arrays; raise Damaged if they are malformed.

    Older checkpoints have one number of updates for all parameters.
    """
    try:
        saved, updates = values["optimizer"], values["updates"]
        rest = (saved.get("count", updates), saved["scalars"])
        listed = {name: (row["count"], row["scalars"]) for row in saved.get("others", ()) for name in row["parameters"]}
        for count, numbers in {id(pair): pair for pair in (rest, *listed.values())}.values():
            _check_numbers(count, *numbers.values())
            if not 0 <= count <= updates:
                raise ValueError(f"a parameter with {count} updates of {updates}")
        names = [entry.name for flat in engine.trainable() for entry in flat.layout.entries]
        found = {name: listed.get(name, rest) for name in names}
        loaded = {n: History(int(c), s, tensors.get(n, {})) for n, (c, s) in found.items()}
        load_histories(engine.trainable(), engine.counts, engine.rule, engine.device, loaded)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Damaged(f"its values are malformed ({type(error).__name__}: {str(error)[:200]})") from None


@torch.no_grad()
def spread(engine: Engine) -> None:
    """Fill what depends on the slices that ranks own, after every rank has loaded its slices. Collective."""
    for flat in engine.flats():
        if flat.trainable:
            _spread_held(engine, flat)
            _spread_parameters(flat)
        if flat.resident is not None and flat.shard is not None:
            engine.shards.all_gather(flat.resident, flat.shard).wait()
    engine.hooks.parameters_changed(engine.flats())
    engine.forget_traffic()


def _spread_held(engine: Engine, flat: Flat) -> None:
    """Gather the other ranks' slices of optimizer states if every rank keeps all of them."""
    if flat.held == flat.own:
        return
    high = flat.held_parameters if flat.split else None  # the high bits of a split master
    for array in (flat.master, flat.remainder, high, *flat.states.values()):
        if array is not None:
            array = array.view(torch.bfloat16) if array.dtype == torch.int16 else array  # bytes that collectives know
            engine.shards.all_gather(array, array[flat.own.start : flat.own.stop]).wait()


def _spread_parameters(flat: Flat) -> None:
    """Round the master to the parameters, in chunks, unless they are a part of it."""
    if flat.dtype == torch.float32 or flat.split:
        return
    master, covered = source_of(flat, MASTER)
    target = parameters_of(flat)
    for piece in flat.own.pieces(CHUNK_NUMEL):
        values = torch.empty(piece.numel, dtype=torch.float32)
        master.read(piece.start - covered.start, values)()
        target.write(piece.start - flat.own.start, narrow(values, flat.dtype))


CHUNK_NUMEL = 4 << 20
"""Elements of the master in host memory at a time."""
