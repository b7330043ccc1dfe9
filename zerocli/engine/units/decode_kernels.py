"""Decoding of frozen parameters in one pass on a GPU; imported only if triton is installed.

Both kernels give the bits of `zerocli.engine.units.codecs`: one operation at a time in fp32, no fused multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from zerocli.layout.codecs import GRAIN, GRAIN_NBYTES, INT8_BLOCK, NF4_BLOCK, NF4_SCALES

_BLOCK, _WARPS = 4096, 8
"""Elements and warps per program; a grain is a whole number of blocks."""
_PER_GRAIN = tl.constexpr(GRAIN // _BLOCK)
_PACKED, _SCALES = tl.constexpr(GRAIN // 2), tl.constexpr(NF4_SCALES)
_NF4_BLOCK, _INT8_BLOCK, _GRAIN = tl.constexpr(NF4_BLOCK), tl.constexpr(INT8_BLOCK), tl.constexpr(GRAIN)


def decode(codec: str, encoded: torch.Tensor, out: torch.Tensor, table: torch.Tensor) -> None:
    """Write the values of encoded bytes to `out`; `table` has nf4's 16 values."""
    programs = out.numel() // _BLOCK
    # A fused multiply-add would round once where torch's two operations round twice.
    about = {"num_warps": _WARPS, "enable_fp_fusion": False}
    if codec == "nf4":
        _nf4[(programs,)](encoded, out, table, GRAIN_NBYTES[codec], _BLOCK // 2, **about)
    else:
        _int8[(programs,)](encoded, out, GRAIN_NBYTES[codec], _BLOCK, **about)


@triton.jit
def _nf4(encoded, out, table, nbytes: tl.constexpr, half: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    grain, part = program // _PER_GRAIN, program % _PER_GRAIN
    start = encoded + grain * nbytes
    place = part * half + tl.arange(0, half)
    codes = tl.load(start + place).to(tl.int32)
    numbers = (start + _PACKED + _SCALES).to(tl.pointer_type(tl.float32))
    mean, step = tl.load(numbers), tl.load(numbers + 1)
    rounded = tl.load(start + _PACKED + place // (_NF4_BLOCK // 2)).to(tl.int8, bitcast=True)
    scale = rounded.to(tl.float32) * step + mean
    first = tl.load(table + (codes >> 4)) * scale
    second = tl.load(table + (codes & 15)) * scale
    both = tl.interleave(first, second).to(out.dtype.element_ty)
    tl.store(out + program * (2 * half) + tl.arange(0, 2 * half), both)


@triton.jit
def _int8(encoded, out, nbytes: tl.constexpr, block: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    grain, part = program // _PER_GRAIN, program % _PER_GRAIN
    start = encoded + grain * nbytes
    place = part * block + tl.arange(0, block)
    codes = tl.load(start + place).to(tl.int8, bitcast=True)
    scale = tl.load((start + _GRAIN).to(tl.pointer_type(tl.float32)) + place // _INT8_BLOCK)
    tl.store(out + program * block + tl.arange(0, block), (codes.to(tl.float32) * scale).to(out.dtype.element_ty))
