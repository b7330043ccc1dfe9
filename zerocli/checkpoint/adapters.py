"""Adapters and their base in files: a base's fingerprint, peft's folder of adapters, adapters merged into a base."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerocli.checkpoint.imports import fill, names_in_files, names_of
from zerocli.checkpoint.manifest import Damaged, Manifest
from zerocli.checkpoint.safetensors import Weights
from zerocli.checkpoint.state import spread
from zerocli.config import Config, ModelConfig
from zerocli.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, table_of
from zerocli.engine.engine import Engine
from zerocli.engine.settings import Base
from zerocli.engine.units.codecs import decode, encode
from zerocli.engine.units.divide import claim_parameters, find_units, repeated_units
from zerocli.errors import UserError
from zerocli.layout.codecs import GRAIN, is_encoded
from zerocli.layout.shards import round_up
from zerocli.models import build_model
from zerocli.models.adapters import adapters_of, matrix_of, row_lengths
from zerocli.models.hugging import Mapping
from zerocli.models.lora import (
    adapter_names,
    module_there,
    name_there,
    names_there,
    split_name,
    tied_names,
    trained_whole,
)
from zerocli.models.packed_adapters import tensor_of
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular

PREFIX = "base_model.model."
"""What peft's names begin with."""
SAMPLES, SAMPLE_NBYTES = 16, 4096
"""Pieces of a tensor that its fingerprint reads, and the bytes of one."""
PARAMETERS = "parameters/"


# -- the base ------------------------------------------------------------------------------------------------------


def base_of(config: Config, model: nn.Module) -> Base:
    """Return the frozen base of a run with adapters.

    A base of random weights follows from the seed and the model, which a resumed run has again.
    """
    own = adapter_names(model) | trained_whole(model, config.lora.save_modules, names_there(config.model))
    path = config.train.init_from
    about = f"{config.train.seed} {dataclasses.replace(config.model, folder='', compile=False)}"
    if path:
        _refuse_missing(path, "--set train.init_from=FOLDER, where it is now")
    known = fingerprint(path) if path else f"random weights {hashlib.sha256(about.encode()).hexdigest()}"
    return Base(known, lambda name: name not in own)


@functools.lru_cache(maxsize=4)
def fingerprint(path: str) -> str:
    """Return a hash of a model's weights: of all names, types and shapes, and of samples of each tensor.

    A whole hash would read the files twice. Any training, merging or rounding changes nearly every element, so it
    changes samples.
    """
    weights = Weights(path)
    digest = hashlib.sha256()
    for name, (file, entry) in sorted(weights.stored.items()):
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        last = max(0, entry.nbytes - SAMPLE_NBYTES)
        with file.open("rb") as opened:
            for place in sorted({last * each // (SAMPLES - 1) for each in range(SAMPLES)}):
                opened.seek(entry.start + place)
                digest.update(opened.read(min(SAMPLE_NBYTES, entry.nbytes)))
    return digest.hexdigest()


def refuse_other_base(config: Config, manifest: Manifest) -> None:
    """Raise UserError unless the weights that a checkpoint's adapters were trained on are still where they were."""
    said, path = manifest.values.get("base"), config.train.init_from
    _refuse_missing(path, "--base-dir FOLDER, where it is now")
    if fingerprint(path) != said:
        raise UserError(
            f"{path}: holds other weights than those that the adapters were trained on",
            hint="--base-dir FOLDER of the model that the run began from",
        )


def _refuse_missing(path: str, hint: str) -> None:
    if not os.path.exists(path):
        raise UserError(f"{path}: the base of the adapters is not there", hint=hint)


# -- peft's folder -------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_adapters(engine: Engine, folder: str, model: ModelConfig, kept: set[str]) -> None:
    """Fill the adapters, and what is trained whole, from a folder that peft or `export` wrote. Collective."""
    path = os.path.join(folder, ADAPTER_WEIGHTS)
    if not os.path.isfile(path):
        raise UserError(f"{folder}: has no {ADAPTER_WEIGHTS}", hint="the folder that peft's save_pretrained wrote")
    weights, theirs = Weights(path), names_there(model)
    wanted = adapter_names(engine.model) | kept
    by_name = {name: Mapping(name, (PREFIX + name_there(name, theirs),)) for name in names_of(engine) if name in wanted}
    used = {mapping.theirs[0] for mapping in by_name.values()}
    for name, others in tied_names(engine.model).items():
        for other in (PREFIX + name_there(each, theirs) for each in others if name in kept):
            _refuse_untied(folder, weights, by_name[name].theirs[0], other)
            used.add(other)
    if left := sorted(weights.entries.keys() - used):
        have = f"and {len(left) - 1} others have" if len(left) > 1 else "has"
        raise UserError(
            f"{folder}: {left[0]} {have} no counterpart in this model",
            hint="the model that the adapters were trained on, or without --lora FOLDER",
        )
    fill(engine, weights, by_name, "the model that these adapters were trained on, or --lora RANK for new ones")
    spread(engine)


def _refuse_untied(folder: str, weights: Weights, name: str, other: str) -> None:
    """Raise UserError unless two tensors of a folder, which are one parameter in the model, hold the same values."""
    sizes = {each: weights.entries[each][1].numel for each in (name, other) if each in weights.entries}
    ends = [each.removeprefix(PREFIX) for each in (name, other)]
    if len(sizes) == 1:
        if json.loads(read_regular(os.path.join(folder, ADAPTER_CONFIG), MAX_CONFIG_NBYTES)).get("ensure_weight_tying"):
            return
        missing = next(end for end, each in zip(ends, (name, other), strict=True) if each not in sizes)
        fact = f"it has no {missing}: it was trained with the two apart"
    elif len(sizes) == 2 and not torch.equal(*(weights.read(each, 0, size) for each, size in sizes.items())):
        fact = "differ there"
    else:
        return
    raise UserError(
        f"{folder}: {ends[0]} and {ends[1]} are one parameter in this model, and {fact}",
        hint="peft's ensure_weight_tying=True trains them as one; or --lora RANK for new adapters",
    )


def peft_config(
    config: Config, adapted: set[str], others: set[str] | None, packed: set[str], parameters: set[str] | None
) -> dict[str, Any]:
    """Return peft's adapter_config.json; `adapted` and `others` are the model's layers with and without adapters.

    `packed` are tensors with adapters, of all `parameters`. Where others are not known, whole names are written.
    """
    lora = config.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.train.init_from or None,
        "r": lora.rank,
        "rank_pattern": table_of(lora.rank_pattern),
        "lora_alpha": lora.alpha or 2 * lora.rank,
        "alpha_pattern": table_of(lora.alpha_pattern),
        "lora_dropout": lora.dropout,
        "target_modules": sorted(adapted) if others is None else shortest_names(adapted, others),
        "target_parameters": (sorted(packed) if parameters is None else shortest_names(packed, parameters - packed))
        or None,
        "modules_to_save": list(lora.save_modules) or None,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def shortest_names(adapted: set[str], others: set[str]) -> list[str]:
    """Return the ends of names that say which layers have adapters, and match none of the others."""
    found = set()
    for name in adapted:
        words = name.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        found.add(next((end for end in ends if not any(f".{each}".endswith(f".{end}") for each in others)), name))
    return sorted(found)


def adapter_mappings(
    manifest: Manifest, config: Config, kept: Sequence[Mapping] | None
) -> tuple[list[Mapping], dict[str, Any]]:
    """Return the names of a checkpoint's trained tensors in peft's folder, and its adapter_config.json.

    `kept` are the parameters of a model of transformers, by which layers without adapters are known.
    """
    theirs = names_there(config.model)
    names = [name.removeprefix(PARAMETERS) for name in manifest.tensors if name.startswith(PARAMETERS)]
    parts = {(layer, part) for layer, part, which in map(split_name, names) if which}
    if not parts:
        raise Damaged("it has no adapters, and its config says that it has")
    packed = {f"{layer}.{tensor}" for layer, part in parts if (tensor := tensor_of(part))}
    adapted = {module_there(layer, part, theirs) for layer, part in parts if not tensor_of(part)}
    every = {each for modules in theirs.values() for each in modules}
    every |= {mapping.ours.removesuffix(".weight") for mapping in kept or ()}
    tied: dict[str, list[str]] = manifest.values.get("tied") or {}
    mapped = [
        Mapping(name, (PREFIX + name_there(each, theirs),)) for name in names for each in (name, *tied.get(name, ()))
    ]
    parameters = {mapping.ours for mapping in kept} if kept is not None else None
    about = peft_config(config, adapted, every - adapted if every else None, packed, parameters)
    others = [name_there(each, theirs).split(".")[-2] for name in names for each in tied.get(name, ())]
    if others:  # peft has a copy of each of the modules
        about["modules_to_save"] = list(dict.fromkeys([*about["modules_to_save"], *others]))
    return mapped, about


# -- a base in 4 or 8 bits -----------------------------------------------------------------------------------------


class EncodedBase:
    """The matrices of a base's files as a run used them that stored its base in 4 or 8 bits: encoded and decoded."""

    def __init__(self, config: Config, weights: Weights, dtype: torch.dtype) -> None:
        self._codec, self._weights, self._dtype = config.lora.base, weights, dtype
        model = build_model(config.model, config.train.seq, "meta")
        claimed = claim_parameters(model, find_units(model))
        blocks = repeated_units([unit for unit, _ in claimed])
        trained = trained_whole(model, config.lora.save_modules, names_there(config.model))
        encoded = [
            name
            for unit, named in claimed
            for name, parameter in named
            if unit in blocks and is_encoded(name, tuple(parameter.shape)) and name not in trained
        ]
        every = [name for _, named in claimed for name, _ in named]
        by_name, _ = names_in_files(model, every, weights, config.model)
        self._of = {there: by_name[name] for name in encoded for there in by_name[name].theirs}
        self.whole = functools.lru_cache(maxsize=1)(self._whole)

    def holds(self, name: str) -> bool:
        """Return whether a tensor of the files, or what it is a part of, was encoded."""
        return name in self._of

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the files with the values that the run computed with, in its own shape."""
        return part_of(self.whole(self._of[name]), self._of[name], self._weights, name)

    def _whole(self, mapping: Mapping) -> torch.Tensor:
        """Return the elements of a parameter, which may be several tensors of the files; the last is kept."""
        flat = read_whole(mapping, self._weights)
        padded = torch.zeros(round_up(flat.numel(), GRAIN), dtype=self._dtype)
        padded[: flat.numel()] = flat
        decode(self._codec, encode(self._codec, padded), padded)
        return padded[: flat.numel()]


def read_whole(mapping: Mapping, weights: Weights) -> torch.Tensor:
    """Return the elements of a parameter, in their order, from the tensors of the files that it is split into."""
    entries = [weights.entries[there][1] for there in mapping.theirs]
    parts = [weights.read(entry.name, 0, entry.numel).view(entry.shape) for entry in entries]
    return torch.cat([(part.t() if mapping.transposed else part).reshape(-1) for part in parts])


def part_of(whole: torch.Tensor, mapping: Mapping, weights: Weights, name: str) -> torch.Tensor:
    """Return one of the tensors of the files that a parameter is split into, in its own shape: undoes `read_whole`."""
    entries = [weights.entries[there][1] for there in mapping.theirs]
    index = mapping.theirs.index(name)
    at, entry = sum(each.numel for each in entries[:index]), entries[index]
    values = whole[at : at + entry.numel]
    return values.view(tuple(reversed(entry.shape))).t() if mapping.transposed else values.view(entry.shape)


# -- DoRA ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def set_magnitudes(engine: Engine) -> None:
    """Write the lengths of the base's rows to the adapters that train them (DoRA), unit by unit. Collective."""
    for _, layer, part, adapter in adapters_of(engine.model):
        if adapter.magnitude is None:
            continue
        weight: Any = layer.weight
        with engine.gathered(weight), engine.gathered(adapter.magnitude, write=True):
            adapter.magnitude.copy_(row_lengths(matrix_of(layer), layer.lora.widths, part))  # type: ignore[union-attr, arg-type]
