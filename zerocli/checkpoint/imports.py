"""Starting from weights: each rank reads the elements it owns, tensor by tensor; none ever holds the whole model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from zerocli.checkpoint.boxes import Box, Extent, boxes_of
from zerocli.checkpoint.filling import Filler, Read, put
from zerocli.checkpoint.safetensors import Weights
from zerocli.checkpoint.sources import Memory, Source, source_of
from zerocli.checkpoint.state import extent_of, persistent_buffers, spread
from zerocli.config import ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.errors import UserError
from zerocli.layout.shards import Span
from zerocli.models import hugging
from zerocli.models.hugging import Mapping
from zerocli.models.lora import adapter_names
from zerocli.ranks.startup import STARTUP

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types whose values need no scale: anything else is quantized."""
PIECE_NUMEL = 4 << 20
"""Elements of a tensor that are compared or decoded together."""


@torch.no_grad()
def load_weights(engine: Engine, path: str, model: ModelConfig) -> str:
    """Fill the engine's parameters from safetensors under our names or Hugging Face's; return which. Collective.

    Of an engine with a frozen base, these are the base's parameters, and those of modules that are trained whole.
    """
    weights = Weights(path)
    adapters = adapter_names(engine.model)
    wanted = [name for name in names_of(engine) if name not in adapters]
    by_name, names = names_in_files(engine.model, wanted, weights, model)
    fill(engine, weights, {name: by_name[name] for name in wanted}, _hint(path, model))
    for name, buffer in persistent_buffers(engine.model):
        if name in by_name:
            values = weights.read(by_name[name].theirs[0], 0, buffer.numel())
            buffer.copy_(values.view(buffer.shape))
    spread(engine)
    return _said(names, by_name, weights)


def check_weights(module: nn.Module, path: str, model: ModelConfig) -> str:
    """Return what `load_weights` would, for a model on meta; UserError where it would refuse the files' headers."""
    weights, adapters = Weights(path), adapter_names(module)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if name not in adapters}
    by_name, names = names_in_files(module, list(shapes), weights, model, compared=False)
    _refuse_others(shapes, by_name, weights, _hint(path, model))
    return _said(names, by_name, weights)


def names_in_files(
    module: nn.Module, wanted: list[str], weights: Weights, model: ModelConfig, compared: bool = True
) -> tuple[dict[str, Mapping], str]:
    """Return the tensors in the files of each of these parameters of a module, and whose names they have.

    Unless `compared`, two tensors of one parameter are taken to have the same values.
    """
    if model.code == "transformers":
        return _names_of_transformers(module, weights, str(weights.path), model, compared)
    return _names_of_ours(wanted, weights, str(weights.path), model)


def names_of(engine: Engine) -> list[str]:
    """Return the names of the engine's parameters."""
    return [entry.name for flat in engine.flats() for entry in flat.layout.entries]


@torch.no_grad()
def fill(engine: Engine, weights: Weights, by_name: dict[str, Mapping], hint: str) -> None:
    """Fill some of the engine's parameters, by name, from the tensors of files; `spread` must follow."""
    flats = list(engine.flats())
    entries = [entry for flat in flats for entry in flat.layout.entries if entry.name in by_name]
    shapes = {entry.name: extent_of(engine, entry.name, entry.shape) for entry in entries}
    _refuse_others({name: extent.shape for name, extent in shapes.items()}, by_name, weights, hint)
    engine.synchronize()
    reads: list[Read] = []
    others: list[Callable[[], None]] = []
    for flat in flats:
        if flat.codec:
            continue
        found = _reads(flat, source_of(flat, MASTER), by_name, shapes, weights)
        reads += found[0]
        others += found[1]
    kept = sum(flat.spec.own_nbytes for flat in flats)
    Filler(engine.device, kept).run(reads, others)
    encoded = [flat for flat in flats if flat.codec and any(entry.name in by_name for entry in flat.layout.entries)]
    # One flat at a time is whole, on the device and in the same memory; what stays of it is encoded.
    nbytes = max((flat.own.numel * flat.dtype.itemsize for flat in encoded), default=0)
    room = torch.empty(nbytes, dtype=torch.uint8, device=engine.device)
    for flat in encoded:
        values = room[: flat.own.numel * flat.dtype.itemsize].view(flat.dtype).zero_()
        if values.is_cuda:  # threads that read write to it on streams of their own
            torch.cuda.current_stream(engine.device).synchronize()
        Filler(engine.device, kept).run(*_reads(flat, (Memory(values), flat.own), by_name, shapes, weights))
        flat.write_own(values)


def _reads(
    flat: Flat,
    target: tuple[Source, Span],
    by_name: dict[str, Mapping],
    shapes: dict[str, Extent],
    weights: Weights,
) -> tuple[list[Read], list[Callable[[], None]]]:
    """Return the reads that fill what this rank owns of a flat, and functions for what is not a run of elements.

    `target` is what they fill, and the span of the flat that it covers.
    """
    reads: list[Read] = []
    others: list[Callable[[], None]] = []
    source, covered = target
    for entry in flat.layout.entries:
        mine = entry.span.intersect(flat.own)
        if entry.name not in by_name or not mine.numel:
            continue
        mapping, shape, at = by_name[entry.name], shapes[entry.name].shape, mine.start - covered.start
        run = mine.shifted(-entry.offset)
        if mapping.transposed or shape != entry.shape:
            for box in boxes_of(shapes[entry.name], entry.shape, run):
                others.append(functools.partial(_write, source, at + box.start, mapping, shape, box, weights))
            continue
        inner, first = math.prod(shape[1:]), 0
        counts = [math.prod(each) for each in mapping.shapes]
        counts = counts or [rows * inner for rows in mapping.rows or shape[:1] or (1,)]
        for name, numel in zip(mapping.theirs, counts, strict=True):
            low, high, start = max(run.start, first), min(run.stop, first + numel), first
            first += numel
            if low >= high:
                continue
            file, stored = weights.entries[name]
            place = at + low - run.start
            if weights.is_decoded(name):
                others.append(functools.partial(_decode, source, place, weights, name, low - start, high - start))
            else:
                offset = stored.start + (low - start) * stored.dtype.itemsize
                reads.append(Read(file, offset, high - low, stored.dtype, source, place))
    return reads, others


# -- names -------------------------------------------------------------------------------------------------------------


def _names_of_ours(
    entries: list[str], weights: Weights, path: str, model: ModelConfig
) -> tuple[dict[str, Mapping], str]:
    """Return the tensors of each of our parameters, and whose names they have."""
    own = all(name in weights.entries for name in entries)
    reason = "" if own else hugging.known(model)
    if reason:
        missing = next(name for name in entries if name not in weights.entries)
        raise UserError(f"{path}: has no tensor {missing}, and there are no Hugging Face names for it: {reason}")
    mapped = [Mapping(name, (name,)) for name in entries] if own else list(hugging.mappings(model))
    names = "own names" if own else f"Hugging Face names ({hugging.type_of(model) or model.family})"
    return {mapping.ours: _found(mapping, weights) for mapping in mapped}, names


def _names_of_transformers(
    module: nn.Module, weights: Weights, path: str, model: ModelConfig, compared: bool
) -> tuple[dict[str, Mapping], str]:
    """Return the tensors of each parameter and buffer of a module of transformers; UserError if one has none."""
    from zerocli.models import transformers_names

    found = transformers_names.in_files(module, {name: e.shape for name, (_, e) in weights.entries.items()})
    adapters = adapter_names(module)
    missing = [name for name in found.missing if name not in adapters]
    if missing:
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        listed = ", ".join(missing[:8])
        raise UserError(f"{path}: has no values for {listed}{more}", hint=_hint(path, model))
    for first, second in found.doubled:
        if compared and not _equal(weights, first, second):
            raise UserError(
                f"{path}: {first} and {second} differ, and the model's config.json says that they are one parameter",
                hint='"tie_word_embeddings": false in config.json, if they were trained apart',
            )
    return {mapping.ours: mapping for mapping in found.mappings}, "transformers' own names"


def _equal(weights: Weights, first: str, second: str) -> bool:
    """Return whether two tensors in the files have the same values."""
    numel = weights.entries[first][1].numel
    if weights.entries[second][1].numel != numel:
        return False
    for start, stop in weights.pieces(first, 0, numel, PIECE_NUMEL):
        STARTUP.move()
        if not torch.equal(weights.read(first, start, stop), weights.read(second, start, stop)):
            return False
    return True


def _said(names: str, by_name: dict[str, Mapping], weights: Weights) -> str:
    """Return whose names the files have, how they are quantized, and what is not used: other layers, biases, masks."""
    decoded = f", decoded from {weights.method}" if weights.method else ""
    left = sorted(weights.entries.keys() - {name for mapping in by_name.values() for name in mapping.theirs})
    more = f" and {len(left) - 4} more" if len(left) > 4 else ""
    return names + decoded + (f"; not used: {', '.join(left[:4])}{more}" if left else "")


def _hint(path: str, model: ModelConfig) -> str:
    config = Path(path, "config.json")
    if model.folder and Path(model.folder).absolute() == Path(path).absolute():
        return "the same without --set model.KEY; else the config.json that belongs to these weights"
    return f"zerocli train {config} --init-from {path}" if config.is_file() else "the config of the weights' own model"


def _found(mapping: Mapping, weights: Weights) -> Mapping:
    """Return the mapping with the names in the files: GPT-2's often lack the prefix `transformer.`."""
    if all(name in weights.entries for name in mapping.theirs):
        return mapping
    short = tuple(name.removeprefix("transformer.") for name in mapping.theirs)
    return Mapping(mapping.ours, short, mapping.rows, mapping.transposed, mapping.leading)


def _refuse_others(
    shapes: dict[str, tuple[int, ...]], by_name: dict[str, Mapping], weights: Weights, hint: str
) -> None:
    """Raise UserError with each parameter of these names and shapes that cannot be filled from the files."""
    problems = [line for name, shape in shapes.items() if (line := _mismatch(by_name[name], shape, weights))]
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise UserError(*[f"{weights.path}: {line}" for line in problems[:8]], *more, hint=hint)


def _mismatch(mapping: Mapping, ours: tuple[int, ...], weights: Weights) -> str:
    """Return why a parameter cannot be filled from its tensors in the files; empty if it can."""
    for name in mapping.theirs:
        if name not in weights.entries:
            return f"has no tensor {name}"
        entry = weights.entries[name][1]
        if entry.dtype not in WEIGHT_DTYPES:
            return f"{name} is {str(entry.dtype).removeprefix('torch.')}: quantized weights have no scale here"
    if mapping.shapes:
        from zerocli.models.transformers_names import shapes_fit

        fact = f"{mapping.theirs[0]} has shape {list(mapping.shapes[0])}"
        return "" if shapes_fit(mapping, ours) else f"{fact}, and {mapping.ours} {list(ours)}"
    for name, rows in zip(mapping.theirs, mapping.rows or ours[:1] or (1,), strict=True):
        shape = weights.entries[name][1].shape
        wanted = (rows, *ours[1:]) if ours else ()
        wanted = tuple(reversed(wanted)) if mapping.transposed else wanted
        longer = mapping.leading and len(shape) == len(wanted) and shape[0] >= wanted[0] and shape[1:] == wanted[1:]
        if shape != wanted and not longer:
            return f"{name} has shape {list(shape)}, not {list(wanted)}"
    return ""


# -- reading -----------------------------------------------------------------------------------------------------------


def _decode(source: Source, at: int, weights: Weights, name: str, start: int, stop: int) -> None:
    """Write elements [start, stop) of a decoded tensor to a source, some at a time."""
    for first, last in weights.pieces(name, start, stop, PIECE_NUMEL):
        put(source, at + first - start, weights.read(name, first, last))
        STARTUP.move()


def _write(source: Source, at: int, mapping: Mapping, shape: tuple[int, ...], box: Box, weights: Weights) -> None:
    """Write a box of one of our parameters (of `shape`) to element `at` of a source; reads only the rows it covers."""
    if not shape:
        values = weights.read(mapping.theirs[0], 0, 1)
    else:
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        if mapping.transposed:  # our rows are their columns: the only case in which a tensor is held whole
            turned = weights.read(mapping.theirs[0], 0, math.prod(shape)).view(tuple(reversed(shape)))
            rows = turned.t()[first:last]
        else:
            rows = torch.cat(list(_rows(mapping, shape, first, last, weights))).view(last - first, *shape[1:])
        cut = tuple(slice(o, o + s) for o, s in zip(box.offsets[1:], box.sizes[1:], strict=True))
        values = rows[(slice(None), *cut)].reshape(-1)
    source.write(at, values.to(source.dtype))


def _rows(mapping: Mapping, shape: tuple[int, ...], first: int, last: int, weights: Weights) -> Iterator[torch.Tensor]:
    """Yield rows [first, last) of one of our parameters, from each of the tensors that hold them."""
    inner, at = math.prod(shape[1:]), 0
    for name, rows in zip(mapping.theirs, mapping.rows or shape[:1], strict=True):
        low, high = max(first, at), min(last, at + rows)
        if low < high:
            yield weights.read(name, (low - at) * inner, (high - at) * inner)
        at += rows
