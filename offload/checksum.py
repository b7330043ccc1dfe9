"""Checksums of memory on the device it lies on, cheap enough to take of every transfer.

Bytes are read as 64-bit words and laid out in rows of `COLUMNS`. Each column is added up, each of the sums multiplied
by an odd number of its own, and the products added; all modulo 2^64. It costs one pass at the speed of memory, as a
plain sum does, and no host synchronisation. Where triton is, a GPU takes all of a transfer's in one launch.

What it finds: every change within one word, so every single flipped bit (an odd factor has an inverse modulo 2^64),
and with a chance of about 1 - 2^-64 other bytes altogether, such as those of an earlier step or of another piece. The
number of columns is prime, so that a page or a sector that lies where another should is found as well. What it does not
find: words that change places within one column, and changes that somebody has made on purpose; it is no signature.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Sequence
from types import ModuleType

import torch

from tiers.base import round_up

COLUMNS = 509
_WORD = 8


@functools.cache
def kernels() -> ModuleType | None:
    """Return `offload.checksum_kernels`, None where triton is not installed."""
    return importlib.import_module("offload.checksum_kernels") if importlib.util.find_spec("triton") else None


def checksums(data: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """Return a checksum for each of the parts that `cuts` (ascending, from 0 to the end) divide flat uint8 memory into.

    The result is on the memory's device, in the order of its current stream. Parts of equal length that lie side by
    side are taken in one go.
    """
    lengths = [stop - start for start, stop in itertools.pairwise(cuts)]
    if data.is_cuda and (triton := kernels()) is not None and not any(at % _WORD for at in (data.data_ptr(), *cuts)):
        return _by_kernel(triton, data.view(torch.int64), [length // _WORD for length in lengths])
    found, at = [], 0
    for length, equal in itertools.groupby(lengths):
        count = len(list(equal))
        found.append(_of_rows(data[at : at + count * length].view(count, length)))
        at += count * length
    return found[0] if len(found) == 1 else torch.cat(found)


def _by_kernel(triton: ModuleType, words: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """Return the checksums of cells of so many words; a launch takes a cell, equal ones after it, and a smaller one."""
    found = torch.zeros(len(widths), dtype=torch.int64, device=words.device)
    done, at = 0, 0
    while done < len(widths):
        last = done + 1
        each = widths[last] if last < len(widths) else widths[done]
        while last < len(widths) and widths[last] == each:
            last += 1
        if last < len(widths) and widths[last] < each:
            last += 1
        stop = at + sum(widths[done:last])
        triton.add_up(words[at:stop], _factors(words.device), widths[done], each, last - done, found[done:last])
        done, at = last, stop
    return found


def _of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each row of a contiguous matrix of bytes."""
    count, length = rows.shape
    if length % _WORD or rows.data_ptr() % _WORD or rows.storage_offset() % _WORD:
        padded = rows.new_zeros(count, round_up(length, _WORD))
        padded[:, :length] = rows
        rows = padded
    words = rows.view(torch.int64)
    width = words.shape[1]
    full = width // COLUMNS
    factors = _factors(rows.device)
    sums = (words[:, full * COLUMNS :] * factors[: width - full * COLUMNS]).sum(1)
    if full:
        table = words.as_strided((count, full, COLUMNS), (width, COLUMNS, 1))
        sums = sums + (table.sum(1) * factors).sum(1)
    return sums


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    return (torch.randint(-(2**62), 2**62, (COLUMNS,), generator=generator, device="cpu") * 2 + 1).to(device)
