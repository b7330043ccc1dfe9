"""The form of what a run folder keeps: files that anybody may have touched are looked over before they are believed.

A form is a type, None, a tuple of forms (one of them), a list of a form (each item has it), a `Row`, or a table of
forms by key: `name?` may be absent, `*` is every key there is. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerocli.errors import UserError, quote
from zerocli.profile.ledger import TIERS
from zerocli.regular_files import read_regular

Form = Any


class Number:
    """A finite int or float."""


class Positive:
    """A finite number above zero."""


_WORDS = {
    None: "null",
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Number: "a number",
    Positive: "a number above 0",
}


@dataclass(frozen=True)
class Row:
    """A list of at least these items, each by its place."""

    items: tuple[Form, ...]


_PEAK = {
    "predicted": (Number, None),
    "measured": Number,
    "moment": str,
    "holders": [{"name": str, "category": str, "bytes": Number}],
}
_UNTIMED = {"seconds": None, "compute": None, "wait": None}
_TIMED = {
    "seconds": Positive,
    "compute": Number,
    "wait": Number,
    "waits": {"*": Number},
    "steps": int,
    "tokens_per_second": Number,
    "tflops": (Number, None),
    "best_tflops": (Number, None),
    "utilisation": (Number, None),
    "overlap": (Number, None),
    "links": [{"lane": str, "bytes": Number, "seconds": Number, "achieved": Number, "best": (Number, None)}],
}
_TIMELINE = {
    "step": int,
    "memory_step?": int,
    "seconds": Number,
    "lanes": [str],
    "compute": [Row((str, str, Number, Number))],
    "spans": [Row((str, str, Number, Number, Number))],
    "memory": {"*": {"times": [Number], "bytes": {"*": [Number]}}},
    "lives": [Row((str, str, Number, Number, (Number, None), str))],
}
DOCUMENT: Form = {
    "config": str,
    "settings": {"zero": {"stage": int}, "offload": {"placement": str}},
    "device": str,
    "gpu": (str, None),
    "precision": str,
    "parameters": (int, None),
    "ranks": int,
    "tp": int,
    "followed": bool,
    "steps?": Row((int, int)),
    "rows": [{"category": str, "tier": str, "predicted": (Number, None), "measured": (Number, None)}],
    "peak": dict.fromkeys(TIERS, _PEAK),
    "step": (_TIMED, _UNTIMED),
    "system": (dict.fromkeys(("rss_peak", "pinned", "nvme"), Number), None),
    "notes": [str],
    "timeline?": _TIMELINE,
}
LINE: Form = {
    "step": int,
    "loss": float,  # of a run that diverged it is not finite
    "tokens": Positive,
    "seconds": Positive,
    "peak": {"*": Number},
    "wait": {"*": Number},
}
"""What a line of metrics has at least."""


ANOTHER = "zerocli profile with another run"


def read_table(path: Path, max_nbytes: int, hint: str = ANOTHER) -> dict[str, Any]:
    """Return the table in a JSON file; UserError, with `hint`, if it cannot be read or holds none."""
    try:
        value = json.loads(read_regular(path, max_nbytes), parse_constant=_refuse)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint=ANOTHER) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not what zerocli writes: {error}", hint=hint) from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not what zerocli writes: it holds no table", hint=hint)
    return value


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def fault(value: Any, form: Form, place: str = "") -> str:
    """Return what is wrong with a value and where, in words; an empty text if it has the form."""
    if isinstance(form, tuple):
        faults = [fault(value, each, place) for each in form]
        return "" if "" in faults else faults[0]
    if isinstance(form, list):
        if not isinstance(value, list):
            return _wrong(value, place, "a list")
        return next(filter(None, (fault(each, form[0], f"{place}[{i}]") for i, each in enumerate(value))), "")
    if isinstance(form, Row):
        if not isinstance(value, list) or len(value) < len(form.items):
            return _wrong(value, place, f"a list of {len(form.items)}")
        pairs = zip(value, form.items, strict=False)
        return next(filter(None, (fault(each, it, f"{place}[{i}]") for i, (each, it) in enumerate(pairs))), "")
    if isinstance(form, Mapping):
        return _table_fault(value, form, place)
    return "" if _is(value, form) else _wrong(value, place, _WORDS[form])


def _table_fault(value: Any, form: Mapping[str, Form], place: str) -> str:
    if not isinstance(value, dict):
        return _wrong(value, place, "a table")
    for key, each in form.items():
        name = key.removesuffix("?")
        if key != "*" and name not in value and name == key:
            return f"there is no {place}{'.' if place else ''}{name}"
        for found in value if key == "*" else [name] if name in value else []:
            if text := fault(value[found], each, f"{place}{'.' if place else ''}{found}"):
                return text
    return ""


def _is(value: Any, form: Form) -> bool:
    if form is None:
        return value is None
    if form in (int, Number, Positive, float):
        if isinstance(value, bool) or not isinstance(value, int if form is int else int | float):
            return False
        if form is float:
            return True
        try:
            return math.isfinite(value) and (form is not Positive or value > 0)
        except OverflowError:  # an int beyond all floats
            return False
    return isinstance(value, form)


def _wrong(value: Any, place: str, wanted: str) -> str:
    return f"{place or 'it'} is {quote(value, 40)}, not {wanted}"


def timeline_fault(timeline: Mapping[str, Any]) -> str:
    """Return what does not go together in a timeline that has the form; an empty text if all does."""
    lanes = set(timeline["lanes"])
    used = {"compute", *(span[0] for span in timeline["spans"])}
    if not used <= lanes:
        return f"timeline.lanes has no {', '.join(sorted(used - lanes))}"
    for tier, memory in timeline["memory"].items():
        if {len(values) for values in memory["bytes"].values()} - {len(memory["times"])}:
            return f"timeline.memory.{tier} has not as many bytes as times"
    return ""
