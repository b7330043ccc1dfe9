"""Reporting: rank 0 writes a finished profile to the terminal, an HTML page and a trace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from zerocli.config import Config
from zerocli.config.options import RunOptions
from zerocli.console import quoted, say, show, show_json
from zerocli.profile import page, table, trace


class Reporter:
    """Reports a profile in the requested forms."""

    def __init__(self, html: str, trace_file: str, other: tuple[str, dict[str, Any]] | None = None) -> None:
        self._html, self._trace_file, self._other = html, trace_file, other

    def __call__(self, config: Config, options: RunOptions, document: dict[str, Any]) -> None:
        if options.json:
            show_json({key: value for key, value in document.items() if key != "timeline"})
        else:
            show(table.render(document))
            if self._other is not None:
                name, other = self._other
                show("\n" + table.compare(other, document, (name, config.name)))
        if self._html:  # after the report, as the disk may be full
            before = [self._other] if self._other is not None else []
            page.write(self._html, [*before, (config.name, document)])
            say(f"page: {self._html}")
        if self._trace_file:
            trace.write(self._trace_file, document)
            say(f"trace: {self._trace_file} ({trace.VIEWERS})")
        if not self._html:
            say(f"try: zerocli profile {quoted(options.run_dir)} --html profile.html")


@contextlib.contextmanager
def recording(path: str) -> Iterator[None]:
    """Record CUDA allocations while the body runs and write a snapshot, one file per rank; nothing without a path."""
    if not path or not torch.cuda.is_available():
        if path:
            say("--snapshot: there is no GPU, so no snapshot is written")
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
    finally:
        rank = os.environ.get("RANK", "0")
        torch.cuda.memory._dump_snapshot(path if rank == "0" else f"{path}.rank{rank}")
        torch.cuda.memory._record_memory_history(enabled=None)
