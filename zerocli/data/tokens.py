"""One flat sequence of token ids: text, folders of text, .bin and .npy files."""

from __future__ import annotations

import contextlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerocli.data import cache
from zerocli.data.cache import ALONE, Node
from zerocli.data.encoder import BYTES, open_encoder
from zerocli.data.files import TextCheck, find_files, readable, text_pieces
from zerocli.errors import UserError
from zerocli.ranks.startup import STARTUP

MAPPED_NBYTES = 16 * 2**20  # only files of this size or more are mapped: each mapping holds a file open
LIBRARY_NBYTES = 8 * 2**20
LIBRARY_PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "json", "logging", "unittest", "xml")
VERSION = 1
"""Counts changes of what a cache file of text holds."""
CHECKED_NUMEL = 2_000_000_000
CHUNK_NUMEL = 4 * 2**20

_FLAT = "numpy.save('ids.npy', ids.astype('uint32').ravel()), with ids from 0 to the vocabulary's last"
"""How an .npy that can be read is written."""


class Part(NamedTuple):
    """One file of a source: its name for errors, and its ids (any integer type, possibly memory-mapped)."""

    name: str
    ids: np.ndarray


class TokenSource:
    """A flat sequence of token ids over one or more parts; nothing is copied until it is sliced.

    With a `vocab` above 0, `slice` refuses ids outside 0..vocab-1 and names the file and the element.
    """

    def __init__(self, parts: Sequence[Part], vocab: int = 0, start: int = 0, stop: int | None = None):
        """The tokens start..stop-1 of these parts; by default all."""
        self.parts = [part for part in parts if len(part.ids)]
        self.vocab = vocab
        # ends[k] is the number of tokens up to and including part k.
        self._ends = np.cumsum([len(part.ids) for part in self.parts], dtype=np.int64)
        self._start, self._stop = start, int(self._ends[-1] if self.parts else 0) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int) -> TokenSource:
        """Return tokens start..stop-1 as a source of their own."""
        return TokenSource(self.parts, self.vocab, self._start + start, self._start + stop)

    def rest(self) -> TokenSource:
        """Return the tokens of the parts that follow this source's last."""
        return TokenSource(self.parts, self.vocab, self._stop)

    def slice(self, start: int, length: int) -> np.ndarray:
        """Return a copy of tokens start..start+length-1 as int64."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start}..{start + length} of a source of {len(self)}")
        taken, start = [], start + self._start
        index = int(np.searchsorted(self._ends, start, side="right"))
        while length:
            part = self.parts[index]
            first = start - (int(self._ends[index]) - len(part.ids))
            ids = part.ids[first : first + length]
            self._check(part.name, first, ids)
            taken.append(ids.astype(np.int64))
            start, length, index = start + len(ids), length - len(ids), index + 1
        return np.concatenate(taken) if taken else np.zeros(0, np.int64)

    def check(self) -> None:
        """Raise UserError if any of the parts' first `CHECKED_NUMEL` tokens is outside the vocabulary."""
        for part, first, ids in _chunks(self.parts):
            self._check(part.name, first, ids)

    def _check(self, name: str, first: int, ids: np.ndarray) -> None:
        if not self.vocab or (int(ids.max()) < self.vocab and int(ids.min()) >= 0):
            return
        # A vocabulary larger than the ids' dtype can hold bounds nothing: only negative ids are outside.
        outside = ids < 0 if self.vocab > np.iinfo(ids.dtype).max else (ids < 0) | (ids >= self.vocab)
        offset = int(np.argmax(outside))
        hint = "--set model.vocab=256"
        if ids.dtype != np.uint8:
            hint = f"--set model.vocab={int(ids.max()) + 1} for a new model; else ids of the model's own tokenizer"
        raise UserError(
            f"{name}: token id {int(ids[offset])} at element {first + offset} is outside the vocabulary: "
            f"the model knows 0 to {self.vocab - 1}",
            hint=hint if int(ids.min()) >= 0 else _FLAT,
        )


def _chunks(parts: Sequence[Part]) -> Iterator[tuple[Part, int, np.ndarray]]:
    """Yield (part, first element, ids) of the first `CHECKED_NUMEL` tokens of these parts."""
    left = CHECKED_NUMEL
    for part in parts:
        numel = min(left, len(part.ids))
        for first in range(0, numel, CHUNK_NUMEL):
            yield part, first, part.ids[first : min(first + CHUNK_NUMEL, numel)]
            STARTUP.move()
        left -= numel


def open_source(
    path: str,
    tokenizer: str = BYTES,
    dtype: str = "",
    vocab: int = 0,
    seq: int = 1,
    check: bool = True,
    folder: str = "",
    node: Node = ALONE,
) -> TokenSource:
    """Return the tokens at `path` (empty: Python's standard library); raise UserError if they cannot be used.

    There must be at least seq + 1 tokens. With `check`, ids are compared with `vocab`, and bytes with UTF-8, now; one
    rank per node is enough for that, as `slice` checks what it returns anyway. What a tokenizer made is cached in the
    cache `folder`; `node` says which rank of a node tokenises.
    """
    shown = path or "Python's standard library"
    with readable(shown):
        source = TokenSource(_parts(path, tokenizer, dtype, vocab, check, folder, node), vocab)
    if len(source) == 0:
        raise UserError(f"{shown}: there is no data in it", hint="--data PATH")
    if len(source) < seq + 1:
        needed = f"one sequence needs {seq + 1} tokens (seq + 1), it has {len(source)}"
        raise UserError(f"{shown}: too short: {needed}", hint=f"--seq {len(source) - 1}" if len(source) > 1 else "")
    if check:
        source.check()
    return source


def _parts(path: str, tokenizer: str, dtype: str, vocab: int, check: bool, folder: str, node: Node) -> list[Part]:
    form, files = find_files(path) if path else ("text", library())
    if form == ".bin":
        return [_read_bin(file, dtype or "uint16") for file in files]
    if form == ".npy":
        return [_read_npy(file) for file in files]
    assert form == "text", "rows of documents are no stream"
    if tokenizer != BYTES:
        return _tokenised(path, files, tokenizer, vocab, folder, node)
    texts = [_read_bytes(file) for file in files]
    if check and path:
        refuse_binary(texts)
    return texts


def _tokenised(path: str, files: list[Path], tokenizer: str, vocab: int, folder: str, node: Node) -> list[Part]:
    """Return text as one stream of tokens, which is tokenised once, into a cache file."""
    encoder = open_encoder(tokenizer, vocab)

    def write(folder: Path, target: Path) -> None:
        writer = cache.Writer(folder, {"ids": encoder.dtype, "ends": np.int64})
        nbytes = sum(file.stat().st_size for file in files)
        with contextlib.closing(writer), node.progress(f"tokenising {path or 'text'}", nbytes) as moved:
            for file in files:
                for piece in text_pieces(*_read_bytes(file)):  # about a MiB at a time
                    writer.add("ids", encoder.encode([piece], places=False)[0].ids)
                    moved(len(piece))
                    STARTUP.move()
                writer.add("ends", [writer.numels["ids"]])
            writer.finish(target, {})

    key = cache.fingerprint(VERSION, "text", cache.identity(files), encoder.identity)
    reader = node.cached(path, folder, f"{Path(path).name or 'library'}-{key}.tokens", write)
    ends = [0, *reader["ends"].tolist()]
    return [
        Part(str(file), reader["ids"][ends[k] : ends[k + 1]]) for k, file in enumerate(files) if ends[k + 1] > ends[k]
    ]


def refuse_binary(texts: Sequence[Part]) -> None:
    """Raise UserError at the first NUL byte, or byte that is not UTF-8, of the first `CHECKED_NUMEL`."""
    for text, first, data in _chunks(texts):
        if first == 0:
            checked = TextCheck(text.name)
        checked.decode(data.tobytes(), first + len(data) == len(text.ids))


def library() -> list[Path]:
    """Return source files of the standard library, the same ones each time, up to `LIBRARY_NBYTES`."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("*.py"))
    for package in LIBRARY_PACKAGES:
        files += sorted((root / package).glob("*.py"))
    kept, nbytes = [], 0
    for file in files:
        nbytes += file.stat().st_size
        if nbytes > LIBRARY_NBYTES:
            break
        kept.append(file)
    return kept


def _read_bytes(file: Path) -> Part:
    if file.stat().st_size >= MAPPED_NBYTES:
        return Part(str(file), np.memmap(file, np.uint8, "r"))
    return Part(str(file), np.frombuffer(file.read_bytes(), np.uint8))


def _read_bin(file: Path, dtype: str) -> Part:
    kind = np.dtype(dtype).newbyteorder("<")
    nbytes = file.stat().st_size
    if nbytes % kind.itemsize:
        whole = f"{nbytes} bytes is not a multiple of {kind.itemsize}, the size of {dtype}"
        raise UserError(f"{file}: {whole}", hint="--set data.dtype=uint16, or uint32")
    # An empty file cannot be mapped.
    return Part(str(file), np.memmap(file, kind, "r") if nbytes else np.zeros(0, kind))


def _read_npy(file: Path) -> Part:
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(
            f"{file}: is not an .npy array of integers ({str(error).splitlines()[0]})", hint=_FLAT
        ) from None
    if not isinstance(ids, np.ndarray):
        raise UserError(f"{file}: is an archive of arrays, not one .npy array", hint=_FLAT)
    if ids.dtype.kind not in "iu":
        raise UserError(f"{file}: holds {ids.dtype}, not integer token ids", hint=_FLAT)
    if ids.ndim != 1:
        raise UserError(f"{file}: has shape {ids.shape}; token ids are one flat sequence", hint=_FLAT)
    return Part(str(file), ids)
