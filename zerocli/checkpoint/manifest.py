"""The manifest: a JSON file that lists a checkpoint's contents, the location of each piece and the hash of its bytes.

A folder is a checkpoint if and only if it has a manifest whose hash is right. Nothing in it is used before that, and
then it is still validated: no name that leads out of the folder, no link, no piece outside its file.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from zerocli.checkpoint.boxes import tile
from zerocli.checkpoint.folder import MANIFEST, STEP, UNFINISHED
from zerocli.garbage import paused
from zerocli.regular_files import NotRegular, kind_of, open_regular, unique_names

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

VERSION = 2
"""Since version 2 a piece's hash also covers its tensor, position and step; version 1 is still read."""
FILE = re.compile(r"rank-\d{5,}\.bin")
MAX_NBYTES = 1 << 30
"""Maximum bytes of a manifest."""
MAX_PIECE_NBYTES = 1 << 28
"""Maximum bytes of a piece: each is held whole while it is hashed."""
MOST = 2**63
"""More than any number in a manifest."""
NUM_THREADS = 16
"""Files that are looked at concurrently: a shared file system takes milliseconds for each."""


def name_of(dtype: torch.dtype) -> str:
    """Return what a manifest calls a dtype."""
    return str(dtype).removeprefix("torch.")


DTYPES = {
    name_of(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
_HEAD, _MIDDLE, _TAIL = b'{"sha256":"', b'",\n"manifest":', b"}\n"


class Damaged(Exception):
    """A checkpoint that must not be loaded; the message says what is wrong, and where."""


class Unreadable(Exception):
    """A checkpoint that the system could not read (permissions, a failing disk, too many open files).

    It may be whole, so an older one must not be used instead: that would discard work.
    """


class Unfinished(Damaged):
    """A checkpoint that was still being written when its run ended: nothing was lost that was reported saved."""


class Piece(NamedTuple):
    """A box of a tensor, and the bytes of a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    position: int
    sha256: str

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def piece_hash(
    step: int, name: str, dtype: torch.dtype, offsets: Sequence[int], sizes: Sequence[int], version: int = VERSION
) -> Hash:
    """Return the hash for a piece's bytes, already updated with the tensor, position and step.

    So a piece in the place of another (of another tensor, position or step) does not match.
    """
    digest = hashlib.sha256()
    if version > 1:
        about = [step, name, name_of(dtype), list(offsets), list(sizes)]
        digest.update(json.dumps(about, separators=(",", ":")).encode() + b"\n")
    return digest


@dataclass
class Tensor:
    """One saved tensor; its pieces tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class Manifest:
    """What a checkpoint holds."""

    step: int
    tensors: dict[str, Tensor]
    files: dict[str, int]
    """Bytes of each file."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values other than tensors: counters, loss scale, the run's config."""
    version: int = VERSION


@paused()
def encode(manifest: Manifest) -> bytes:
    """Return the contents of the manifest file; raise ValueError if the pieces of a tensor do not tile it."""
    for name, tensor in manifest.tensors.items():
        pieces = tensor.pieces
        if not tile(tensor.shape, [piece.offsets for piece in pieces], [piece.sizes for piece in pieces]):
            raise ValueError(f"the pieces of {name} do not cover it exactly")
    files = sorted(manifest.files)
    place = {name: i for i, name in enumerate(files)}
    body = {
        "format": "zerocli checkpoint",
        "version": VERSION,
        "step": manifest.step,
        "values": manifest.values,
        "files": [[name, manifest.files[name]] for name in files],
        "tensors": {
            name: {
                "dtype": name_of(tensor.dtype),
                "shape": tensor.shape,
                "pieces": [[p.offsets, p.sizes, place[p.file], p.position, p.sha256] for p in tensor.pieces],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    return _HEAD + hashlib.sha256(text).hexdigest().encode() + _MIDDLE + text + _TAIL


@paused()
def decode(data: bytes) -> Manifest:
    """Return the manifest in a file; raise Damaged if it is not valid."""
    start = len(_HEAD) + 64
    end = start + len(_MIDDLE)
    if not data:
        raise Damaged("its manifest is empty")
    if not (data.startswith(_HEAD) and data[start:end] == _MIDDLE and data.endswith(_TAIL)):
        raise Damaged("its manifest is invalid or truncated")
    text = data[end : -len(_TAIL)]
    if hashlib.sha256(text).hexdigest().encode() != data[len(_HEAD) : start]:
        raise Damaged("its manifest does not match its own checksum")
    try:
        body = json.loads(text, object_pairs_hook=unique_names)
        if body["format"] != "zerocli checkpoint":
            raise Damaged(f"its format is {str(body['format'])[:40]!r}")
        if body["version"] not in range(1, VERSION + 1) or isinstance(body["version"], bool):
            found = str(body["version"])[:40]
            raise Damaged(f"it has format version {found}; this zerocli reads versions up to {VERSION}")
        return _judge(body)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise Damaged(f"its manifest is malformed ({type(error).__name__}: {str(error)[:200]})") from None


def _judge(body: dict[str, Any]) -> Manifest:
    files = {str(name): _natural(nbytes) for name, nbytes in body["files"]}
    for name in files:
        if not FILE.fullmatch(name):
            raise Damaged(f"its manifest names a file {name[:80]!r}, which is not a file of a checkpoint")
    if len(files) != len(body["files"]):
        raise Damaged("its manifest names a file twice")
    tensors: dict[str, Tensor] = {}
    for name, entry in body["tensors"].items():
        shape = tuple(_natural(n) for n in entry["shape"])
        dtype = DTYPES[entry["dtype"]]
        tensors[name] = Tensor(dtype, shape, _pieces(name, entry["pieces"], shape, dtype.itemsize, files))
    if not isinstance(body["values"], dict):
        raise Damaged("its manifest has no values")
    return Manifest(_natural(body["step"]), tensors, files, body["values"], body["version"])


def _pieces(name: str, rows: list[Any], shape: tuple[int, ...], itemsize: int, files: dict[str, int]) -> list[Piece]:
    """Return the pieces of a tensor; raise Damaged if they do not tile it, or one is outside of its file.

    Checked all at once: a checkpoint of thousands of ranks has millions.
    """
    if not {(len(offsets), len(sizes)) for offsets, sizes, *_ in rows} <= {(len(shape), len(shape))}:
        raise ValueError(f"a piece of {name} has other dimensions")
    found = [(*offsets, *sizes, file, position) for offsets, sizes, file, position, _ in rows]
    if not set(map(type, itertools.chain.from_iterable(found))) <= {int}:
        raise ValueError(f"a piece of {name} has what is not a natural number")
    table = np.array(found, dtype=np.int64).reshape(len(rows), 2 * len(shape) + 2)
    if (table < 0).any():
        raise ValueError(f"a piece of {name} has what is not a natural number")
    offsets, sizes = table[:, : len(shape)], table[:, len(shape) : -2]
    file, position = table[:, -2], table[:, -1]
    names, ends = list(files), np.array(list(files.values()) or [0], dtype=np.int64)

    def refuse(wrong: Any, words: Callable[[Any], str]) -> None:
        """Raise Damaged for the first row that is wrong."""
        if wrong.any():
            raise Damaged(f"a piece of {name} {words(rows[int(np.flatnonzero(wrong)[0])])}")

    limits = np.array(shape, dtype=np.int64)
    outside = (offsets > limits) | (sizes > limits - np.minimum(offsets, limits))
    refuse(outside.any(1), lambda row: "is outside its shape")
    refuse(file >= len(files), lambda row: f"is in file {row[2]} of {len(files)}")
    nbytes = sizes.astype(np.float64).prod(1) * itemsize  # exact up to the limit below
    last = ends[file] - np.minimum(nbytes, float(MOST // 2)).astype(np.int64)
    refuse(position > last, lambda row: f"is outside {names[row[2]]}")
    refuse(nbytes > MAX_PIECE_NBYTES, lambda row: f"has {math.prod(row[1]) * itemsize} bytes, more than any has")
    if not tile(shape, offsets, sizes):
        raise Damaged(f"the pieces of {name} do not cover it exactly")
    return [Piece(tuple(o), tuple(s), names[number], at, str(sha)) for o, s, number, at, sha in rows]


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST:
        raise ValueError(f"{str(value)[:40]!r} is not a natural number")
    return value


def open_file(folder: Path, name: str) -> int:
    """Return a descriptor of a regular file in the folder; refuse links and anything else of that name."""
    try:
        return open_regular(folder / name, os.O_RDONLY)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except NotRegular:
        raise Damaged(f"{name} is {kind_of(folder / name)}, not a regular file") from None
    except OSError as error:
        raise Unreadable(f"{folder / name} cannot be opened: {error.strerror}") from None


def read(folder: Path, sizes: bool = True) -> Manifest:
    """Return a checkpoint's manifest, after checking the `sizes` of its files; raise Damaged or Unfinished.

    Of many ranks that read it only one checks the sizes: there are as many files as ranks that saved.
    """
    if folder.is_symlink():
        raise Damaged("it is a link")
    if not (folder / MANIFEST).exists() and not (folder / MANIFEST).is_symlink() and (folder / UNFINISHED).exists():
        raise Unfinished("it was not finished")
    fd = open_file(folder, MANIFEST)
    with os.fdopen(fd, "rb") as file:
        nbytes = os.fstat(fd).st_size
        if nbytes > MAX_NBYTES:
            raise Damaged(f"its manifest has {nbytes} bytes, more than any manifest")
        try:
            data = file.read(nbytes)
        except OSError as error:
            raise Unreadable(f"{folder / MANIFEST} cannot be read: {error.strerror}") from None
    manifest = decode(data)
    named = STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:
        raise Damaged(f"its manifest is of step {manifest.step}, its folder of step {int(named[1])}")
    if sizes:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = threads.map(functools.partial(_file_nbytes, folder), manifest.files)
            for (name, expected), nbytes in zip(manifest.files.items(), found, strict=True):
                if nbytes != expected:
                    raise Damaged(f"{name} has {nbytes} bytes, not {expected}")
    return manifest


def _file_nbytes(folder: Path, name: str) -> int:
    fd = open_file(folder, name)
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)
