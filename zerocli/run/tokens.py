"""Where tokens come from: text, folders of text, .bin and .npy files, read as one flat sequence of ids."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerocli.engine.startup import STARTUP
from zerocli.errors import UserError, quote

MAPPED_NBYTES = 16 * 2**20  # only files of this size or more are mapped: each mapping holds a file open
LIBRARY_NBYTES = 8 * 2**20
LIBRARY_PACKAGES = ("asyncio", "collections", "concurrent", "email", "http", "json", "logging", "unittest", "xml")
CHECKED_NUMEL = 2_000_000_000
CHUNK_NUMEL = 4 * 2**20


class Part(NamedTuple):
    """One file of a source: its name for errors, and its ids (any integer type, possibly memory-mapped)."""

    name: str
    ids: np.ndarray


class TokenSource:
    """A flat sequence of token ids over one or more parts; nothing is copied until it is sliced.

    With a `vocab` above 0, `slice` refuses ids outside 0..vocab-1 and names the file and the element.
    """

    def __init__(self, parts: Sequence[Part], vocab: int = 0):
        self.parts = [part for part in parts if len(part.ids)]
        self.vocab = vocab
        # ends[k] is the number of tokens up to and including part k.
        self._ends = np.cumsum([len(part.ids) for part in self.parts], dtype=np.int64)
        self._max_id: int | None = None

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    @property
    def max_id(self) -> int:
        """The largest id; the first access reads all tokens."""
        if self._max_id is None:
            self._max_id = max((int(chunk.max()) for part in self.parts for _, chunk in _chunks(part)), default=-1)
        return self._max_id

    def slice(self, start: int, length: int) -> np.ndarray:
        """Return a copy of tokens start..start+length-1 as int64."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start}..{start + length} of a source of {len(self)}")
        taken = []
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
        """Raise UserError if any of the first `CHECKED_NUMEL` tokens is outside the vocabulary."""
        left = CHECKED_NUMEL
        for part in self.parts:
            for first, ids in _chunks(part, left):
                self._check(part.name, first, ids)
                STARTUP.move()
            left -= min(left, len(part.ids))

    def _check(self, name: str, first: int, ids: np.ndarray) -> None:
        if not self.vocab or (int(ids.max()) < self.vocab and int(ids.min()) >= 0):
            return
        # A vocabulary larger than the ids' dtype can hold bounds nothing: only negative ids are outside.
        outside = ids < 0 if self.vocab > np.iinfo(ids.dtype).max else (ids < 0) | (ids >= self.vocab)
        offset = int(np.argmax(outside))
        enough = 256 if ids.dtype == np.uint8 else int(ids.max()) + 1
        raise UserError(
            f"{name}: token id {int(ids[offset])} at element {first + offset} is outside the vocabulary: "
            f"the model knows 0 to {self.vocab - 1}",
            hint=f"--set model.vocab={enough}" if int(ids.min()) >= 0 else "",
        )


def _chunks(part: Part, limit: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    numel = len(part.ids) if limit is None else min(limit, len(part.ids))
    for first in range(0, numel, CHUNK_NUMEL):
        yield first, part.ids[first : min(first + CHUNK_NUMEL, numel)]


def open_source(
    path: str, tokenizer: str = "bytes", dtype: str = "", vocab: int = 0, seq: int = 1, check: bool = True
) -> TokenSource:
    """Return the tokens at `path` (empty: Python's standard library); raise UserError if they cannot be used.

    There must be at least seq + 1 tokens. With `check`, ids are compared with `vocab` now; one rank per node is enough
    for that, as `slice` checks what it returns anyway.
    """
    shown = path or "Python's standard library"
    try:
        source = TokenSource(_parts(path, tokenizer, dtype), vocab)
    except OSError as error:
        raise UserError(f"{error.filename or shown}: cannot be read ({error.strerror or error})") from None
    if len(source) == 0:
        raise UserError(f"{shown}: there is no data in it", hint="--data PATH")
    if len(source) < seq + 1:
        needed = f"one sequence needs {seq + 1} tokens (seq + 1), it has {len(source)}"
        raise UserError(f"{shown}: too short: {needed}", hint=f"--seq {len(source) - 1}" if len(source) > 1 else "")
    if check:
        source.check()
    return source


def _parts(path: str, tokenizer: str, dtype: str) -> list[Part]:
    if path and ("\0" in path or not os.path.exists(path)):
        raise UserError(f"{quote(path, 4096)[1:-1]}: no such file or folder", hint="--data PATH, or no --data at all")
    if path and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{path}: is neither a regular file nor a folder")
    files = _library() if not path else _folder(Path(path)) if os.path.isdir(path) else [Path(path)]
    kinds = {file.suffix if file.suffix in (".bin", ".npy") else "text" for file in files}
    if len(kinds) > 1:
        raise UserError(f"{path}: holds {' and '.join(sorted(kinds))} files: text and token ids do not mix")
    if kinds == {".bin"}:
        return [_read_bin(file, dtype or "uint16") for file in files]
    if kinds == {".npy"}:
        return [_read_npy(file) for file in files]
    texts = [_read_bytes(file) for file in files]
    return texts if tokenizer == "bytes" else _tokenize(texts, tokenizer)


def _folder(folder: Path) -> list[Path]:
    """Return the files under `folder` except hidden ones, sorted by path."""

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())


def _library() -> list[Path]:
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
        raise UserError(f"{file}: is not an .npy array of integers ({str(error).splitlines()[0]})") from None
    if not isinstance(ids, np.ndarray):
        raise UserError(f"{file}: is an archive of arrays, not one .npy array")
    if ids.dtype.kind not in "iu":
        raise UserError(f"{file}: holds {ids.dtype}, not integer token ids")
    if ids.ndim != 1:
        raise UserError(f"{file}: has shape {ids.shape}; token ids are one flat sequence")
    return Part(str(file), ids)


def _tokenize(texts: Sequence[Part], tokenizer: str) -> list[Part]:
    """Return the texts as token ids, in memory; bytes that are not UTF-8 become the replacement character."""
    if not os.path.isfile(tokenizer):
        raise UserError(f"{tokenizer}: no such tokenizer file", hint="--set data.tokenizer=bytes")
    try:
        import tokenizers
    except ImportError:
        message = f"{tokenizer}: reading it needs the package tokenizers, which is not installed"
        raise UserError(message, hint="pip install 'zerocli[hf]'") from None
    try:
        encoder = tokenizers.Tokenizer.from_file(tokenizer)
    except Exception as error:  # the package raises bare Exception
        raise UserError(f"{tokenizer}: is not a tokenizer.json ({error})") from None
    parts = []
    for text in texts:
        pieces = []
        for piece in _pieces(text.ids):
            encodings = encoder.encode_batch([piece], add_special_tokens=False)
            pieces += [np.array(encoding.ids, np.uint32) for encoding in encodings]
            STARTUP.move()
        parts.append(Part(text.name, np.concatenate(pieces) if pieces else np.zeros(0, np.uint32)))
    return parts


def _pieces(data: np.ndarray, nbytes: int = 2**20) -> Iterator[str]:
    """Yield `data` as text in pieces of about `nbytes`, cut at line ends so that a tokenizer sees whole lines."""
    rest = b""
    for first in range(0, len(data), nbytes):
        head, line_end, tail = (rest + data[first : first + nbytes].tobytes()).rpartition(b"\n")
        if head or line_end:
            yield (head + line_end).decode("utf-8", "replace")
        rest = tail
    if rest:
        yield rest.decode("utf-8", "replace")
