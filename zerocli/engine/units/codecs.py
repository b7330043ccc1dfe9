"""Encode frozen parameters in 4 or 8 bits, and decode them; see `zerocli.layout.codecs` for the sizes.

nf4 is that of QLoRA: blocks of 64 elements, each element the nearest of 16 values times the block's largest absolute
value. The scales of 256 blocks are stored in 8 bits too, as differences from their mean. int8 has blocks of 256
elements, each a whole number from -127 to 127 times the block's scale. All arithmetic is in fp32, one operation at a
time, and rounded once to the parameters' dtype: a CPU and a GPU give the same bits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from zerocli.layout.codecs import (
    DECODED_AT_A_TIME,
    GRAIN,
    GRAIN_NBYTES,
    INT8_BLOCK,
    NF4_BLOCK,
    NF4_SCALES,
    encoded_at_a_time,
    encoded_nbytes,
    scratch_nbytes,
)

# Quantiles of a normal distribution, with an exact zero: the values of QLoRA (arXiv 2305.14314, appendix E).
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_PACKED = GRAIN // 2


def encode(codec: str, values: torch.Tensor) -> torch.Tensor:
    """Return values, a whole number of grains, as bytes."""
    made = torch.empty(encoded_nbytes(codec, values.numel()), dtype=torch.uint8, device=values.device)
    grains = made.view(-1, GRAIN_NBYTES[codec])
    at_a_time = encoded_at_a_time(values.device.type) // GRAIN
    for first in range(0, len(grains), at_a_time):
        part = values[first * GRAIN : (first + at_a_time) * GRAIN].float()
        (_encode_nf4 if codec == "nf4" else _encode_int8)(part, grains[first : first + at_a_time])
    return made


def decode(codec: str, encoded: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
    """Write the values of encoded bytes to `out`, rounded once to its dtype.

    `scratch` is of `scratch_nbytes`; a GPU needs it only where triton is missing.
    """
    if out.is_cuda and (kernels := _kernels()) is not None:
        kernels.decode(codec, encoded, out, _table(out.device))
        return
    grains = encoded.view(-1, GRAIN_NBYTES[codec])
    if scratch is None:
        nbytes = scratch_nbytes(codec, out.numel(), "cpu")
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=out.device)
    at_a_time = DECODED_AT_A_TIME // GRAIN
    for first in range(0, len(grains), at_a_time):
        part = out[first * GRAIN : (first + at_a_time) * GRAIN]
        (_decode_nf4 if codec == "nf4" else _decode_int8)(grains[first : first + at_a_time], part, scratch)


# -- nf4 -----------------------------------------------------------------------------------------------------------


def _encode_nf4(values: torch.Tensor, grains: torch.Tensor) -> None:
    blocks = values.view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    normal = blocks / torch.where(scales == 0, 1, scales)[:, None]
    codes = torch.bucketize(normal, _middles(values.device)).to(torch.uint8).view(len(grains), -1)
    grains[:, :_PACKED] = codes[:, 0::2] * 16 + codes[:, 1::2]
    scales = scales.view(-1, NF4_SCALES)
    mean = _mean(scales)
    step = (scales - mean).abs().amax(1, keepdim=True) / _largest(values.device)
    rounded = ((scales - mean) / torch.where(step == 0, 1, step)).round_().to(torch.int8)
    grains[:, _PACKED : _PACKED + NF4_SCALES] = rounded.view(torch.uint8)
    grains[:, _PACKED + NF4_SCALES :] = torch.cat([mean, step], 1).view(torch.uint8)


def _decode_nf4(grains: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    numel = out.numel()
    codes = scratch[: 2 * numel].view(torch.int32)
    codes.view(len(grains), -1).copy_(grains[:, :_PACKED])
    pairs = scratch[2 * numel : 6 * numel].view(torch.float32)
    torch.index_select(_pairs(out.device), 0, codes, out=pairs.view(-1, 2))
    torch.mul(pairs.view(-1, NF4_BLOCK), nf4_scales(grains).view(-1, 1), out=out.view(-1, NF4_BLOCK))


def _mean(scales: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row, added in an order that does not depend on the device."""
    total = scales
    while total.shape[1] > 1:
        first, second = total.chunk(2, 1)
        total = first + second
    return total / NF4_SCALES  # a power of two, so nothing is rounded


@functools.lru_cache
def _largest(device: torch.device) -> torch.Tensor:
    # Not a number: torch divides by a number on a GPU by multiplying with its reciprocal, which rounds twice.
    return torch.tensor(127.0, device=device)


def nf4_scales(grains: torch.Tensor) -> torch.Tensor:
    """Return the scales of the blocks of encoded grains, one row each."""
    rounded = grains[:, _PACKED : _PACKED + NF4_SCALES].view(torch.int8)
    mean, step = grains[:, _PACKED + NF4_SCALES :].view(torch.float32).split(1, 1)
    scales: torch.Tensor = (rounded.float() * step).add_(mean)
    return scales


@functools.cache
def _kernels() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("zerocli.engine.units.decode_kernels")


@functools.lru_cache
def _middles(device: torch.device) -> torch.Tensor:
    """Return where the nearest of the 16 values changes."""
    table = torch.tensor(NF4, dtype=torch.float64)
    return ((table[1:] + table[:-1]) / 2).to(device, torch.float32)


@functools.lru_cache
def _table(device: torch.device) -> torch.Tensor:
    return torch.tensor(NF4, dtype=torch.float32).to(device)


@functools.lru_cache
def _pairs(device: torch.device) -> torch.Tensor:
    """Return the two values that a byte stands for; the first is in its upper half."""
    table, both = _table(torch.device("cpu")), torch.arange(256)
    return torch.stack([table[both // 16], table[both % 16]], 1).to(device)


# -- int8 ----------------------------------------------------------------------------------------------------------


def _encode_int8(values: torch.Tensor, grains: torch.Tensor) -> None:
    blocks = values.view(-1, INT8_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _largest(values.device)
    rounded = (blocks / torch.where(scales == 0, 1, scales)).round_().to(torch.int8)
    grains[:, :GRAIN] = rounded.view(torch.uint8).view(len(grains), -1)
    grains[:, GRAIN:] = scales.view(len(grains), -1).view(torch.uint8)


def _decode_int8(grains: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor) -> None:
    scales = grains[:, GRAIN:].view(torch.float32).reshape(-1, 1)
    blocks = scratch[: 4 * out.numel()].view(torch.float32)
    blocks.view(len(grains), -1).copy_(grains[:, :GRAIN].view(torch.int8))
    torch.mul(blocks.view(-1, INT8_BLOCK), scales, out=out.view(-1, INT8_BLOCK))
