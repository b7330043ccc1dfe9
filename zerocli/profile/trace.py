"""A timeline as a trace file that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerocli.errors import UserError

VIEWERS = "open it at ui.perfetto.dev, or in chrome://tracing"


def write(path: str, document: Mapping[str, Any]) -> None:
    """Write the document's timeline; UserError if it has none, or the file cannot be written."""
    if "timeline" not in document:
        raise UserError(
            "this run recorded no timeline: train keeps none", hint="zerocli profile CONFIG --trace-file ..."
        )
    try:
        Path(path).write_text(json.dumps({"traceEvents": list(events(document["timeline"]))}))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", exit_code=1) from error


def events(timeline: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the trace's events: a thread a lane, a counter a tier; times in microseconds."""
    number = {lane: at for at, lane in enumerate(timeline["lanes"])}
    for lane, at in number.items():
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": at, "args": {"name": lane}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": at, "args": {"sort_index": at}}
    for phase, unit, begin, end in timeline["compute"]:
        yield _span(f"{phase} {unit}".strip(), number["compute"], begin, end, {})
    for lane, name, begin, end, nbytes in timeline["spans"]:
        yield _span(name or lane, number[lane], begin, end, {"bytes": nbytes})
    for tier, memory in timeline["memory"].items():
        for i, at in enumerate(memory["times"]):
            held = {name: values[i] for name, values in memory["bytes"].items()}
            yield {"ph": "C", "name": tier, "pid": 0, "ts": at * 1e6, "args": held}


def _span(name: str, thread: int, begin: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": thread, "ts": begin * 1e6, "dur": (end - begin) * 1e6} | {
        "args": about
    }
