"""The names and shapes in which `transformers` stores a model's tensors, mapped to the module's own.

Most are the module's own names. The exceptions are transformers' to know, so its tables are asked: renamed families, a
prefix that the files of a base model lack, tied weights that are stored once, and experts that are one parameter in
memory and a tensor each in the files. All of them are runs of consecutive elements (`Mapping.theirs`), so a rank reads
just the elements that it owns. A conversion that is not such a run (a transposition, an interleaving) is refused.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterable
from collections.abc import Mapping as Table
from dataclasses import dataclass
from typing import Any

from torch import nn

from zerocli.config import hub
from zerocli.errors import UserError
from zerocli.models.hugging import Mapping

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Names:
    """Where a model's tensors are in files: one mapping for each parameter and persistent buffer that was found."""

    mappings: tuple[Mapping, ...]
    missing: tuple[str, ...] = ()
    doubled: tuple[tuple[str, str], ...] = ()
    """Pairs of tensors in the files that are one parameter of the model: their values must be equal."""


def in_files(model: nn.Module, shapes: Table[str, Shape]) -> Names:
    """Return where the model's tensors are in files with these tensors; UserError for a conversion that is not read."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    with hub.offline():
        found = _grouped(model, state, shapes)
    first = {id(value): name for name, value in reversed(state.items())}
    first |= {id(value): name for name, value in model.named_parameters()}
    mappings: dict[str, Mapping] = {}
    doubled = []
    for name, theirs in found.items():
        own = first[id(state[name])]
        parts = tuple(shapes[each] for each in theirs)
        if own in mappings:
            doubled.append((mappings[own].theirs[0], theirs[0]))
        else:
            mappings[own] = Mapping(own, theirs, shapes=parts)
    wanted = dict.fromkeys(first[id(value)] for value in state.values())
    optional = [re.compile(each) for each in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]
    missing = [
        name
        for name in wanted
        if name not in mappings
        and (isinstance(state[name], nn.Parameter) or not any(each.search(name) for each in optional))
    ]
    return Names(tuple(mappings[n] for n in wanted if n in mappings), tuple(missing), tuple(doubled))


def as_written(model: nn.Module) -> Names:
    """Return the names that transformers' `save_pretrained` gives the model's tensors, each tied weight once."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    state = {name: value for name, value in model.state_dict().items() if name not in tied}
    meta = {name: value.to("meta") for name, value in state.items()}
    with hub.offline():
        loading = _loading()
        written = loading.revert_weight_conversion(model, meta) if loading is not None else meta
    return in_files(model, {name: tuple(value.shape) for name, value in written.items()})


def _loading() -> Any:
    """Return transformers' module of conversions; None in versions before 5, which stored what they held."""
    try:
        return importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None


def _grouped(model: Any, state: Table[str, Any], shapes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the files' tensors that make up each of the model's, in the order of their elements."""
    loading = _loading()
    transforms: list[Any] = []
    if loading is not None:
        transforms = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    of_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, dict[str | None, list[str]]] = {}
    for key in sorted(shapes, key=_natural):
        name, pattern = _renamed(loading, key, renamings, converters, model.base_model_prefix, state)
        if name in state:
            found.setdefault(name, {}).setdefault(pattern, []).append(key)
    ordered = {}
    for name, by_pattern in found.items():
        pattern = next(iter(by_pattern))
        plain = pattern is None and len(by_pattern[None]) == 1
        ordered[name] = tuple(by_pattern[None]) if plain else _in_order(name, by_pattern, of_pattern.get(pattern))
    return ordered


def _renamed(
    loading: Any, key: str, renamings: list[Any], converters: list[Any], prefix: str, state: Table[str, Any]
) -> tuple[str, str | None]:
    """Return the model's name of a tensor in the files, as transformers finds it, and the pattern of its conversion."""
    if loading is None:
        short = key.removeprefix(f"{prefix}.")
        return next((name for name in (key, f"{prefix}.{key}", short) if name in state), key), None
    name, pattern = loading.rename_source_key(key, renamings, converters, prefix, state)
    if name not in state and key in state:
        name, pattern = loading.rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
    return name, pattern


def _in_order(name: str, by_pattern: dict[str | None, list[str]], converter: Any) -> tuple[str, ...]:
    """Return the tensors that are stacked or joined to one parameter, in the order of its elements."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in getattr(converter, "operations", ())]
    lists = [by_pattern[p] for p in getattr(converter, "source_patterns", ()) if p in by_pattern]
    if len(by_pattern) == len(lists) and len(converter.target_patterns) == 1:
        if steps in ([("MergeModulelist", 0)], [("Concatenate", 0)]):
            return tuple(key for keys in lists for key in keys)
        # Stacked along a new first dimension, then joined along the second: an expert's parts are consecutive.
        if steps == [("MergeModulelist", 0), ("Concatenate", 1)] and len({len(keys) for keys in lists}) == 1:
            return tuple(key for together in zip(*lists, strict=True) for key in together)
    keys = [key for keys in by_pattern.values() for key in keys]
    how = " and ".join(step for step, _ in steps) or "joining them"
    raise UserError(
        f"{keys[0]}: transformers makes {name} of {len(keys)} tensors by {how}, which is not done shard by shard",
        hint="zerocli train package.module:factory, with a function that builds the model",
    )


def shapes_fit(mapping: Mapping, shape: Shape) -> bool:
    """Return whether the files' tensors fill a parameter of this shape, element by element."""
    if len(mapping.theirs) == 1:
        return mapping.shapes[0] == shape
    inner = [each[-1:] == shape[-1:] for each in mapping.shapes]
    return all(inner) and sum(math.prod(each) for each in mapping.shapes) == math.prod(shape)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts `experts.10` after `experts.9`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
