"""Starting from weights: each rank reads the elements it owns, tensor by tensor; none ever holds the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from zerocli.checkpoint.boxes import Box, boxes_of
from zerocli.checkpoint.safetensors import Weights
from zerocli.checkpoint.sources import source_of
from zerocli.checkpoint.state import extent_of, spread
from zerocli.config import ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.startup import STARTUP
from zerocli.engine.unit import MASTER
from zerocli.errors import UserError
from zerocli.models import hugging
from zerocli.models.hugging import Mapping

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Types whose values need no scale: anything else is quantized."""


@torch.no_grad()
def load_weights(engine: Engine, path: str, model: ModelConfig) -> str:
    """Fill the engine's parameters from safetensors under our names or Hugging Face's; return which. Collective."""
    weights = Weights(path)
    entries = [entry for flat in engine.flats() for entry in flat.layout.entries]
    own = all(entry.name in weights.entries for entry in entries)
    reason = "" if own else hugging.known(model)
    if reason:
        missing = next(entry.name for entry in entries if entry.name not in weights.entries)
        raise UserError(f"{path}: has no tensor {missing}, and there are no Hugging Face names for it: {reason}")
    mapped = [Mapping(e.name, (e.name,)) for e in entries] if own else list(hugging.mappings(model))
    by_name = {mapping.ours: _found(mapping, weights) for mapping in mapped}
    shapes = {entry.name: extent_of(engine, entry.name, entry.shape) for entry in entries}
    problems = [line for name, extent in shapes.items() if (line := _mismatch(by_name[name], extent.shape, weights))]
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise UserError(*[f"{path}: {line}" for line in problems[:8]], *more, hint=_hint(path))
    engine.synchronize()
    for flat in engine.flats():
        source, covered = source_of(flat, MASTER)
        for entry in flat.layout.entries:
            mine = entry.span.intersect(flat.own)
            if not mine.numel:
                continue
            at = mine.start - covered.start
            for box in boxes_of(shapes[entry.name], entry.shape, mine.shifted(-entry.offset)):
                values = _read(by_name[entry.name], shapes[entry.name].shape, box, weights)
                source.write(at + box.start, values.to(source.dtype))
                STARTUP.move()
    spread(engine)
    names = "own names" if own else f"Hugging Face names ({model.family})"
    return names + _unused(weights, {name for mapping in by_name.values() for name in mapping.theirs})


def _unused(weights: Weights, used: set[str]) -> str:
    """Return a message about unused tensors: layers that this model lacks, biases, masks."""
    left = sorted(weights.entries.keys() - used)
    more = f" and {len(left) - 4} more" if len(left) > 4 else ""
    return f"; not used: {', '.join(left[:4])}{more}" if left else ""


def _hint(path: str) -> str:
    config = Path(path, "config.json")
    return f"zerocli train {config} --init-from {path}" if config.is_file() else "the config of the weights' own model"


def _found(mapping: Mapping, weights: Weights) -> Mapping:
    """Return the mapping with the names in the files: GPT-2's often lack the prefix `transformer.`."""
    if all(name in weights.entries for name in mapping.theirs):
        return mapping
    short = tuple(name.removeprefix("transformer.") for name in mapping.theirs)
    return Mapping(mapping.ours, short, mapping.rows, mapping.transposed, mapping.leading)


def _mismatch(mapping: Mapping, ours: tuple[int, ...], weights: Weights) -> str:
    for name, rows in zip(mapping.theirs, mapping.rows or ours[:1] or (1,), strict=True):
        if name not in weights.entries:
            return f"has no tensor {name}"
        entry = weights.entries[name][1]
        if entry.dtype not in WEIGHT_DTYPES:
            return f"{name} is {str(entry.dtype).removeprefix('torch.')}: quantized weights have no scale here"
        shape = entry.shape
        wanted = (rows, *ours[1:]) if ours else ()
        wanted = tuple(reversed(wanted)) if mapping.transposed else wanted
        longer = mapping.leading and len(shape) == len(wanted) and shape[0] >= wanted[0] and shape[1:] == wanted[1:]
        if shape != wanted and not longer:
            return f"{name} has shape {list(shape)}, not {list(wanted)}"
    return ""


def _read(mapping: Mapping, shape: tuple[int, ...], box: Box, weights: Weights) -> torch.Tensor:
    """Return a box of one of our parameters (of `shape`), flattened; reads only the rows that it covers."""
    if not shape:
        return weights.read(mapping.theirs[0], 0, 1)
    first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
    if mapping.transposed:  # our rows are their columns: the only case in which a tensor is held whole
        turned = weights.read(mapping.theirs[0], 0, math.prod(shape)).view(tuple(reversed(shape)))
        rows = turned.t()[first:last]
    else:
        rows = torch.cat(list(_rows(mapping, shape, first, last, weights))).view(last - first, *shape[1:])
    cut = tuple(slice(o, o + s) for o, s in zip(box.offsets[1:], box.sizes[1:], strict=True))
    return rows[(slice(None), *cut)].reshape(-1)


def _rows(mapping: Mapping, shape: tuple[int, ...], first: int, last: int, weights: Weights) -> Iterator[torch.Tensor]:
    """Yield rows [first, last) of one of our parameters, from each of the tensors that hold them."""
    inner, at = math.prod(shape[1:]), 0
    for name, rows in zip(mapping.theirs, mapping.rows or shape[:1], strict=True):
        low, high = max(first, at), min(last, at + rows)
        if low < high:
            yield weights.read(name, (low - at) * inner, (high - at) * inner)
        at += rows
