"""Rows of .jsonl and .parquet files: `text`, `prompt` and `completion`, or `messages`; each with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerocli.errors import UserError, quote

KINDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt/completion": ("prompt", "completion"),
    "text": ("text",),
}
"""Kinds of rows and the keys that they have; the first that fits counts."""
COLUMNS = ("text", "prompt", "completion", "messages", "tools")
_NAMES = {str: "a string", int: "a number", float: "a number", bool: "a boolean", list: "a list", dict: "an object"}


class Row(NamedTuple):
    """One document of a file, not tokenised yet."""

    place: str
    """Where it is, for errors: FILE:LINE, or FILE: row NUMBER."""
    kind: str
    values: dict[str, Any]
    nbytes: int
    """Bytes of the file that it takes, about."""


def read_rows(form: str, files: Sequence[Path]) -> Iterator[Row]:
    """Yield the rows of files of one format; raise UserError with the place of the first that is malformed."""
    for file in files:
        yield from (_parquet if form == "parquet" else _jsonl)(file)


def _jsonl(file: Path) -> Iterator[Row]:
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
                hint = ""
                if content.strip() in (b"{", b"["):
                    hint = f"jq -c {'.' if content.strip() == b'{' else repr('.[]')} {file} > data.jsonl"
                fact = f"{error.msg[:1].lower()}{error.msg[1:]} at column {error.colno}"
                raise UserError(f"{place}: is not JSON: {fact}", hint=hint) from None
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: is not JSON: {error}") from None
            yield make_row(place, value, len(line))


def _parquet(file: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"{file}: reading it needs the package pyarrow, which is not installed",
            hint="pip install 'zerocli[parquet]'",
        ) from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            columns = [name for name in opened.schema_arrow.names if name in COLUMNS]
            if not columns:
                _refuse_keys(str(file), opened.schema_arrow.names, "columns")
            each = file.stat().st_size // max(1, opened.metadata.num_rows)
            for batch in opened.iter_batches(batch_size=256, columns=columns):
                for value in batch.to_pylist():
                    number += 1
                    # A column is there for all rows; what is null in one is absent from it.
                    present = {key: each for key, each in value.items() if each is not None}
                    yield make_row(f"{file}: row {number}", present, each)
    except (pyarrow.ArrowException, EOFError) as error:
        after = f" after row {number}" if number else ""
        raise UserError(f"{file}: is not a whole parquet file{after} ({str(error).splitlines()[0]})") from None


def make_row(place: str, value: Any, nbytes: int) -> Row:
    """Return a row with its kind; raise UserError if its keys or their values are none of a document."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: is {_NAMES.get(type(value), 'null')}, not an object with text or messages")
    kind = next((kind for kind, keys in KINDS.items() if all(key in value for key in keys)), "")
    if not kind:
        _refuse_keys(place, list(value), "keys")
    for key in KINDS[kind]:
        if kind == "messages":
            _check_messages(place, value[key])
        else:
            _check_text(place, key, value[key])
    return Row(place, kind, {key: value[key] for key in (*KINDS[kind], "tools") if key in value}, nbytes)


def _refuse_keys(place: str, keys: Sequence[Any], what: str) -> None:
    shown = ", ".join(quote(key, 40).strip('"') for key in keys[:8]) or "none"
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    raise UserError(
        f"{place}: has neither text, nor messages, nor prompt and completion; its {what}: {shown}{more}",
        hint="rename what is trained on to text, or to prompt and completion",
    )


def _check_text(place: str, key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} is {_NAMES.get(type(value), 'null')}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: {key} has half of a surrogate pair at character {error.start}") from None


def _check_messages(place: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        fact = "empty" if messages == [] else _NAMES.get(type(messages), "null")
        raise UserError(f"{place}: messages is {fact}, not a list of objects with role and content")
    for number, message in enumerate(messages, start=1):
        where = f"{place}: message {number}"
        if not isinstance(message, dict):
            raise UserError(f"{where} is {_NAMES.get(type(message), 'null')}, not an object with role and content")
        if not isinstance(message.get("role"), str):
            raise UserError(f"{where} has no role; its keys: {', '.join(map(str, message)) or 'none'}")
        if isinstance(message.get("content"), str):
            _check_text(where, "content", message["content"])
        elif "content" not in message and "tool_calls" not in message:
            raise UserError(f"{where} has no content; its keys: {', '.join(map(str, message))}")
