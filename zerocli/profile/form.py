"""The form of the files in a run folder: users may have changed them, so they are checked before use.

A form looks like the JSON that it describes. A str names a kind of value; a list of one form describes every item, a
list of several the first items, by position; a tuple lists alternatives. In a table `name?` may be absent, and `*`
matches every key. Needs no torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from zerocli.errors import UserError, quote
from zerocli.profile.ledger import TIERS
from zerocli.regular_files import read_regular

ANOTHER = "zerocli profile with another run"
Form = Any
_MISSING = object()


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False


TEXT, FLAG, WHOLE, NUMBER, POSITIVE = "a text", "true or false", "a whole number", "a number", "a number above 0"
ANY_NUMBER, NULL, OR_NULL = "a number, finite or not", "null", ", or null"
_KINDS: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    FLAG: lambda value: isinstance(value, bool),
    WHOLE: lambda value: isinstance(value, int) and _is_finite(value),
    NUMBER: _is_finite,
    POSITIVE: lambda value: _is_finite(value) and value > 0,
    ANY_NUMBER: lambda value: type(value) in (int, float),
    NULL: lambda value: value is None,
}
_PEAK = {
    "predicted": NUMBER + OR_NULL,
    "measured": NUMBER,
    "moment": TEXT,
    "holders": [{"name": TEXT, "category": TEXT, "bytes": NUMBER}],
}
_UNTIMED = dict.fromkeys(("seconds", "compute", "wait"), NULL)
_TIMED = {
    "seconds": POSITIVE,
    "compute": NUMBER,
    "wait": NUMBER,
    "waits": {"*": NUMBER},
    "steps": WHOLE,
    "tokens_per_second": NUMBER,
    **dict.fromkeys(("tflops", "best_tflops", "utilisation", "overlap"), NUMBER + OR_NULL),
    "links": [{"lane": TEXT, "bytes": NUMBER, "seconds": NUMBER, "achieved": NUMBER, "best": NUMBER + OR_NULL}],
    "phases?": {"*": NUMBER},
    "predicted?": ({"seconds": NUMBER, "phases": {"*": NUMBER}}, NULL),
}
_TIMELINE = {
    "step": WHOLE,
    "memory_step?": WHOLE,
    "seconds": NUMBER,
    "lanes": [TEXT],
    "compute": [[TEXT, TEXT, NUMBER, NUMBER]],
    "spans": [[TEXT, TEXT, NUMBER, NUMBER, NUMBER]],
    "memory": {"*": {"times": [NUMBER], "bytes": {"*": [NUMBER]}}},
    "lives": [[TEXT, TEXT, NUMBER, NUMBER, NUMBER + OR_NULL, TEXT]],
}
_MADE = {
    **dict.fromkeys(("command", "date", "host", "system"), TEXT),
    "cores": WHOLE,
    "versions": {"*": TEXT + OR_NULL},
}
_RANK = {
    "rank": WHOLE,
    "node": TEXT,
    **dict.fromkeys(("hbm", "dram", "nvme", "rss_peak"), NUMBER),
    **dict.fromkeys(("seconds", "compute", "wait"), NUMBER + OR_NULL),
}
_SLOWEST = {"rank": WHOLE, "node": TEXT, "cause": TEXT}
_SLOWEST |= dict.fromkeys(("seconds", "median", "fastest"), NUMBER)
_SPREAD = {
    "intervals": WHOLE,
    **dict.fromkeys(("slowest", "median", "fastest"), NUMBER),
    "ranks": [{"rank": WHOLE, "node": TEXT, "intervals": WHOLE, "over": NUMBER, "cause": TEXT}],
}
_UNIT = {
    "unit": TEXT,
    "parameters": WHOLE,
    **dict.fromkeys(("forward", "backward", "collectives", "transfers", "update", "moved", "activations"), NUMBER),
    "held": {"*": NUMBER},
}
DOCUMENT: Form = {
    "config": TEXT,
    "settings": {"zero": {"stage": WHOLE}, "offload": {"placement": TEXT}},
    "device": TEXT,
    "gpu": TEXT + OR_NULL,
    "precision": TEXT,
    "parameters": WHOLE + OR_NULL,
    "ranks": WHOLE,
    "tp": WHOLE,
    "followed": FLAG,
    "steps?": [WHOLE, WHOLE],
    "rows": [{"category": TEXT, "tier": TEXT, "predicted": NUMBER + OR_NULL, "measured": NUMBER + OR_NULL}],
    "peak": dict.fromkeys((*TIERS, "*"), _PEAK),
    "step": (_TIMED, _UNTIMED),
    "system": (dict.fromkeys(("rss_peak", "pinned", "nvme"), NUMBER), NULL),
    "notes": [TEXT],
    "finding?": TEXT,
    "made?": _MADE,
    "capacity?": {"*": NUMBER + OR_NULL},
    "everyone?": [_RANK],
    "spread?": (_SPREAD, NULL),
    "units?": [_UNIT],
    "timeline?": _TIMELINE,
}
LINE: Form = {
    "step": WHOLE,
    "loss": ANY_NUMBER,  # not finite if the run diverged
    "tokens": POSITIVE,
    "seconds": POSITIVE,
    "peak": {"*": NUMBER},
    "wait": {"*": NUMBER},
    "slowest?": _SLOWEST,
}
"""The keys of a line of metrics that are read."""


def read_table(path: Path, max_nbytes: int, hint: str = ANOTHER) -> dict[str, Any]:
    """Return the object in a JSON file; UserError, with `hint`, if it cannot be read or is not an object."""
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
    raise ValueError(f"{word} is not JSON")


def fault(value: Any, form: Form, place: str = "") -> str:
    """Return what is wrong with a value and where, in words; an empty text if it has the form."""
    parts: Iterable[tuple[str, Any, Form]] = ()
    if value is _MISSING:
        return f"there is no {place}"
    if isinstance(form, tuple):
        faults = [fault(value, each, place) for each in form]
        return "" if "" in faults else faults[0]
    if isinstance(form, str):
        fits = _KINDS[form.removesuffix(OR_NULL)](value) or (form.endswith(OR_NULL) and value is None)
        wanted = form.partition(",")[0]
    elif isinstance(form, list):
        several = len(form) > 1
        fits = isinstance(value, list) and (not several or len(value) >= len(form))
        wanted = f"a list of {len(form)}" if several else "a list"
        if fits:
            pairs = zip(value, form if several else itertools.repeat(form[0]), strict=False)
            parts = ((f"{place}[{i}]", each, its) for i, (each, its) in enumerate(pairs))
    else:
        fits, wanted = isinstance(value, dict), "a table"
        if fits:
            parts = _parts(value, form, f"{place}." if place else "")
    if not fits:
        return f"{place or 'it'} is {quote(value, 40)}, not {wanted}"
    return next(filter(None, (fault(each, its, at) for at, each, its in parts)), "")


def _parts(table: dict[str, Any], form: Mapping[str, Form], place: str) -> Iterable[tuple[str, Any, Form]]:
    for key, each in form.items():
        name = key.removesuffix("?")
        for found in table if key == "*" else [name] if name in table or name == key else []:
            yield f"{place}{found}", table.get(found, _MISSING), each


def timeline_fault(timeline: Mapping[str, Any]) -> str:
    """Return the inconsistency in a timeline that has the form; an empty text if there is none."""
    lanes = set(timeline["lanes"])
    used = {"compute", *(span[0] for span in timeline["spans"])}
    if not used <= lanes:
        return f"timeline.lanes has no {', '.join(sorted(used - lanes))}"
    for tier, memory in timeline["memory"].items():
        if {len(values) for values in memory["bytes"].values()} - {len(memory["times"])}:
            return f"timeline.memory.{tier} has not as many bytes as times"
    return ""
