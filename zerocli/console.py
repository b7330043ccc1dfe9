"""What reaches the terminal: text without control characters, on standard streams that are open. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zerocli.errors import DOES_NOT_FIT, UserError

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but newline and tab, what changes the direction of text, and halves of characters."""


def printable(text: str) -> str:
    """Return the text with what a terminal would obey instead of showing it (escapes, bidi marks) spelled out."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


_BARS: list[Any] = []
"""Progress bars that are on the terminal now."""
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


def say(text: str) -> None:
    """Print a message for people to stderr, above a progress bar; nobody listening, or no room, fails no run."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
        if _BARS:
            _BARS[-1].write(printable(text), file=sys.stderr)
        else:
            print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def bar(**settings: Any) -> Iterator[Any]:
    """Show a progress bar on the terminal, and what is said meanwhile above it."""
    from tqdm import tqdm

    with tqdm(file=sys.stderr, dynamic_ncols=True, **settings) as made:
        _BARS.append(made)
        try:
            yield made
        finally:
            _BARS.remove(made)


@contextlib.contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show how much of `total` is done: a bar on a terminal, a line now and then elsewhere; yield what counts more."""
    if sys.stderr.isatty():
        with bar(total=total, unit=unit, unit_scale=unit == "B", desc=what) as made:
            yield lambda done: made.update(done)
        return
    done, said = 0, time.monotonic()

    def move(more: int) -> None:
        nonlocal done, said
        done += more
        if time.monotonic() - said >= LINE_SECONDS:
            said = time.monotonic()
            say(f"{what}: {min(100, 100 * done // max(1, total))} %")

    yield move


def show(text: str) -> None:
    """Print what was asked for to stdout; whoever has read enough of it (`| head`) fails no run."""
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        silence_stdout()


def show_json(document: Any, indent: int | None = None) -> None:
    """Print a document to stdout as JSON, in which NaN and infinities, which JSON does not have, are null."""
    text = json.dumps(_without_nan(document), indent=indent, allow_nan=False)
    show(text)


@contextlib.contextmanager
def show_if_unfit(as_json: bool, document: Mapping[str, Any]) -> Iterator[None]:
    """Print the document, with the reason, if what is done within raises an error with exit code 3."""
    try:
        yield
    except UserError as error:
        if as_json and error.exit_code == DOES_NOT_FIT:
            show_json({**document, "fits": False, "reason": str(error)})
        raise


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def colours() -> bool:
    """Return whether stdout is a terminal that is to be coloured: NO_COLOR and TERM=dumb say no."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def silence_stdout() -> None:
    """Send what is still to be printed to the null device: nobody reads it, and Python would fail at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)


def drop_unwritten() -> None:
    """Silence stdout if what it still holds cannot be written, as on a full disk."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        silence_stdout()


def open_standard_streams() -> None:
    """Open the null device in place of each standard stream that is closed.

    Otherwise the next file that is opened would get its number, and be written what was meant for the terminal.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if fd == 0 else os.O_WRONLY)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def quoted(path: str | os.PathLike[str]) -> str:
    """Return a path as a shell takes it, for a command to paste."""
    return shlex.quote(os.fspath(path))
