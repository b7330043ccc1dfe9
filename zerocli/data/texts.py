"""Text to token ids and back: a tokenizer.json, or bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from zerocli.config import Config
from zerocli.data.chat import Chat, find_template
from zerocli.data.documents import alpaca_prompt
from zerocli.data.encoder import BYTES, Encoder, find_tokenizer, open_encoder
from zerocli.data.prompts import Prompt, with_system
from zerocli.data.rows import INSTRUCTION, MESSAGES
from zerocli.errors import UserError
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular

CHAT_KINDS = (MESSAGES, INSTRUCTION)
"""Kinds of rows whose runs are asked by messages."""


class Codec:
    """Encodes a prompt and decodes what a model generates; `ends` are the ids that end a text."""

    def __init__(self, encoder: Encoder, ends: frozenset[int] = frozenset(), system: str = "") -> None:
        own = frozenset() if encoder.eos is None else frozenset([encoder.eos])
        self.ends, self._encoder, self._system = ends | own, encoder, system
        self._chat: Chat | None = None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, with those that the tokenizer puts before a text."""
        whole = text.encode("utf-8", "replace").decode()  # a terminal may give half a character
        return [int(each) for each in self._encoder.encode_prompts([whole])[0]]

    def open_chat(self, kind: str) -> None:
        """Have `encode_chat` answer messages as rows of this kind are rendered; UserError if there is no template."""
        if not find_template(self._encoder.folder):
            if kind == INSTRUCTION:
                return  # of instructions the text is known
            fact = f"{self._encoder.folder or 'the tokenizer of bytes'}: has no chat template"
            raise UserError(
                fact, hint="without --chat, the prompt as a text; or --set data.tokenizer=FOLDER that has one"
            )
        self._chat = Chat(self._encoder, masked=False)
        self.ends |= self._chat.ends()

    def encode_chat(self, prompt: Prompt) -> tuple[str, list[int]]:
        """Return the text and the ids that the model is given to answer a message."""
        messages = with_system(prompt.messages or [{"role": "user", "content": prompt.text}], self._system)
        if self._chat is None:
            text = alpaca_prompt({"instruction": prompt.text})
            return text, self.encode(text)
        text = self._chat.prompt(prompt.place, messages, prompt.tools)
        return text, self._encoder.encode([text], places=False)[0].ids.tolist()

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoder.decode(ids)

    def continuation(self, prompt: Sequence[int], made: Sequence[int]) -> str:
        """Return the text of `made` as it follows `prompt`: alone, tokenizers drop a space at its beginning."""
        before, whole = self.decode(prompt), self.decode([*prompt, *made])
        return whole[len(before) :] if whole.startswith(before) else self.decode(made)


def open_codec(config: Config, folder: str = "") -> Codec:
    """Return the codec of a run or of a model's folder: its tokenizer.json, or bytes if it has none."""
    # A run may ask for bytes; of a folder that has a tokenizer nobody does.
    asked = "" if folder and config.data.tokenizer == BYTES else config.data.tokenizer
    folder = folder or config.model.folder
    tokenizer, _ = find_tokenizer(asked, folder)
    folder = os.path.dirname(folder) if os.path.isfile(folder) else folder
    return Codec(open_encoder(tokenizer), end_ids(folder) if folder else frozenset(), config.data.system)


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
