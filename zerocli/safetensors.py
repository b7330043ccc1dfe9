"""The safetensors format: a length, a JSON header, and the tensors' bytes one after another. Read and written by hand.

Both ways stream: a writer knows every offset before the first byte, so tensors may be filled in any order and in parts;
a reader reads just the elements that it is asked for.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tiers.pages import memory_of
from zerocli.errors import UserError
from zerocli.files import BlockFile, pread

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
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
    """A tensor of a file: its type, its shape, and where its bytes begin in the file."""

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
        data = values.to(entry.dtype).contiguous().view(-1).view(torch.uint8)
        self._file.write(memory_of(data), entry.start + first * entry.dtype.itemsize)

    def finish(self) -> None:
        """Have all of it on the disk."""
        self._file.finish()

    def close(self) -> None:
        self._file.close()


class Weights:
    """The tensors of a folder of safetensors files, or of one file; nothing of them is read until it is asked for."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, tuple[Path, Entry]] = {}
        for file in self._files():
            for entry in read_header(file):
                self.entries[entry.name] = (file, entry)
        if not self.entries:
            raise UserError(f"{path}: there are no tensors in it")

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if not self.path.is_dir():
            raise UserError(f"{self.path}: no such file or folder")
        index = self.path / INDEX
        if not index.is_file():
            found = sorted(self.path.glob("*.safetensors"))
            if not found:
                raise UserError(f"{self.path}: there is no .safetensors file in it", hint="zerocli export RUN DIR")
            return found
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{index}: is not an index of safetensors ({type(error).__name__}: {error})") from None
        for name in names:
            if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
                raise UserError(f"{index}: names a file outside its folder: {str(name)[:80]!r}")
        missing = sorted(name for name in names if not (self.path / name).is_file())
        if missing:
            raise UserError(f"{index}: {missing[0]} is missing")
        return [self.path / name for name in sorted(names)]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a tensor in fp32 (or its own type, if not floating)."""
        file, entry = self.entries[name]
        nbytes = (stop - start) * entry.dtype.itemsize
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = pread(fd, nbytes, entry.start + start * entry.dtype.itemsize)
        finally:
            os.close(fd)
        if len(memory) < nbytes:
            raise UserError(f"{file}: ends within {name}")
        values = memory.view(entry.dtype)
        return values.float() if entry.dtype.is_floating_point else values


def read_header(path: Path) -> list[Entry]:
    """Return the tensors of a file; raise UserError where it is not of the format."""

    def refuse(fact: str) -> UserError:
        return UserError(f"{path}: is not a safetensors file: {fact}")

    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_NBYTES, nbytes - 8):
            raise refuse("its header does not fit into it")
        text = file.read(length)
    entries = []
    try:
        for name, about in json.loads(text).items():
            if name == "__metadata__":
                continue
            start, stop = about["data_offsets"]
            entry = Entry(name, DTYPES[about["dtype"]], tuple(about["shape"]), 8 + length + start)
            natural = all(isinstance(n, int) and n >= 0 for n in (start, stop, *entry.shape))
            if not natural or stop - start != entry.nbytes or 8 + length + stop > nbytes:
                raise refuse(f"the bytes of {name} do not fit")
            entries.append(entry)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise refuse(f"{type(error).__name__}: {error}") from None
    return entries
