"""An HTML page of one or two profiles, in a single file that opens from disk on any machine.

Everything but the timeline of a step is plain HTML and SVG, and is read without scripts.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerocli.errors import FAILURE, UserError
from zerocli.profile import colours, sheets

TEMPLATE = Path(__file__).with_name("page.html")
TITLE, PAGE, COLOURS, DATA = "<!--TITLE-->", "<!--PAGE-->", "/*COLOURS*/null", "/*DATA*/null"
"""The places of the template that are filled in."""


def write(path: str, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Write the page of one or two profiles, each with its name."""
    try:
        Path(path).write_text(render(runs), encoding="utf-8")
    except OSError as error:
        hint = "zerocli profile RUN --html FILE, with a file that can be written"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint, exit_code=FAILURE) from error


def render(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    title = html.escape(" and ".join(name for name, _ in runs))
    parts = [f"<h1>{title}</h1>"]
    if len(runs) == 2:
        (first, one), (second, other) = runs
        parts.append(f"<h2>compared</h2>{sheets.compare(one, other, (first, second))}")
    body = "\n".join([*parts, *(text for i in range(len(runs)) for text in _run(runs, i))])
    shown = {"categories": colours.CATEGORIES, "phases": colours.PHASES, "lanes": colours.LANES, "other": colours.OTHER}
    kept = ("timeline", "capacity")  # what the script draws
    data = [{"name": name} | {key: document[key] for key in kept if key in document} for name, document in runs]
    # A user's name in the data must not close the script element.
    script = json.dumps(data).replace("<", "\\u003c")
    # In the template's order, each split off before it is filled: a name like a placeholder stays a name.
    made, rest = [], TEMPLATE.read_text(encoding="utf-8")
    for place, text in {
        TITLE: f"{title} · zerocli profile",
        PAGE: body,
        DATA: script,
        COLOURS: json.dumps(shown),
    }.items():
        before, _, rest = rest.partition(place)
        made += [before, text]
    return "".join([*made, rest])


def _run(runs: Sequence[tuple[str, Mapping[str, Any]]], index: int) -> Iterator[str]:
    """Yield the sections of one run."""
    name, run = runs[index]
    if len(runs) > 1:
        yield f'<h1 class="next">{html.escape(name)}</h1>'
    yield sheets.about(run)
    if run.get("finding"):
        yield f'<p class="finding">{html.escape(run["finding"])}</p>'
    yield f"<h2>seconds</h2>{sheets.seconds(run)}"
    yield _timeline(run, index)
    yield f"<h2>memory</h2>{sheets.memory(run)}"
    yield f"<h2>ranks</h2>{sheets.ranks(run)}"
    yield f"<h2>units</h2>{sheets.units(run)}"
    yield from (f'<p class="soft">note: {html.escape(note)}</p>' for note in run["notes"])


def _timeline(run: Mapping[str, Any], index: int) -> str:
    if "timeline" not in run:
        return '<p class="soft">this run recorded no timeline: zerocli profile CONFIG records one</p>'
    step, followed = run["timeline"]["step"], run["timeline"].get("memory_step")
    more = f", with the device's memory as followed in step {followed}" if followed and followed != step else ""
    needs = '<noscript><p class="soft">the timeline is drawn by a script, and scripts are off</p></noscript>'
    return f'<h2>step {step}, rank 0{more}</h2><div id="timeline-{index}">{needs}</div>'
