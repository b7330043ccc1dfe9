"""Export of a run that trained adapters: as peft's folder, or merged into the base's own files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zerocli.checkpoint import safetensors, source_files
from zerocli.checkpoint.adapters import (
    PARAMETERS,
    EncodedBase,
    adapter_mappings,
    part_of,
    read_whole,
    refuse_other_base,
)
from zerocli.checkpoint.export import (
    DTYPES,
    Exported,
    Row,
    dtype_key,
    dtype_of,
    export_folder,
    write_files,
    write_parameters,
)
from zerocli.checkpoint.imports import names_in_files
from zerocli.checkpoint.manifest import Manifest, name_of
from zerocli.checkpoint.reader import Reader
from zerocli.checkpoint.safetensors import Entry, Weights
from zerocli.config import Config, hub
from zerocli.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, factor_of
from zerocli.engine.precision import PRECISIONS
from zerocli.errors import UserError
from zerocli.layout.codecs import CODECS
from zerocli.models import build_model, hugging
from zerocli.models.hugging import Mapping
from zerocli.models.lora import module_there, name_there, names_there, split_name
from zerocli.models.packed_adapters import add_packed, is_transposed, tensor_of
from zerocli.regular_files import write_text

CONV1D = ("gpt2", "openai-gpt", "imagegpt")
"""Families of transformers whose layers keep their matrices transposed."""
PIECE_NUMEL = 4 << 20
"""Elements of a tensor without adapters that are copied at a time."""


def write_adapters(path: Path, manifest: Manifest, config: Config, out: Path, dtype: str) -> Exported:
    """Write adapters, and what was trained whole beside them, as peft's folder."""
    source = path.absolute().parent.parent / source_files.FOLDER
    kept = source_files.names_of(source) if config.model.code == "transformers" else None
    mapped, about = adapter_mappings(manifest, config, kept)
    about["fan_in_fan_out"] = has_conv1d(config, source)
    dtype, why = dtype_of(dtype, None)
    with export_folder(out) as aside:
        write_parameters(path, manifest, mapped, aside / ADAPTER_WEIGHTS, DTYPES[dtype])
        write_text(aside / ADAPTER_CONFIG, json.dumps(about, indent=2) + "\n")
    numel = sum(math.prod(manifest.tensors[PARAMETERS + mapping.ours].shape) for mapping in mapped)
    note = f"adapters in peft's format for {config.train.init_from or 'a base of random weights'}"
    about_dtype = f"{dtype} ({why})"
    return Exported(
        out, manifest.step, [ADAPTER_WEIGHTS], numel, note, False, about_dtype, adapters=config.train.init_from
    )


def write_merged(path: Path, manifest: Manifest, config: Config, out: Path, dtype: str, file_nbytes: int) -> Exported:
    """Write the base with the adapters added to its matrices: in the base's own names, files and config."""
    base = config.train.init_from
    if not base:
        raise UserError(
            "--merge: the base of this run has random weights, which are in no folder",
            hint="zerocli export without --merge writes the adapters",
        )
    refuse_other_base(config, manifest)
    source = path.absolute().parent.parent / source_files.FOLDER
    begun = source_files.config_of(source)
    dtype, why = dtype_of(dtype, begun)
    weights = Weights(base)
    entries = [
        Entry(name, DTYPES[dtype] if entry.dtype.is_floating_point else entry.dtype, entry.shape)
        for name, (_, entry) in weights.entries.items()
    ]
    with export_folder(out) as aside, Reader(path, manifest) as reader:
        fill = functools.partial(_fill, Merged(reader, config, source, weights))
        files = write_files([(None, [entry]) for entry in entries], aside, file_nbytes, fill)
        about = dict(begun or {})
        about[dtype_key(about)] = name_of(DTYPES[dtype])
        write_text(aside / hub.CONFIG, json.dumps(about, indent=2) + "\n")
        source_files.copy(str(source), aside)
    numel = sum(entry.numel for entry in entries)
    note = f"adapters merged into {base}"
    return Exported(out, manifest.step, files, numel, note, True, f"{dtype} ({why})", folder=bool(begun))


def _fill(merged: Merged, file: Path, group: list[Row]) -> None:
    """Write one file of merged tensors."""
    entries = [entry for _, each in group for entry in each]
    with contextlib.closing(safetensors.Writer(file, entries)) as writer:
        for entry in entries:
            for first, values in merged.values(entry.name):
                writer.write(entry.name, first, values)
        writer.finish()


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed tensor of the model with adapters: where it is in the files, and its adapters' name in a checkpoint."""

    mapping: Mapping
    shape: tuple[int, ...]
    transposed: bool
    adapter: str
    factor: float
    """What the adapters' product is multiplied by."""


class Merged:
    """The tensors of a base's files, with a checkpoint's adapters added and its other trained tensors in place."""

    def __init__(self, reader: Reader, config: Config, source: Path, weights: Weights) -> None:
        self._reader, self._lora, self._weights = reader, config.lora, weights
        names = [name.removeprefix(PARAMETERS) for name in reader.manifest.tensors if name.startswith(PARAMETERS)]
        theirs, files = names_there(config.model), file_names(config, source, weights)
        self._changed: dict[str, tuple[str, float]] = {}
        """Name of a tensor in the files -> what its adapter's parameters begin with in the checkpoint, and the factor
        of what the adapter adds."""
        self._replaced: dict[str, str] = {}
        packed: set[tuple[str, str]] = set()
        for name in names:
            layer, part, which = split_name(name)
            if tensor_of(part):
                packed.add((layer, part))
            elif which:
                module = module_there(layer, part, theirs)
                known = f"{PARAMETERS}{layer}.lora.{part}", factor_of(self._lora, module)
                self._changed[files(f"{module}.weight", name)] = known
            else:
                self._replaced[files(name_there(name, theirs), name)] = PARAMETERS + name
                for other in (reader.manifest.values.get("tied") or {}).get(name, ()):
                    if name_there(other, theirs) in weights.entries:  # some folders hold a tied weight twice
                        self._replaced[name_there(other, theirs)] = PARAMETERS + name
        self._transposed = has_conv1d(config, source)
        self._stored = None
        if config.lora.base in CODECS:
            precision = PRECISIONS[str(reader.manifest.values.get("precision"))]
            self._stored = EncodedBase(config, weights, precision.compute)
        self._packed: dict[str, Packed] = {}
        """Name of a tensor in the files -> the packed tensor with adapters that it is a part of."""
        self._merged_packed = functools.lru_cache(maxsize=1)(self._merge_packed)
        if packed:
            model = build_model(config.model, config.train.seq, "meta")
            by_name, _ = names_in_files(model, [], weights, config.model)
            for layer, part in packed:
                ours, adapter = f"{layer}.{tensor_of(part)}", f"{PARAMETERS}{layer}.lora.{part}"
                shape, turned = tuple(model.get_parameter(ours).shape), is_transposed(model.get_submodule(layer))
                found = Packed(by_name[ours], shape, turned, adapter, factor_of(self._lora, ours))
                self._packed |= dict.fromkeys(found.mapping.theirs, found)

    def values(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, values) of a tensor of the merged model."""
        entry = self._weights.entries[name][1]
        if name in self._replaced:
            yield 0, self._reader.tensor(self._replaced[name]).reshape(-1)
        elif name in self._changed:
            yield 0, self._merged(self._whole(name).float(), *self._changed[name]).reshape(-1)
        elif name in self._packed:
            packed = self._packed[name]
            yield 0, part_of(self._merged_packed(packed), packed.mapping, self._weights, name).reshape(-1)
        elif self._stored is not None and self._stored.holds(name):
            yield 0, self._stored.read(name).reshape(-1)
        else:
            for start, stop in self._weights.pieces(name, 0, entry.numel, PIECE_NUMEL):
                yield start, self._weights.read(name, start, stop)

    def _whole(self, name: str) -> torch.Tensor:
        """Return a tensor of the base with the values that the adapters were trained beside."""
        if self._stored is not None and self._stored.holds(name):
            return self._stored.read(name)
        entry = self._weights.entries[name][1]
        return self._weights.read(name, 0, entry.numel).view(entry.shape)

    def _merge_packed(self, packed: Packed) -> torch.Tensor:
        """Return the elements of a packed tensor with its adapters added, in fp32; the last is kept."""
        stored, mapping = self._stored, packed.mapping
        encoded = stored is not None and stored.holds(mapping.theirs[0])
        whole = stored.whole(mapping) if stored is not None and encoded else read_whole(mapping, self._weights)
        a, b = (self._reader.tensor(f"{packed.adapter}.{each}").float() for each in "ab")
        made = add_packed(whole.float().view(packed.shape), a, b, packed.factor, packed.transposed)
        return made.reshape(-1)

    def _merged(self, matrix: torch.Tensor, adapter: str, factor: float) -> torch.Tensor:
        """Return a matrix of the files with an adapter added, in fp32."""
        matrix = matrix.t() if self._transposed else matrix
        a, b = (self._reader.tensor(f"{adapter}.{each}").float() for each in "ab")
        made = matrix + factor * (b @ a)
        if self._lora.dora:
            length = self._reader.tensor(f"{adapter}.magnitude").float()
            made = made * (length / made.norm(dim=1))[:, None]
        return made.t().contiguous() if self._transposed else made


def file_names(config: Config, source: Path, weights: Weights) -> Any:
    """Return a function from a module's parameter, and the checkpoint's name of it, to the tensor in the base's files.

    UserError where the files hold it in another form.
    """
    kept = source_files.names_of(source) if config.model.code == "transformers" else None
    stored = {mapping.ours: mapping.theirs for mapping in kept or ()}

    def find(there: str, ours: str) -> str:
        for name in (*stored.get(there, ()), there, there.removeprefix("transformer."), ours):
            if name in weights.entries and len(stored.get(there, (there,))) == 1:
                return name
        raise UserError(
            f"--merge: {there} is not one tensor in {weights.path}", hint="zerocli export without --merge, for peft"
        )

    return find


def has_conv1d(config: Config, source: Path) -> bool:
    """Return whether the files keep matrices transposed, as transformers' GPT-2 does."""
    if not config.model.external:
        return config.model.family == "gpt2" and not hugging.known(config.model)
    return (source_files.config_of(source) or {}).get("model_type") in CONV1D
