"""Where the program starts: an interrupt while it is still importing ends it without a traceback."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> NoReturn:
    """Run the program and leave with its exit code."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where whoever started us wants it ignored
        signal.signal(signal.SIGINT, _end)
    from zerocli import cli

    signal.signal(signal.SIGINT, before)
    cli.main()
