"""Where the program starts: an interrupt while it is still importing ends it without a traceback.

Importing this module takes over SIGINT, first thing: it is for the program alone, and `main` gives it back.
"""

from __future__ import annotations

import os
import signal


def _end(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)  # errors.INTERRUPTED, which may not be imported yet


_before = signal.getsignal(signal.SIGINT)
if _before is signal.default_int_handler:  # not where whoever started us wants it ignored
    signal.signal(signal.SIGINT, _end)


def main() -> None:
    """Run the program and leave with its exit code."""
    from zerocli.cli import main as cli

    signal.signal(signal.SIGINT, _before)
    cli.main()
