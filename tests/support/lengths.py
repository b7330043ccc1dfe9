"""How much a test does: a part in the suite, all of it in the long set, of which a run may take one third."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import TypeVar

LONG = "ZEROCLI_TEST_LONG" in os.environ
ALL = os.environ.get("ZEROCLI_TEST_LONG") == "all"
THIRD = None if ALL or "ZEROCLI_TEST_THIRD" not in os.environ else int(os.environ["ZEROCLI_TEST_THIRD"]) % 3
"""Which third of the long set is run; None: all of it."""

Column = TypeVar("Column")


def spread(row: int, columns: Sequence[Column]) -> list[Column]:
    """Return the columns that a row of a table of cases meets: all in the long set, else the first and one in turn."""
    return list(columns) if LONG else [columns[0], columns[1 + row % (len(columns) - 1)]]


def in_third(name: str) -> bool:
    """Whether a test of this name belongs to the third that is run."""
    return THIRD is None or zlib.crc32(name.encode()) % 3 == THIRD
