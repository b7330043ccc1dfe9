"""Read and write the safetensors format: a length, a JSON header, and the tensors' bytes, contiguously.

Both stream: a writer knows every offset in advance, so tensors may be written in any order and in parts; a reader reads
only the requested elements.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiers.pages import memory_of
from zerocli.checkpoint import quantized
from zerocli.config import hub
from zerocli.config import quantized as quantization
from zerocli.config.file import read_values
from zerocli.console import quoted
from zerocli.errors import FAILURE, UserError
from zerocli.files import BlockFile, pread
from zerocli.layout.shards import round_up
from zerocli.ranks.startup import STARTUP
from zerocli.regular_files import kind_of, unique_names

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
MAX_HEADER_NBYTES = 100_000_000
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype, its shape, and the offset of its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Writer:
    """One file being written: first its header, then each tensor's elements, in any order and in parts."""

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for entry in entries:
            offsets = [at, at + entry.nbytes]
            header[entry.name] = {"dtype": _WORDS[entry.dtype], "shape": entry.shape, "data_offsets": offsets}
            at += entry.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        self._entries = {
            e.name: Entry(e.name, e.dtype, e.shape, base + header[e.name]["data_offsets"][0]) for e in entries
        }
        self._file = BlockFile(path, base + at)
        self._file.write(memoryview(struct.pack("<Q", len(text)) + text), 0)

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write flat values, cast to the tensor's type, from its element `first` on; safe from several threads."""
        entry = self._entries[name]
        cast = values.to(entry.dtype).contiguous().view(-1)
        if entry.dtype == torch.float16 and bool((cast.isinf() & values.reshape(-1).isfinite()).any()):
            most = values[values.isfinite()].abs().max().item()
            raise UserError(
                f"{name} holds {most:.3g}, beyond fp16's largest number, 65504", hint="--dtype bf16", exit_code=FAILURE
            )
        data = cast.view(torch.uint8)
        self._file.write(memory_of(data), entry.start + first * entry.dtype.itemsize)

    def finish(self) -> None:
        """Flush the file to disk."""
        self._file.finish()

    def close(self) -> None:
        self._file.close()


class Weights:
    """The tensors of a folder of safetensors files, or of one file; they are read on request.

    Of a folder of quantized weights they are those of the model, which are decoded as they are read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.stored: dict[str, tuple[Path, Entry]] = {}
        """The tensors that the files hold."""
        if self.path.is_dir() and (self.path / INDEX).is_file():
            self._read_index(self.path / INDEX)
        else:
            self._read_files()
        if not self.stored:
            raise UserError(f"{path}: there are no tensors in it")
        self.method, self._decoded = self._find_decoded()
        """How the weights are quantized; empty if they are not."""
        parts = {name for each in self._decoded.values() for name in each.parts}
        self.entries = {name: self.stored[name] for name in self.stored if name not in parts}
        """The model's tensors; the offset of one that is decoded has no meaning."""
        for name, each in self._decoded.items():
            self.entries[name] = (self.stored[each.parts[0]][0], Entry(name, each.dtype, each.shape))

    def _read_files(self) -> None:
        """Register every tensor: of the one file, of a folder's `model.safetensors`, or of all its files."""
        if not self.path.is_dir():
            if not self.path.is_file():
                raise UserError(f"{self.path}: no such file or folder", hint="zerocli export RUN DIR")
            files = [self.path]
        elif (self.path / SINGLE).is_file():
            files = [self.path / SINGLE]
        else:
            named = sorted(self.path.glob("*.safetensors"))
            files = [file for file in named if file.is_file()]
            if named and not files:
                fact = f"is {kind_of(named[0])}" + (", which leads to no file" if named[0].is_symlink() else "")
                raise UserError(
                    f"{named[0]} {fact}",
                    hint=f"hf download OWNER/NAME --local-dir {quoted(self.path)}, or a copy of the weights themselves",
                )
            if not files:
                raise UserError(f"{self.path}: there is no .safetensors file in it", hint="zerocli export RUN DIR")
        for file in files:
            for entry in read_header(file):
                if entry.name in self.stored:
                    raise UserError(
                        f"{self.path}: {entry.name} is in {self.stored[entry.name][0].name} and in {file.name}",
                        hint=f"--init-from {quoted(file)}",
                    )
                self.stored[entry.name] = (file, entry)

    def _read_index(self, index: Path) -> None:
        """Register each tensor with the file that the index names."""
        try:
            if index.stat().st_size > MAX_HEADER_NBYTES:
                raise ValueError(f"{index.stat().st_size} bytes")
            places = dict(json.loads(index.read_text(), object_pairs_hook=unique_names)["weight_map"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{index}: is not an index of safetensors ({type(error).__name__}: {str(error)[:200]})"
            ) from None
        found: dict[str, dict[str, Entry]] = {}
        for name, place in places.items():
            if not isinstance(place, str) or place != os.path.basename(place) or place in ("", ".", ".."):
                raise UserError(f"{index}: names a file outside its folder: {str(place)[:80]!r}")
            file = self.path / place
            if place not in found:
                if not file.is_file():
                    raise UserError(
                        f"{index}: {place} is missing",
                        hint=f"hf download OWNER/NAME --local-dir {quoted(self.path)}, which gets what is missing",
                    )
                found[place] = {entry.name: entry for entry in read_header(file)}
            if name not in found[place]:
                raise UserError(f"{index}: says that {name[:80]} is in {place}, and it is not")
            self.stored[name] = (file, found[place][name])

    def _find_decoded(self) -> tuple[str, dict[str, quantized.Decoded]]:
        """Return how the folder's weights are quantized, and the tensors that are decoded from them."""
        values: dict[str, Any] = {}
        with contextlib.suppress(UserError):  # weights need no config
            values, _, _ = read_values(str(self.path / hub.CONFIG))
        method, about = quantization.method_of(values), values.get(quantization.KEY)
        if not method:
            return "", {}
        quantization.refuse(str(self.path), values)
        stored = {name: entry for name, (_, entry) in self.stored.items()}
        with self._fitting():
            return method, quantized.decoded(method, about if isinstance(about, dict) else {}, stored, self._read)

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except quantized.Unfit as error:
            hint = "download the folder again; or the folder of the original weights"
            raise UserError(f"{self.path}: {error}", hint=hint) from None

    def is_decoded(self, name: str) -> bool:
        """Return whether a tensor is not in the files as it is."""
        return name in self._decoded

    def pieces(self, name: str, start: int, stop: int, numel: int) -> Iterator[tuple[int, int]]:
        """Yield pieces that tile elements [start, stop) of a tensor, of about `numel` elements each."""
        each = round_up(numel, self._decoded[name].grain) if name in self._decoded else numel
        while start < stop:
            last = min(stop, start // each * each + each)
            yield start, last
            start = last

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a tensor in fp32 (or its own type, if not floating)."""
        found = self._decoded.get(name)
        if found is None:
            values = self._read(name, start, stop)
        else:
            first = start // found.grain * found.grain
            last = min(round_up(stop, found.grain), math.prod(found.shape))
            with self._fitting():
                values = found.decode(self._read, first, last)[start - first : stop - first]
        return values.float() if values.dtype.is_floating_point else values

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a tensor in the files."""
        file, entry = self.stored[name]
        nbytes = (stop - start) * entry.dtype.itemsize
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = pread(fd, nbytes, entry.start + start * entry.dtype.itemsize, moved=STARTUP.move)
            finally:
                os.close(fd)
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})", exit_code=FAILURE) from None
        if len(memory) < nbytes:
            raise UserError(f"{file}: ends within {name}")
        return memory.view(entry.dtype)


def read_header(path: Path) -> list[Entry]:
    """Return the tensors of a file; raise UserError unless every byte belongs to exactly one tensor."""

    def refuse(fact: str) -> UserError:
        return UserError(f"{path}: is not a safetensors file: {fact}", hint="download or export the file again")

    try:
        with path.open("rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_NBYTES, nbytes - 8):
                raise refuse("its header does not fit into it")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    entries = []
    try:
        for name, about in json.loads(text, object_pairs_hook=unique_names).items():
            if name == "__metadata__":
                continue
            start, stop = about["data_offsets"]
            if about["dtype"] not in DTYPES:
                raise refuse(f"{name[:80]} has an unknown dtype: {str(about['dtype'])[:40]}")
            entry = Entry(name, DTYPES[about["dtype"]], tuple(about["shape"]), 8 + length + start)
            natural = all(type(n) is int and n >= 0 for n in (start, stop, *entry.shape))
            if not natural or stop - start != entry.nbytes or 8 + length + stop > nbytes:
                raise refuse(f"the bytes of {name[:80]} do not fit")
            entries.append(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refuse(f"{type(error).__name__}: {str(error)[:200]}") from None
    end = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != end:
            raise refuse(f"the bytes of {entry.name[:80]} do not begin where those before it end")
        end += entry.nbytes
    if end != nbytes:
        raise refuse(f"{nbytes - end} bytes at its end belong to no tensor")
    return entries
