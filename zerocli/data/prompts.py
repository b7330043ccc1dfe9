"""The prompts that are given to `zerocli generate`: one on the command line, or a file of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zerocli.data.files import JSON_SUFFIXES, TextCheck, readable
from zerocli.data.rows import make_row
from zerocli.data.tables import read_json
from zerocli.errors import UserError


class Prompt(NamedTuple):
    """A text to continue, or messages to answer."""

    place: str
    """What it is called in errors."""
    text: str
    """As it is shown; of messages the last one."""
    messages: Sequence[dict[str, Any]] = ()
    """The conversation that it ends; empty for a text."""
    tools: Any = None


def read_prompts(prompt: str | None, path: str | None) -> list[Prompt]:
    """Return the prompt of a command line, or those of a file; raise UserError if there is neither, or both."""
    if (prompt is None) == (path is None):
        fact = "PROMPT is missing" if path is None else "PROMPT and --prompts: one of them"
        raise UserError(fact, hint='zerocli generate RUN "a text to continue", or --prompts FILE')
    if path is None:
        if not prompt:
            raise UserError("PROMPT is empty", hint='zerocli generate RUN "a text to continue"')
        return [Prompt("the prompt", prompt)]
    if not os.path.isfile(path):
        raise UserError(f"{path}: no such file", hint="--prompts with a file of one prompt per line")
    with readable(path):
        found = _json(Path(path)) if path.lower().endswith(JSON_SUFFIXES) else _lines(Path(path))
    if not found:
        raise UserError(f"{path}: has no prompts", hint="one prompt per line")
    return found


def _lines(file: Path) -> list[Prompt]:
    lines = TextCheck(str(file)).decode(file.read_bytes(), final=True).removeprefix("\ufeff").splitlines()
    return [Prompt(f"{file}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _json(file: Path) -> list[Prompt]:
    found = []
    for place, value, _ in read_json(file):
        value = {"prompt": value} if isinstance(value, str) else value
        if isinstance(value, dict) and isinstance(value.get("prompt"), str):
            found.append(Prompt(place, value["prompt"]))
        elif isinstance(value, dict) and ("messages" in value or "conversations" in value):
            values = make_row(place, value, 0).values
            messages = with_system(values["messages"], values.get("system", ""))
            text = messages[-1].get("content")
            found.append(Prompt(place, text if isinstance(text, str) else "", messages, values.get("tools")))
        else:
            raise UserError(f"{place}: has neither prompt nor messages", hint='{"prompt": "a text to continue"}')
    return found


def with_system(messages: Sequence[dict[str, Any]], system: str) -> list[dict[str, Any]]:
    """Return a conversation that begins with this system prompt, unless it is empty or there is one already."""
    if not system or messages[0]["role"] in ("system", "developer"):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]
