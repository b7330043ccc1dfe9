"""A timeline as a trace file that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerocli.errors import FAILURE, UserError

VIEWERS = "open it at ui.perfetto.dev, or in chrome://tracing"


def write(path: str, document: Mapping[str, Any]) -> None:
    """Write the document's timeline; UserError if it has none, or the file cannot be written."""
    if "timeline" not in document:
        raise UserError(
            "this run recorded no timeline: train keeps none", hint="zerocli profile CONFIG --trace-file ..."
        )
    try:
        Path(path).write_text(json.dumps({"traceEvents": list(events(document["timeline"], document["config"]))}))
    except OSError as error:
        hint = "zerocli profile RUN --trace-file FILE, with a file that can be written"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint, exit_code=FAILURE) from error


def events(timeline: Mapping[str, Any], name: str = "zerocli") -> Iterator[dict[str, Any]]:
    """Yield the trace's events: one or more threads per lane, one counter per tier; times in microseconds, in order.

    Viewers treat overlapping events on one thread as nested calls, and drop those that are not nested. So where
    transfers of a lane overlap, the later one goes to the lane's next thread. Pid 0 is the idle process, so numbers
    start at 1.
    """
    spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
    spans += [("compute", f"{phase} {unit}".strip(), begin, end, {}) for phase, unit, begin, end in timeline["compute"]]
    spans += [(lane, what or lane, begin, end, {"bytes": n}) for lane, what, begin, end, n, *_ in timeline["spans"]]
    rows: dict[str, list[float]] = {lane: [] for lane in timeline["lanes"]}
    placed = []
    for lane, what, begin, end, about in sorted(spans, key=lambda span: span[2]):
        row = next((row for row, free in enumerate(rows[lane]) if free <= begin), len(rows[lane]))
        rows[lane][row : row + 1] = [end]
        placed.append((lane, row, what, begin, end, about))
    threads = {key: at for at, key in enumerate(((lane, row) for lane in rows for row in range(len(rows[lane]))), 1)}
    yield _about("process_name", 0, f"{name}: step {timeline['step']}, rank 0")
    for (lane, row), thread in threads.items():
        yield _about("thread_name", thread, f"{lane} ({row + 1})" if row else lane)
        yield _about("thread_sort_index", thread, thread)
    for lane, row, what, begin, end, about in placed:
        times = {"ts": begin * 1e6, "dur": max(0.0, end - begin) * 1e6}
        yield {"ph": "X", "name": what, "cat": lane, "pid": 1, "tid": threads[lane, row], "args": about} | times
    for tier, memory in timeline["memory"].items():
        for i, at in enumerate(memory["times"]):
            held = {category: values[i] for category, values in memory["bytes"].items()}
            yield {"ph": "C", "name": tier, "pid": 1, "ts": at * 1e6, "args": held}


def _about(what: str, thread: int, value: Any) -> dict[str, Any]:
    key = "sort_index" if what == "thread_sort_index" else "name"
    return {"ph": "M", "name": what, "pid": 1, "tid": thread, "args": {key: value}}
