"""Conversations to text by the chat template of a tokenizer's folder, and which characters the assistant wrote.

The template is data. transformers renders it in a sandbox; no code of the folder runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zerocli.config import hub
from zerocli.data.encoder import Encoded, Encoder, read_json_file, special_tokens
from zerocli.data.rows import refuse_role
from zerocli.errors import UserError
from zerocli.regular_files import MAX_CONFIG_NBYTES

FILE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
_ANSWER = "zerocli answers"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def find_template(folder: str) -> str:
    """Return the chat template of a tokenizer's folder, "" if it has none."""
    if not folder:
        return ""
    file = Path(folder, FILE)
    if file.is_file():
        with open(file, "rb") as opened:
            return opened.read(MAX_CONFIG_NBYTES).decode("utf-8", "replace")
    found = read_json_file(Path(folder, CONFIG)).get("chat_template", "")
    if isinstance(found, list):  # several, each with a name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default", "")
    return found if isinstance(found, str) else ""


class Chat:
    """The chat template of an encoder's folder."""

    def __init__(self, encoder: Encoder, masked: bool) -> None:
        if not encoder.folder:
            raise UserError(
                "rows of messages need the tokenizer and the chat template of a model's folder",
                hint="a model's folder as CONFIG, or --set data.tokenizer=FOLDER",
            )
        self.template = find_template(encoder.folder)
        self._name = os.path.join(encoder.folder, FILE)
        if not os.path.isfile(self._name):
            self._name = f"{os.path.join(encoder.folder, CONFIG)}: chat_template"
        if not self.template:
            raise UserError(
                f"{encoder.folder}: has no chat template ({FILE}, or chat_template in {CONFIG})",
                hint="the folder of an instruction-tuned model: --set data.tokenizer=FOLDER; or rows of text",
            )
        if not hub.installed():
            raise UserError(
                "rows of messages are rendered by the package transformers, which is not installed",
                hint="pip install 'zerocli[hf]'",
            )
        with hub.importing():
            from transformers import PreTrainedTokenizerFast
        specials: dict[str, Any] = special_tokens(encoder.folder)
        self._encoder, self._masked = encoder, masked
        make: Any = PreTrainedTokenizerFast
        self._renderer = make(tokenizer_file=encoder.name, **specials)
        self._marks = bool(_GENERATION.search(self.template))
        self.last_only = 0
        """Conversations of which only the assistant's last turn counts: see `encode`."""
        self.apart = 0
        """Conversations in which a token would span the text before an answer and the answer."""

    def encode(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the ids of each (place, values), and which of them the assistant wrote.

        A template with `{% generation %}` says itself what the assistant writes. Otherwise a turn is what is added to
        the text by it, which takes that each conversation's text begins with the text of its first turns. Where it does
        not (some templates drop the reasoning of earlier turns), only the last turn counts.
        """
        for place, values in rows:
            refuse_role(place, values["messages"], self.template)
        if self._masked and self._marks:
            for place, values in rows:
                yield self._encode_marked(place, values["messages"], values.get("tools"))
            return
        texts = [self._render(place, values["messages"], values.get("tools")) for place, values in rows]
        several = self._encoder.encode(texts, places=self._masked)
        for (place, values), text, encoded in zip(rows, texts, several, strict=True):
            if self._masked:
                turns = self._turns(place, text, values["messages"], values.get("tools"))
                yield self._with_turns(text, encoded, turns)
            else:
                yield encoded.ids, np.full(len(encoded.ids), True)

    def _with_turns(self, text: str, encoded: Encoded, turns: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, and which are of turns (first character, end).

        The ids before a turn are those that the text before it has alone, as when the model is asked for the turn.
        """
        before = self._encoder.encode([text[:start] for start, _ in turns], places=False)
        if all(np.array_equal(encoded.ids[: len(each.ids)], each.ids) for each in before):
            counted = np.full(len(encoded.ids), False)
            for each, (_, end) in zip(before, turns, strict=True):
                counted[len(each.ids) : int((encoded.starts < end).sum())] = True
            return encoded.ids, counted
        self.apart += 1
        ids, counted, done = encoded.ids[:0], np.zeros(0, bool), 0
        for place, cut in enumerate([*(edge for turn in turns for edge in turn), len(text)]):
            more = self._encoder.encode_next(ids, text[:done], text[done:cut]) if cut > done else ids[:0]
            ids, counted, done = (
                np.concatenate([ids, more]),
                np.append(counted, np.full(len(more), place % 2 == 1)),
                cut,
            )
        return ids, counted

    def _turns(self, place: str, text: str, messages: list[Any], tools: Any) -> list[tuple[int, int]]:
        """Return the (first character, end) of each turn of the assistant."""
        ours = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        found = []
        for index in ours:
            last = index == len(messages) - 1
            before = self._before(place, text, messages[:index], tools)
            whole = text if last else self._render(place, messages[: index + 1], tools)
            if before is None or not text.startswith(whole):
                break
            found.append((before, len(whole)))
        else:
            return found
        if ours[-1] == len(messages) - 1:
            before = self._before(place, text, messages[:-1], tools)
            if before is not None:
                self.last_only += 1
                return [(before, len(text))]
        raise UserError(
            f"{place}: the chat template renders earlier turns in another way once others follow, so the assistant's "
            "part is not known",
            hint="--set data.mask=none counts every token for the loss",
        )

    def _before(self, place: str, text: str, messages: list[Any], tools: Any) -> int | None:
        """Return the length of the text before the assistant's answer; None if `text` does not begin with it."""
        if not messages:
            return 0
        for prompt in (True, False):
            before = self._render(place, messages, tools, prompt)
            if text.startswith(before):
                return len(before)
        return None

    def _render(self, place: str, messages: list[Any], tools: Any, prompt: bool = False) -> str:
        return str(self._apply(place, messages, tools, tokenize=False, add_generation_prompt=prompt))

    def _encode_marked(self, place: str, messages: list[Any], tools: Any) -> tuple[np.ndarray, np.ndarray]:
        more = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(place, messages, tools, **more)
        return np.array(found["input_ids"], self._encoder.dtype), np.array(found["assistant_masks"], bool)

    def prompt(self, place: str, messages: list[Any], tools: Any = None) -> str:
        """Return the text that a model is given to answer a conversation."""
        refuse_role(place, messages, self.template)
        return self._render(place, messages, tools, prompt=True)

    def ends(self) -> frozenset[int]:
        """Return the id of the special token that the template puts after an answer, if it puts one."""
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            after = self._render("the end of an answer", said, None).rpartition(_ANSWER)[2]
        except UserError:  # a template that wants other conversations
            return frozenset()
        ids = self._encoder.encode([after], places=False)[0].ids[:1].tolist()
        return frozenset(ids) if ids and not self._encoder.decode(ids) else frozenset()

    def _apply(self, place: str, messages: list[Any], tools: Any, **more: Any) -> Any:
        import jinja2

        try:
            return self._renderer.apply_chat_template(messages, tools=tools, chat_template=self.template, **more)
        except Exception as error:  # of jinja2, or of the template itself: raise_exception(...)
            fact = str(error).splitlines()[0] if str(error) else type(error).__name__
            if isinstance(error, jinja2.TemplateSyntaxError):
                raise UserError(
                    f"{self._name}: line {error.lineno}: is not a chat template: {fact}",
                    hint=f"the template of the model's authors, as {FILE} in that folder",
                ) from None
            if type(error) is jinja2.TemplateError:
                raise UserError(f"{place}: the chat template refuses this conversation: {fact}") from None
            raise UserError(
                f"{self._name}: fails at {place}: {type(error).__name__}: {fact}",
                hint=f"the template of the model's authors, as {FILE} in that folder; or mend that row",
            ) from None
