"""Starting from weights: each rank reads the elements it owns, tensor by tensor; none ever holds the whole model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from zerocli.checkpoint.sources import source_of
from zerocli.checkpoint.state import spread
from zerocli.config import ModelConfig
from zerocli.engine import Engine
from zerocli.errors import UserError
from zerocli.models import hugging
from zerocli.models.hugging import Mapping
from zerocli.safetensors import Weights
from zerocli.shards import Entry, Span
from zerocli.tensor_parallel import TensorParallel
from zerocli.unit import MASTER

CHUNK_NUMEL = 4 << 20
"""Elements read at a time."""


@torch.no_grad()
def load_weights(engine: Engine, path: str, model: ModelConfig) -> str:
    """Fill the engine's parameters from safetensors under our names or Hugging Face's; return which. Collective."""
    weights = Weights(path)
    tp = engine.tensor_parallel
    entries = [_whole(tp, entry) for flat in engine.flats() for entry in flat.layout.entries]
    own = all(entry.name in weights.entries for entry in entries)
    reason = "" if own else hugging.known(model)
    if reason:
        missing = next(entry.name for entry in entries if entry.name not in weights.entries)
        raise UserError(f"{path}: has no tensor {missing}, and there are no Hugging Face names for it: {reason}")
    mapped = [Mapping(e.name, (e.name,)) for e in entries] if own else list(hugging.mappings(model))
    by_name = {mapping.ours: _found(mapping, weights) for mapping in mapped}
    problems = [line for entry in entries if (line := _mismatch(by_name[entry.name], entry, weights))]
    if problems:
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise UserError(*[f"{path}: {line}" for line in problems[:8]], *more, hint="the model's own config.json")
    engine.settle()
    for flat in engine.flats():
        source, covered = source_of(flat, MASTER)
        for entry in flat.layout.entries:
            mine = entry.span.intersect(flat.own)
            if not mine.numel:
                continue
            run = mine.shifted(-entry.offset)
            for part, values in _read_part(tp, by_name[entry.name], entry, run, weights):
                source.write(entry.offset + part.start - covered.start, values.to(source.dtype))
    spread(engine)
    return "own names" if own else f"Hugging Face names ({model.family})"


def _whole(tp: TensorParallel, entry: Entry) -> Entry:
    return dataclasses.replace(entry, shape=tp.whole_shape(entry.name, entry.shape))


def _read_part(
    tp: TensorParallel, mapping: Mapping, entry: Entry, run: Span, weights: Weights
) -> Iterator[tuple[Span, torch.Tensor]]:
    """Yield (elements of this rank's parameter, their values); one that is split over ranks is first held whole."""
    if entry.name not in tp.cuts:
        yield from _read(mapping, entry, run, weights)
        return
    full = _whole(tp, entry)
    values = torch.cat([values for _, values in _read(mapping, full, Span(0, full.numel), weights)])
    yield run, tp.part(entry.name, values.view(full.shape)).reshape(-1)[run.start : run.stop]


def _found(mapping: Mapping, weights: Weights) -> Mapping:
    """Return the mapping with the names that the files really have: GPT-2's are often without `transformer.`."""
    if all(name in weights.entries for name in mapping.theirs):
        return mapping
    short = tuple(name.removeprefix("transformer.") for name in mapping.theirs)
    return Mapping(mapping.ours, short, mapping.rows, mapping.transposed, mapping.leading)


def _mismatch(mapping: Mapping, entry: Entry, weights: Weights) -> str:
    for name, rows in zip(mapping.theirs, mapping.rows or entry.shape[:1] or (1,), strict=True):
        if name not in weights.entries:
            return f"has no tensor {name}"
        shape = weights.entries[name][1].shape
        wanted = (rows, *entry.shape[1:]) if entry.shape else ()
        wanted = tuple(reversed(wanted)) if mapping.transposed else wanted
        longer = mapping.leading and len(shape) == len(wanted) and shape[0] >= wanted[0] and shape[1:] == wanted[1:]
        if shape != wanted and not longer:
            return f"{name} has shape {list(shape)}, not {list(wanted)}"
    return ""


def _read(mapping: Mapping, entry: Entry, run: Span, weights: Weights) -> Iterator[tuple[Span, torch.Tensor]]:
    """Yield (elements of our parameter, their values) that make up a run of it."""
    if mapping.transposed:  # elements of a run lie all over it: the one case in which a tensor is held whole
        shape = tuple(reversed(entry.shape))
        whole = weights.read(mapping.theirs[0], 0, entry.numel).view(shape).t().reshape(-1)
        yield run, whole[run.start : run.stop]
        return
    inner = math.prod(entry.shape[1:])
    at = 0
    for name, rows in zip(mapping.theirs, mapping.rows or entry.shape[:1] or (1,), strict=True):
        part = Span(at, at + rows * inner).intersect(run)
        for piece in part.pieces(CHUNK_NUMEL) if part.numel else ():
            yield piece, weights.read(name, piece.start - at, piece.stop - at)
        at += rows * inner
