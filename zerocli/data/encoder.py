"""Text to token ids: bytes, or a tokenizer.json with the special tokens of the folder that it lies in."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerocli.console import quoted
from zerocli.errors import UserError
from zerocli.regular_files import MAX_CONFIG_NBYTES

BYTES = "bytes"
FILE = "tokenizer.json"
_OTHER = ("tokenizer.model", "vocab.json", "spiece.model", "vocab.txt")
"""Files of tokenizers that transformers can turn into a tokenizer.json."""


GLUES = ("\n", ".", "a")
"""Texts before an answer that is tokenised alone: see `FileEncoder.encode_next`."""


class Encoded(NamedTuple):
    """The ids of a text, and the character that each begins at."""

    ids: np.ndarray
    starts: np.ndarray
    after: int = 0
    """Number of ids that the tokenizer has put after the text, such as eos."""


class Encoder:
    """Bytes as token ids; the tokenizers of files derive from it."""

    name = BYTES
    folder = ""
    """The folder of the tokenizer, where its chat template is; empty for bytes."""
    size = 256
    """One more than the largest id."""
    eos: int | None = None
    identity = BYTES
    """Differs between encoders that give different ids."""

    @property
    def dtype(self) -> Any:
        """The smallest unsigned type that holds every id."""
        return np.uint8 if self.size <= 2**8 else np.uint16 if self.size <= 2**16 else np.uint32

    def encode(self, texts: Sequence[str], special: bool = False, places: bool = True) -> list[Encoded]:
        """Return the ids of each text; with `special` also those that the tokenizer puts around a text, such as bos.

        Without `places` all are said to begin at character 0, which takes less time.
        """
        found = []
        for text in texts:
            ids = np.frombuffer(text.encode(), np.uint8)
            # A byte whose upper bits are 10 continues a character.
            found.append(Encoded(ids, np.cumsum((ids & 0xC0) != 0x80) - 1))
        return found

    def encode_prompts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids that a model is given to continue each text: with what comes before it, as bos."""
        return [each.ids[: len(each.ids) - each.after] for each in self.encode(texts, special=True, places=False)]

    def encode_next(self, ids: np.ndarray, text: str, more: str) -> np.ndarray:
        """Return the ids of `more`, which follows a text of these ids, so that no token spans both."""
        return self.encode([more], places=False)[0].ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return bytes(each for each in ids if each < 256).decode("utf-8", "replace")


class FileEncoder(Encoder):
    """A tokenizer.json, read by the package tokenizers."""

    def __init__(self, path: str) -> None:
        try:
            import tokenizers
        except ImportError:
            message = f"{path}: reading it needs the package tokenizers, which is not installed"
            raise UserError(message, hint="pip install 'zerocli[hf]'") from None
        # Said by default, it makes no warning when this process later forks (torch.compile does).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises bare Exception
            hint = "a whole copy of it: hf download OWNER/NAME tokenizer.json --local-dir FOLDER"
            raise UserError(f"{path}: is not a tokenizer.json ({error})", hint=hint) from None
        self.name, self.folder = path, str(Path(path).absolute().parent)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        eos = special_tokens(self.folder).get("eos_token")
        self.eos = vocabulary.get(eos) if eos else None
        self.identity = f"{hashlib.sha256(Path(path).read_bytes()).hexdigest()} {self.eos}"

    def encode(self, texts: Sequence[str], special: bool = False, places: bool = True) -> list[Encoded]:
        found = []
        for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=special):
            ids = np.array(encoding.ids, self.dtype)
            starts = [start for start, _ in encoding.offsets] if places else np.zeros(len(ids))
            placed = np.flatnonzero(np.array(encoding.special_tokens_mask if special else [0]) == 0)
            after = len(ids) - 1 - int(placed[-1]) if special and len(placed) else 0
            found.append(Encoded(ids, np.array(starts, np.int64), after))
        return found

    def encode_next(self, ids: np.ndarray, text: str, more: str) -> np.ndarray:
        """See `Encoder`. Tokenizers that put a space before a text put none before one that follows another.

        So the ids are those of `more` alone, or of `more` after another text, whichever reads as the two texts do.
        """
        [whole] = self.encode_prompts([text + more])
        alone = self.encode([more], places=False)[0].ids
        found = [alone]
        for glue in GLUES:
            first, both = self.encode([glue, glue + more], places=False)
            if np.array_equal(both.ids[: len(first.ids)], first.ids):
                found.append(both.ids[len(first.ids) :])
        expected = self.decode(whole.tolist())
        fitting = [each for each in found if self.decode([*ids.tolist(), *each.tolist()]) == expected]
        return fitting[0] if fitting else alone

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def find_tokenizer(tokenizer: str, folder: str) -> tuple[str, str]:
    """Return (`bytes` or the path of a tokenizer.json, why that one) for `data.tokenizer` and `model.folder`."""
    if tokenizer == BYTES:
        return BYTES, "as asked"
    if tokenizer:
        path = os.path.join(tokenizer, FILE) if os.path.isdir(tokenizer) else tokenizer
        if not os.path.isfile(path):
            fact = f"has no {FILE}" if path != tokenizer else "no such tokenizer file"
            raise UserError(f"{tokenizer}: {fact}", hint=_conversion(tokenizer) or "--set data.tokenizer=bytes")
        return path, "as asked"
    if not folder:
        return BYTES, "no tokenizer was given"
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    path = os.path.join(folder, FILE)
    if os.path.isfile(path):
        return path, "of the model's folder"
    if hint := _conversion(folder):
        raise UserError(f"{folder}: has a tokenizer, but no {FILE}", hint=hint)
    return BYTES, f"the model's folder has no {FILE}"


def open_encoder(path: str, vocab: int = 0) -> Encoder:
    """Return the encoder of `bytes` or of a tokenizer.json; UserError if it has ids beyond a `vocab` that is known."""
    encoder = Encoder() if path == BYTES else FileEncoder(path)
    if vocab and encoder.size > vocab:
        raise UserError(
            f"{encoder.name}: has {encoder.size} token ids, and the model knows {vocab}: 0 to {vocab - 1}",
            hint=f"--set model.vocab={encoder.size}; or the model's own tokenizer: --set data.tokenizer=PATH",
        )
    return encoder


def _conversion(folder: str) -> str:
    if not any(os.path.isfile(os.path.join(folder, name)) for name in _OTHER):
        return ""
    program = f"from transformers import AutoTokenizer as A; A.from_pretrained({folder!r}).save_pretrained({folder!r})"
    return f"python -c {quoted(program)}"


def special_tokens(folder: str) -> dict[str, str]:
    """Return the special tokens that a tokenizer's folder names: bos_token, eos_token and so on."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json_file(Path(folder, name)).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def read_json_file(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is no such file; raise UserError if it is no object."""
    if not path.is_file():
        return {}
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MAX_CONFIG_NBYTES))
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not a JSON object ({error})") from None
    return found
