"""Rows of documents with their places: `text`, `prompt` and `completion`, conversations, instructions and outputs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zerocli.errors import UserError, quote

MESSAGES = "messages"
INSTRUCTION = "instruction/output"
KINDS: dict[str, tuple[str, ...]] = {
    MESSAGES: ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    INSTRUCTION: ("instruction", "output"),
    "text": ("text",),
}
"""Kinds of rows and the keys that they have; the first that fits counts. Conversations become messages."""
PAIR = ("chosen", "rejected")
COLUMNS = tuple(
    "text prompt completion messages conversations instruction input output system tools chosen rejected".split()
)
"""Every key that is read."""
BESIDE = {MESSAGES: ("system", "tools"), "conversations": ("system", "tools"), INSTRUCTION: ("input", "system")}
"""Keys that rows of a kind may have beside theirs."""
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "bot", "assistant", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    **{role: role for role in ("system", "developer", "function", "ipython", "function_call")},
}
"""Roles of messages, and the names that chat templates know them by."""
_GUESSES = (
    *(("question", "answer"), ("query", "response"), ("prompt", "response"), ("input", "output")),
    *(("problem", "solution"), ("instruction", "response"), ("question", "response")),
)
_NAMES = {str: "a string", int: "a number", float: "a number", bool: "a boolean", list: "a list", dict: "an object"}


class Row(NamedTuple):
    """One document of a file, not tokenised yet."""

    place: str
    """Where it is, for errors: FILE:LINE, or FILE: row NUMBER."""
    kind: str
    values: dict[str, Any]
    nbytes: int
    """Bytes of the file that it takes, about."""


def parse_columns(text: str) -> dict[str, str]:
    """Return the file's name of each key that `data.columns` names: `question:prompt` is {"prompt": "question"}."""
    pairs = (part.rpartition(":") for part in text.split(",") if part)
    return {ours.strip(): theirs.strip() for theirs, _, ours in pairs}


def make_row(place: str, value: Any, nbytes: int, columns: Mapping[str, str] | None = None) -> Row:
    """Return a row with its kind; raise UserError if its keys or their values are none of a document.

    With `columns` it has only the keys that these name.
    """
    if not isinstance(value, dict):
        raise UserError(f"{place}: is {_NAMES.get(type(value), 'null')}, not an object with text or messages")
    if columns:
        value = _renamed(place, value, columns)
    if all(key in value for key in PAIR):
        taken = "chosen:messages" if isinstance(value["chosen"], list) else "prompt:prompt,chosen:completion"
        raise UserError(
            f"{place}: has chosen and rejected: preference pairs are not trained on (there is no DPO yet)",
            hint=f"--set data.columns={taken} trains on the chosen answers alone",
        )
    if isinstance(value.get("label"), bool) and "prompt" in value and "completion" in value:
        raise UserError(
            f"{place}: has a label beside its completion: rated answers are not trained on (there is no KTO yet)",
            hint="--set data.columns=prompt:prompt,completion:completion trains on all of them, whatever their label",
        )
    kind = next((kind for kind, keys in KINDS.items() if all(key in value for key in keys)), "")
    if not kind:
        refuse_keys(place, list(value), "keys")
    beside = {key: value[key] for key in BESIDE.get(kind, ()) if value.get(key) not in (None, "")}
    for key in beside.keys() - {"tools"}:
        _check_text(place, key, value[key])
    if "tools" in beside:
        beside["tools"] = _tools(place, beside["tools"])
    own = {key: value[key] for key in KINDS[kind]}
    if kind in (MESSAGES, "conversations"):
        messages = [_message(f"{place}: message {n}", each) for n, each in _numbered(place, kind, own[kind])]
        return Row(place, MESSAGES, {"messages": messages, **beside}, nbytes)
    for key, text in own.items():
        _check_text(place, key, text)
    return Row(place, kind, own | beside, nbytes)


def _renamed(place: str, value: dict[Any, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    absent = [theirs for ours, theirs in columns.items() if theirs not in value and ours not in ("input", "system")]
    if absent:
        have, missing = _listed(list(value)), " and ".join(absent)
        meant = difflib.get_close_matches(absent[0], map(str, value), 1)
        hint = f"--set data.columns={meant[0]}:..." if meant else "--set data.columns=THEIRS:prompt,THEIRS:completion"
        raise UserError(f"{place}: has no {missing}, which data.columns names; its keys: {have}", hint=hint)
    return {ours: value[theirs] for ours, theirs in columns.items() if theirs in value}


def _listed(keys: Sequence[Any]) -> str:
    shown = ", ".join(quote(key, 40).strip('"') for key in keys[:8]) or "none"
    return shown + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")


def refuse_keys(place: str, keys: Sequence[Any], what: str) -> None:
    """Raise UserError: none of these keys is one of a document."""
    guess = next((pair for pair in _GUESSES if all(key in keys for key in pair)), ("QUESTION", "ANSWER"))
    raise UserError(
        f"{place}: has neither text, nor messages, nor prompt and completion, nor instruction and output; "
        f"its {what}: {_listed(keys)}",
        hint=f"--set data.columns={guess[0]}:prompt,{guess[1]}:completion",
    )


def _check_text(place: str, key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UserError(f"{place}: {key} is {_NAMES.get(type(value), 'null')}, not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: {key} has half of a surrogate pair at character {error.start}") from None


def _tools(place: str, value: Any) -> Any:
    """Return the tools of a conversation: a list, or the text of one (columns of a table are texts)."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{place}: tools is not JSON: {error}") from None
    if not isinstance(found, list):
        raise UserError(f"{place}: tools is {_NAMES.get(type(found), 'null')}, not a list of functions")
    return found


def _numbered(place: str, key: str, messages: Any) -> Iterator[tuple[int, Any]]:
    if not isinstance(messages, list) or not messages:
        fact = "empty" if messages == [] else _NAMES.get(type(messages), "null")
        raise UserError(f"{place}: {key} is {fact}, not a list of objects with role and content")
    return enumerate(messages, start=1)


def _message(where: str, message: Any) -> dict[str, Any]:
    """Return a message with role and content; ShareGPT's have `from` and `value` instead."""
    if not isinstance(message, dict):
        raise UserError(f"{where} is {_NAMES.get(type(message), 'null')}, not an object with role and content")
    if "role" not in message and "from" in message:
        if "value" not in message:
            raise UserError(f"{where} has no value; its keys: {', '.join(map(str, message))}")
        rest = {key: each for key, each in message.items() if key not in ("from", "value")}
        message = {"role": message["from"], "content": message["value"], **rest}
    if not isinstance(message.get("role"), str):
        raise UserError(f"{where} has no role; its keys: {', '.join(map(str, message)) or 'none'}")
    message = {**message, "role": ROLES.get(message["role"].lower(), message["role"])}
    if isinstance(message.get("content"), list):
        message["content"] = _joined(where, message["content"])
    if isinstance(message.get("content"), str):
        _check_text(where, "content", message["content"])
    elif "content" not in message and "tool_calls" not in message:
        raise UserError(f"{where} has no content; its keys: {', '.join(map(str, message))}")
    return _tool_call(where, message) if message["role"] == "function_call" else message


def _joined(where: str, parts: list[Any]) -> str:
    """Return content that is given in parts, each `{"type": "text", "text": ...}`, as one text."""
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else _NAMES.get(type(part), "null")
            raise UserError(
                f"{where}: a part of its content is {quote(kind, 40)}, and only text is trained on",
                hint="the same data without such rows",
            )
    return "".join(part["text"] for part in parts)


def _tool_call(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return ShareGPT's `function_call`, whose text is JSON, as a message of the assistant with tool_calls."""
    try:
        calls = json.loads(message.get("content") or "")
        calls = [
            {"type": "function", "function": dict(each)} for each in (calls if isinstance(calls, list) else [calls])
        ]
    except (ValueError, TypeError):
        raise UserError(f"{where}: function_call is not JSON with name and arguments") from None
    return {"role": "assistant", "content": "", "tool_calls": calls}


def refuse_role(place: str, messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Raise UserError at the first message with a role that neither is usual nor stands in the chat template."""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role in ROLES or f"'{role}'" in template or f'"{role}"' in template:
            continue
        meant = difflib.get_close_matches(role, ROLES, 1)
        raise UserError(
            f"{place}: message {number} has the role {quote(role, 40)}, which the chat template does not know",
            hint=f"the role {meant[0]}" if meant else "one of system, user, assistant, tool",
        )
