"""Reads files of rows: .jsonl, JSON arrays, .csv, .tsv and .parquet; each row comes with its place."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerocli.data.files import TextCheck
from zerocli.data.rows import COLUMNS, Row, make_row, refuse_keys
from zerocli.errors import UserError

Place = tuple[str, Any, int]
"""Where a row is, its value, and the bytes that it takes."""
MAX_FIELD = 2**31 - 1


def read_rows(form: str, files: Sequence[Path], columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """Yield the rows of files of one format; raise UserError with the place of the first that is malformed."""
    for file in files:
        if form == "parquet":
            yield from _parquet(file, columns or {})
            continue
        values = read_csv(file) if form == "csv" else read_json(file)
        yield from (make_row(place, value, nbytes, columns) for place, value, nbytes in values)


def read_json(file: Path) -> Iterator[Place]:
    """Yield the values of a file: one per line, or the elements of one array."""
    with open(file, "rb") as opened:
        head = opened.read(512)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        return _array(file)
    return _lines(file)


def _lines(file: Path) -> Iterator[Place]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{file}:{number}"
            content = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).rstrip(b"\r\n")
            if not content.strip():
                continue
            if (nul := content.find(b"\0")) >= 0:
                raise UserError(f"{place}: has a NUL byte at offset {nul} of the line: it is a binary file, not jsonl")
            try:
                value = json.loads(content.decode())
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: is not UTF-8 at offset {error.start} of the line") from None
            except json.JSONDecodeError as error:
                hint = f"jq -c . {file} > data.jsonl" if content.strip() == b"{" else ""
                raise UserError(f"{place}: is not JSON: {_fact(error)} at column {error.colno}", hint=hint) from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: is not JSON: {error}") from None
            yield place, value, len(line)


def _fact(error: json.JSONDecodeError) -> str:
    return f"{error.msg[:1].lower()}{error.msg[1:]}"


def _array(file: Path) -> Iterator[Place]:
    """Yield the elements of one JSON array. All of its text is in memory, but only one element at a time."""
    text = TextCheck(str(file)).decode(file.read_bytes(), final=True)
    decoder, at, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    expected = "]"
    while True:
        at = _skip(text, at)
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]" and expected:
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise UserError(f"{file}:{error.lineno}: is not JSON: {_fact(error)} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}:{line}: is not JSON: {error}") from None
        yield f"{file}:{line}", value, end - at
        at = _skip(text, end)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            number = 1 + text.count("\n", 0, at)
            raise UserError(f"{file}:{number}: is not JSON: expecting ',' or ']' after an element of the array")
        at, expected = at + 1, ""
    if text[_skip(text, at + 1) :]:
        raise UserError(f"{file}: has more after its JSON array", hint="one array, or one object per line")


def _skip(text: str, at: int) -> int:
    """Return the place of the next character that is no white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def read_csv(file: Path) -> Iterator[Place]:
    """Yield the rows of a table with a header; the delimiter is a comma, in .tsv files a tab."""
    checked = TextCheck(str(file))
    csv.field_size_limit(MAX_FIELD)
    with open(file, "rb") as opened:
        texts = (checked.decode(line).removeprefix("\ufeff") for line in opened)
        reader = csv.reader(texts, delimiter="\t" if file.suffix.lower() == ".tsv" else ",", strict=True)
        last = 1
        try:
            header = next(reader, [])
            last = reader.line_num + 1
            for cells in reader:
                place = f"{file}:{last}"
                last = reader.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(header):
                    fact = f"{len(cells)} cells, and the header has {len(header)} columns"
                    raise UserError(f"{place}: has {fact}", hint="quote cells with commas or line ends in them")
                # A cell that is empty is absent, if others can do without it.
                yield place, dict(zip(header, cells, strict=True)), sum(map(len, cells))
        except csv.Error as error:
            raise UserError(f"{file}:{last}: is not a row of a table: {error}") from None


def _parquet(file: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{file}: reading it needs the package pyarrow, which is not installed",
            hint="pip install 'zerocli[parquet]'",
        ) from None
    number, wanted = 0, tuple(columns.values()) or COLUMNS
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            found = [name for name in names if name in wanted]
            if not found and not columns:
                refuse_keys(str(file), names, "columns")
            each = file.stat().st_size // max(1, opened.metadata.num_rows)
            for batch in opened.iter_batches(batch_size=256, columns=found or names):
                for value in batch.to_pylist():
                    number += 1
                    # A column is there for all rows; what is null in one is absent from it.
                    present = {key: each for key, each in value.items() if each is not None}
                    yield make_row(f"{file}: row {number}", present, each, columns)
    except (pyarrow.ArrowException, EOFError) as error:
        after = f" after row {number}" if number else ""
        fact = f"{file}: is not a whole parquet file{after} ({str(error).splitlines()[0]})"
        raise UserError(fact, hint="another copy of the file") from None
