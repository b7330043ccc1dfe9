"""What torch's GPU kernel allocates to sum a matrix over its rows, as it does for the gradient of a bias.

Threads sum a few columns each, over a part of the rows. Where each would still have many rows, blocks of threads share
a column, and their sums lie in memory until the last block adds them. torch takes more for these than they need: an
element per column for each thread of a block's width, and for each column that a thread has.
"""

from __future__ import annotations

import math

THREADS, WARP = 512, 32
"""Threads of a block if each has one column, and those that are side by side in a row."""
MIN_ROWS, MAX_ROWS = 16, 256
"""Rows that a thread should have at least, and at most."""
PROCESSORS, RESIDENT = 132, 2048
"""Multiprocessors of an H100 or H200, and threads that each of them holds."""
SUM_NBYTES = 4


def column_sums_nbytes(rows: int, columns: int) -> int:
    """Return the bytes; 0 where no blocks share a column."""
    vector = math.gcd(columns, 4)
    threads = THREADS // vector
    side = min(threads, _power_below(columns // vector))
    height = min(_power_below(rows), threads // min(side, WARP))
    side = min(side, threads // height)
    if rows < min(height * MIN_ROWS, MAX_ROWS):  # a thread sums all rows of its columns
        return 0
    each, blocks = -(-rows // height), -(-columns // vector // side)
    wanted = PROCESSORS * (RESIDENT // (side * height))
    if each < MAX_ROWS or blocks > wanted:
        return 0
    shared = max(min(-(-wanted // blocks), -(-each // MIN_ROWS)), -(-each // MAX_ROWS))
    return SUM_NBYTES * columns * shared * side * vector if shared > 1 else 0


def _power_below(number: int) -> int:
    """Return the largest power of two that is not above the number."""
    return 1 << (number.bit_length() - 1)
