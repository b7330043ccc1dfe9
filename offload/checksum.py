"""Checksums of memory, computed on its own device and cheap enough for every transfer.

Bytes are read as 64-bit words and laid out in rows of `COLUMNS`. Each column is summed, each sum is multiplied by its
own odd factor, and the products are added; all modulo 2^64. Like a plain sum this costs one pass at memory speed, and
no host synchronisation. With triton, a GPU computes all checksums of a transfer in one launch.

What it detects: every change within one word, so every single flipped bit (an odd factor has an inverse modulo 2^64),
and with probability about 1 - 2^-64 entirely different bytes, such as those of an earlier step or of another piece. The
number of columns is prime, so swapped pages or sectors are detected too. What it does not detect: words swapped within
one column, and deliberate changes; it is not a signature.
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
    """Return `offload.checksum_kernels`, None if triton is not installed."""
    return importlib.import_module("offload.checksum_kernels") if importlib.util.find_spec("triton") else None


def checksums(data: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """Return a checksum for each of the parts that `cuts` (ascending, from 0 to the end) divide flat uint8 memory into.

    The result is on the memory's device, in the order of its current stream. Adjacent parts of equal length are
    computed together.
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
    """Return the checksums of cells of `widths` words; each launch covers a run of nearly equal cells."""
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
