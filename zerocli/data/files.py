"""The files of a data path and their format, by suffix and content; archives and binary files are refused."""

from __future__ import annotations

import codecs
import contextlib
import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from zerocli.console import quoted
from zerocli.errors import UserError, quote

TOKENS = (".bin", ".npy")
"""Formats that hold token ids."""
DOCUMENTS = ("jsonl", "parquet", "csv")
"""Formats whose rows are documents."""
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
CSV_SUFFIXES = (".csv", ".tsv")
ASIDE = ("readme", "license", "licence", "dataset_info", "dataset_dict", "state")
"""Files with these names, without suffix, are not data where they lie beside documents."""

# (suffixes, first bytes, where they begin, command that unpacks it)
_ARCHIVES = (
    ((".tar.gz", ".tgz"), b"", 0, "tar -xzf"),
    ((".tar.bz2", ".tbz2"), b"", 0, "tar -xjf"),
    ((".tar.xz", ".txz"), b"", 0, "tar -xJf"),
    ((".tar.zst",), b"", 0, "tar --zstd -xf"),
    ((".gz",), b"\x1f\x8b", 0, "gunzip -k"),
    ((".bz2",), b"BZh", 0, "bunzip2 -k"),
    ((".xz",), b"\xfd7zXZ\0", 0, "unxz -k"),
    ((".zst",), b"\x28\xb5\x2f\xfd", 0, "unzstd"),
    ((".zip",), b"PK\x03\x04", 0, "unzip"),
    ((".7z",), b"7z\xbc\xaf\x27\x1c", 0, "7z x"),
    ((".rar",), b"Rar!\x1a\x07", 0, "unrar x"),
    ((".tar",), b"ustar", 257, "tar -xf"),
)
_NO_TEXT = frozenset(".pdf .doc .docx .xls .xlsx .odt .png .jpg .jpeg .gif .webp .mp3 .wav .mp4 .pkl .pt .pth".split())


def find_files(path: str) -> tuple[str, list[Path]]:
    """Return (format, files) of a file or folder: `text`, one of `DOCUMENTS` or one of `TOKENS`; raise UserError."""
    if "\0" in path or not os.path.exists(path):
        raise UserError(f"{quote(path, 4096)[1:-1]}: no such file or folder", hint=_elsewhere(path))
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{path}: is neither a regular file nor a folder", hint="--data FILE")
    files = _in_folder(Path(path)) if os.path.isdir(path) else [Path(path)]
    if any(file.suffix in (".arrow", ".feather") for file in files):
        program = f"from datasets import load_from_disk as load; load({path!r}).to_json('data.jsonl')"
        raise UserError(
            f"{path}: holds Arrow files, which are not read",
            hint=f"python -c {quoted(program)}, then --data data.jsonl",
        )
    formats = {file: format_of(file) for file in files}
    found = set(formats.values())
    if found == {"csv", "text"}:  # a folder of texts that has tables too
        formats, found = dict.fromkeys(files, "text"), {"text"}
    if found & set(DOCUMENTS):
        formats = {file: kind for file, kind in formats.items() if file.stem.lower() not in ASIDE}
        found = set(formats.values())
    if len(found) > 1:
        mixed = "text and token ids do not mix" if found <= {"text", *TOKENS} else "a run takes one format"
        first = next(file for file, kind in formats.items() if kind != "text")
        fact = f"{path}: holds {' and '.join(sorted(found))} files: {mixed}"
        raise UserError(fact, hint=f"--data {quoted(first)}, or a folder with files of one format")
    return (found.pop() if found else "text"), list(formats)


def _elsewhere(path: str) -> str:
    """Return what to type in place of a path that does not exist: data that must be fetched, several files, a typo."""
    if "://" in path:
        return f"curl -LO {quoted(path)}, then --data {quoted(path.rpartition('/')[2] or 'FILE')}"
    if "," in path and all(map(os.path.exists, path.split(","))):
        return " ".join(f"--data {quoted(each)}" for each in path.split(","))
    folder, name = os.path.split(path.rstrip("/"))
    if path.count(":") and os.path.exists(path.rpartition(":")[0]):
        return f"--data {quoted(path.rpartition(':')[0])}:1, whose weight is a number above 0"
    with contextlib.suppress(OSError):
        if near := difflib.get_close_matches(name, os.listdir(folder or "."), n=1, cutoff=0.8):
            return f"--data {quoted(os.path.join(folder, near[0]))}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        program = f"from datasets import load_dataset as load; load({path!r}, split='train').to_json('data.jsonl')"
        return f"python -c {quoted(program)}, then --data data.jsonl: zerocli downloads nothing"
    return "--data with a file or folder that exists; docs/data.md has the formats"


def format_of(file: Path) -> str:
    """Return the format of a file; raise UserError if it must be unpacked or converted first."""
    suffix = file.suffix.lower()
    if suffix in TOKENS:
        return suffix
    with open(file, "rb") as opened:
        head = opened.read(512)
    refuse_archive(file, head)
    if suffix == ".parquet" or head[:4] == b"PAR1":
        return "parquet"
    if suffix in CSV_SUFFIXES:
        return "csv"
    return "jsonl" if suffix in JSON_SUFFIXES else "text"


def refuse_archive(file: Path, head: bytes) -> None:
    """Raise UserError with the command that unpacks the file, if it is packed; and if it holds no text."""
    if (suffix := file.suffix.lower()) in _NO_TEXT:
        fact = f"{file}: {suffix} is no text, and no documents or tokens"
        raise UserError(fact, hint="text or .jsonl made from it; docs/data.md has the formats")
    for suffixes, magic, at, command in _ARCHIVES:
        packed = bool(magic) and head[at : at + len(magic)] == magic
        if file.name.lower().endswith(suffixes) or packed:
            what = "is packed" if not packed else f"is packed (it has the first bytes of {suffixes[0]})"
            raise UserError(f"{file}: {what}: data is read unpacked", hint=f"{command} {quoted(file)}")


def _in_folder(folder: Path) -> list[Path]:
    """Return the files under `folder` except hidden ones, sorted by path."""

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted((file for file in found if file.is_file()), key=lambda file: file.relative_to(folder).as_posix())


@contextlib.contextmanager
def readable(shown: str) -> Iterator[None]:
    """While the body runs, a file that cannot be read is a UserError, which names the file, or `shown`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or shown}: cannot be read ({error.strerror or error})") from None


class TextCheck:
    """Decodes the bytes of one file in order; raises UserError at a NUL byte or at what is not UTF-8."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._taken = 0

    def decode(self, data: bytes, final: bool = False) -> str:
        """Return the text of the next bytes; an unfinished character at their end comes with the next ones."""
        nul, utf_16 = data.find(b"\0"), not self._taken and data[:2] in (b"\xff\xfe", b"\xfe\xff")
        if nul >= 0 and not utf_16:
            at, hint = self._taken + nul, "--data with a text, jsonl or parquet file"
            raise UserError(f"{self._name}: has a NUL byte at offset {at}: it is a binary file, not text", hint=hint)
        held = len(self._decoder.getstate()[0])
        try:
            text = self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            at = self._taken - held + error.start
            encoding = "utf-16" if utf_16 else "latin1"
            raise UserError(
                f"{self._name}: byte 0x{error.object[error.start]:02x} at offset {at} is not UTF-8",
                hint=f"iconv -f {encoding} -t utf-8 {quoted(self._name)} > text.txt, if it is text in {encoding}",
            ) from None
        self._taken += len(data)
        return text


def text_pieces(name: str, data: np.ndarray, nbytes: int = 2**20) -> Iterator[str]:
    """Yield bytes as text in pieces of about `nbytes`, cut at line ends so that a tokenizer sees whole lines.

    A line of more than 16 x `nbytes` characters is cut at its spaces, or anywhere if it has none.
    """
    check, rest, held = TextCheck(name), [""], 0
    for first in range(0, len(data), nbytes):
        part = data[first : first + nbytes].tobytes()
        text = check.decode(part, first + nbytes >= len(data))
        mark = "\n" if "\n" in text else " " if held > 16 * nbytes else ""
        head, cut, tail = text.rpartition(mark) if mark else ("", "", text)
        if mark and (cut or held > 16 * nbytes):
            yield "".join([*rest, head, cut])
            rest, held = [tail], len(tail)
        else:
            rest.append(text)
            held += len(text)
    if text := "".join(rest):
        yield text
