"""An HTML page of one or two profiles, in a single file that opens from disk on any machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zerocli.errors import FAILURE, UserError

TEMPLATE = Path(__file__).with_name("page.html")
HOLE = "/*DATA*/null"


def write(path: str, runs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Write the page of one or two profiles, each with its name."""
    try:
        Path(path).write_text(render(runs), encoding="utf-8")
    except OSError as error:
        hint = "zerocli profile RUN --html FILE, with a file that can be written"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint, exit_code=FAILURE) from error


def render(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the page's text."""
    data = json.dumps([{"name": name, **document} for name, document in runs])
    # A user's name in the data must not close the script element.
    return TEMPLATE.read_text(encoding="utf-8").replace(HOLE, data.replace("<", "\\u003c"))
