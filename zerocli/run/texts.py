"""Text to token ids and back: a tokenizer.json, or bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerocli.config import Config
from zerocli.errors import UserError
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular

BYTES = "bytes"
FILE = "tokenizer.json"


class Codec:
    """Encodes a prompt and decodes what a model generates; `ends` are the ids that end a text."""

    def __init__(self, tokenizer: str = BYTES, ends: frozenset[int] = frozenset()) -> None:
        self.ends = ends
        self._tokenizer = None if tokenizer == BYTES else _open(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with those that the tokenizer puts before a text."""
        if self._tokenizer is None:
            return list(text.encode("utf-8", "replace"))
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return bytes(each for each in ids if each < 256).decode("utf-8", "replace")
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def continuation(self, prompt: Sequence[int], made: Sequence[int]) -> str:
        """Return the text of `made` as it follows `prompt`: alone, tokenizers drop a space at its beginning."""
        before, whole = self.decode(prompt), self.decode([*prompt, *made])
        return whole[len(before) :] if whole.startswith(before) else self.decode(made)


def _open(tokenizer: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        message = f"{tokenizer}: reading it needs the package tokenizers, which is not installed"
        raise UserError(message, hint="pip install 'zerocli[hf]'") from None
    try:
        return tokenizers.Tokenizer.from_file(tokenizer)
    except Exception as error:  # the package raises bare Exception
        raise UserError(f"{tokenizer}: is not a tokenizer.json ({error})") from None


def open_codec(config: Config, folder: str = "") -> Codec:
    """Return the codec of a run or of a model's folder: its tokenizer.json, or bytes if it has none."""
    given, tokenizer = folder, config.data.tokenizer
    folder = folder or getattr(config.model, "folder", "")
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    beside = os.path.join(folder, FILE)
    # A run may ask for bytes; of a folder that has a tokenizer nobody does.
    if folder and (not tokenizer or (given and tokenizer == BYTES)) and os.path.isfile(beside):
        tokenizer = beside
    tokenizer = os.path.join(tokenizer, FILE) if os.path.isdir(tokenizer) else tokenizer
    return Codec(tokenizer or BYTES, end_ids(folder) if folder else frozenset())


def end_ids(folder: str) -> frozenset[int]:
    """Return the ids that end a text, as generation_config.json or config.json of a folder says."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder, name)
        try:
            found = json.loads(read_regular(path, MAX_CONFIG_NBYTES)).get("eos_token_id") if path.is_file() else None
        except (ValueError, AttributeError, OSError):
            continue
        ids = found if isinstance(found, list) else [found]
        if all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            return frozenset(ids)
    return frozenset()
