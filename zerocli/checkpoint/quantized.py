"""Decode the weights of quantized folders: the tensors of the model, in terms of those that the files hold.

A function per method finds the model's tensors among the stored ones and checks that sizes and types agree, before
anything is read. Each tensor is decoded by itself, some whole grains at a time, to the values that the method's own
library computes with: in fp32 where that rounds only to the parameter's dtype, else in the library's dtype.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zerocli.checkpoint.manifest import name_of
from zerocli.engine.units.codecs import NF4

if TYPE_CHECKING:
    from zerocli.checkpoint.safetensors import Entry

Read = Callable[[str, int, int], torch.Tensor]
"""Return elements [start, stop) of a stored tensor in its own dtype."""
Decode = Callable[[Read, int, int], torch.Tensor]
"""Return elements [start, stop) of a decoded tensor; both are multiples of its grain, or its end."""


@dataclass(frozen=True)
class Decoded:
    """A tensor of the model, and how it is decoded from what the files hold of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    """Names of the stored tensors that it is made of."""
    grain: int
    """Elements that are decoded together."""
    decode: Decode


Tensors = Mapping[str, "Entry"]
Method = Callable[[Tensors, Read, str], Decoded | None]
"""Return the tensor of the model whose codes or scales the named stored tensor is; None if it is neither."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
"""bitsandbytes' values of the upper eight codes are these with a minus sign; all are divided by 12."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of a float of 4 bits; of the upper eight codes with a minus sign."""
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_STATE_NBYTES = 64 << 10
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of eight codes those of eight consecutive columns are."""
PACKED_AT_A_TIME = 1 << 24
"""Elements of a packed integer matrix that are unpacked together."""


class Unfit(Exception):
    """Stored tensors do not belong together."""


def _expect(tensors: Tensors, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    """Raise Unfit unless a tensor is stored in one of these dtypes and, flattened, in as many elements."""
    if name not in tensors:
        raise Unfit(f"has no tensor {name}")
    entry = tensors[name]
    if entry.dtype not in dtypes or entry.numel != math.prod(shape):
        words = " or ".join(map(name_of, dtypes))
        raise Unfit(f"{name} is {name_of(entry.dtype)} {list(entry.shape)}, not {words} {list(shape)}")


def _nibbles(codes: torch.Tensor, table: tuple[float, ...], high_first: bool) -> torch.Tensor:
    """Return the values of bytes of two codes each, flattened."""
    values, both = torch.tensor(table), torch.arange(256)
    halves = (values[both >> 4], values[both & 15])
    return torch.stack(halves if high_first else halves[::-1], 1)[codes.view(-1).int()].view(-1)


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


def _bitsandbytes(tensors: Tensors, read: Read, name: str) -> Decoded | None:
    weight, _, kind = name.partition(".quant_state.bitsandbytes__")
    if kind:
        return _four_bits(tensors, read, weight, name, kind)
    return _int8(tensors, name.removesuffix("SCB") + "weight", name) if name.endswith(".SCB") else None


def _four_bits(tensors: Tensors, read: Read, weight: str, state: str, kind: str) -> Decoded:
    tables = {"nf4": NF4, "fp4": tuple(sign * each / 12 for sign in (1, -1) for each in FP4)}
    if kind not in tables or not 2 <= tensors[state].nbytes <= MAX_STATE_NBYTES:
        raise Unfit(f"{state[:200]} does not describe nf4 or fp4")
    try:
        about = json.loads(bytes(read(state, 0, tensors[state].numel).view(torch.uint8).tolist()))
        shape, block, dtype = tuple(about["shape"]), about["blocksize"], getattr(torch, str(about["dtype"]), None)
        offset, group = float(about.get("nested_offset") or 0), about.get("nested_blocksize") or 256
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unfit(f"{state} cannot be read") from None
    sizes = all(type(each) is int and 0 < each < 1 << 40 for each in (*shape, group))
    if not sizes or not shape or block not in BLOCKSIZES or dtype not in FLOATS or not math.isfinite(offset):
        raise Unfit(f"{state} has shape {shape}, blocksize {block} and dtype {dtype}"[:300])
    numel = math.prod(shape)
    if weight not in tensors or tensors[weight].nbytes != (numel + 1) // 2:
        stored = f"{tensors[weight].nbytes} bytes" if weight in tensors else "nothing"
        raise Unfit(f"{weight} of shape {list(shape)} is stored in {stored}, not in {(numel + 1) // 2} bytes")
    blocks = -(-numel // block)
    absmax, nested, levels = (f"{weight}.{each}" for each in ("absmax", "nested_absmax", "nested_quant_map"))
    twice = nested in tensors
    _expect(tensors, absmax, (torch.uint8,) if twice else FLOATS, (blocks,))
    if twice:
        _expect(tensors, nested, FLOATS, (-(-blocks // group),))
        _expect(tensors, levels, FLOATS, (256,))
    width = tensors[weight].dtype.itemsize

    def decode(read: Read, start: int, stop: int) -> torch.Tensor:
        first, last = start // block, -(-stop // block)
        scales = read(absmax, first, last)
        if twice:
            kept = slice(first // group, (last - 1) // group + 1)
            of_group = read(nested, kept.start, kept.stop).float()[torch.arange(first, last) // group - kept.start]
            scales = read(levels, 0, 256).float()[scales.int()] * of_group + torch.tensor(offset)
        packed = read(weight, start // 2 // width, -(-((stop + 1) // 2) // width))
        values = _nibbles(packed.contiguous().view(torch.uint8), tables[kind], True)[: stop - start]
        return (values * scales.float().repeat_interleave(block)[: len(values)]).to(dtype)

    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    parts = (weight, state, *(f"{weight}.{end}" for end in ends if f"{weight}.{end}" in tensors))
    return Decoded(weight, dtype, shape, parts, block, decode)


def _int8(tensors: Tensors, weight: str, scales: str) -> Decoded:
    rows, columns = _matrix(tensors, weight)
    _expect(tensors, weight, (torch.int8,), (rows, columns))
    _expect(tensors, scales, FLOATS, (rows,))

    def decode(read: Read, start: int, stop: int) -> torch.Tensor:
        codes = read(weight, start, stop).view(-1, columns)
        made = codes * read(scales, start // columns, stop // columns).float()[:, None] * 7.874015718698502e-3
        return made.view(-1)

    other = weight.removesuffix("weight") + "weight_format"
    parts = (weight, scales, *((other,) if other in tensors else ()))
    return Decoded(weight, torch.float32, (rows, columns), parts, columns, decode)


def _matrix(tensors: Tensors, name: str) -> tuple[int, int]:
    """Return the shape of a stored matrix."""
    if name not in tensors:
        raise Unfit(f"has no tensor {name}")
    shape = tensors[name].shape
    if len(shape) != 2 or 0 in shape:
        raise Unfit(f"{name} of shape {list(shape)} is not a matrix")
    return shape[0], shape[1]


# -- a scale per block, row or tensor ----------------------------------------------------------------------------------


def _scaled(end: str, block: tuple[int, int], tensors: Tensors, read: Read, scales: str) -> Decoded | None:
    """Return the matrix (or several in one tensor) that has scales of a name that ends so."""
    weight = scales.removesuffix(end)
    if not scales.endswith(end) or weight not in tensors:
        return None
    shape, grid = tensors[weight].shape, tensors[scales].shape
    _expect(tensors, weight, (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8), shape)
    _expect(tensors, scales, FLOATS, grid)
    if f"{weight}_zero_point" in tensors:
        raise Unfit(f"{weight} has zero points, which are not read")
    if len(shape) < 2 or 0 in shape:
        raise Unfit(f"{weight} of shape {list(shape)} is not a matrix")
    columns, each, rows = shape[-1], shape[-2], math.prod(shape[:-1])
    if math.prod(grid) == 1:
        grid, each, tall, wide = (1, 1), rows, rows, columns
    else:
        grid, (tall, wide) = (math.prod(grid[:-1]), grid[-1] if len(grid) > 1 else 0), block
        # The last block of a matrix may be cut; blocks of another size divide the matrix.
        if grid != (rows // each * -(-each // tall), -(-columns // wide)):
            if 0 in grid or rows % grid[0] or each % (rows // grid[0]) or columns % grid[1]:
                raise Unfit(f"{scales} of shape {list(tensors[scales].shape)} does not divide {weight} {list(shape)}")
            tall, wide = rows // grid[0], columns // grid[1]
    of_matrix = -(-each // tall)
    across = torch.arange(columns) // wide

    def decode(read: Read, start: int, stop: int) -> torch.Tensor:
        rows = torch.arange(start // columns, stop // columns)
        down = rows // each * of_matrix + rows % each // tall
        values = read(weight, start, stop).float().view(-1, columns)
        factors = read(scales, 0, grid[0] * grid[1]).float().view(grid)[down]
        return (values * factors[:, across]).view(-1)

    others = (weight.removesuffix("weight") + end for end in ("input_scale", "activation_scale"))
    parts = (weight, scales, *(other for other in others if other in tensors))
    return Decoded(weight, torch.float32, shape, parts, columns, decode)


# -- mxfp4 -------------------------------------------------------------------------------------------------------------


def _mxfp4(tensors: Tensors, read: Read, blocks: str) -> Decoded | None:
    """Return matrices of experts in groups of 32 values; the model has them transposed."""
    if not blocks.endswith("_blocks"):
        return None
    name, shape = blocks.removesuffix("_blocks"), tensors[blocks].shape
    if len(shape) != 4 or 0 in shape:
        raise Unfit(f"{blocks} has shape {list(shape)}, and experts, rows, groups and bytes are expected")
    experts, rows, groups, width = shape
    _expect(tensors, blocks, (torch.uint8,), shape)
    _expect(tensors, f"{name}_scales", (torch.uint8,), shape[:3])
    each, table = rows * groups * width, (*E2M1, *(-value for value in E2M1))

    def decode(read: Read, start: int, stop: int) -> torch.Tensor:
        first, last = start // (2 * each), stop // (2 * each)
        values = _nibbles(read(blocks, first * each, last * each), table, False)
        exponents = read(f"{name}_scales", first * each // width, last * each // width).int() - 127
        made = torch.ldexp(values.view(-1, 2 * width), exponents[:, None])
        return made.view(last - first, rows, -1).transpose(1, 2).reshape(-1)

    shape = (experts, groups * width * 2, rows)
    return Decoded(name, torch.float32, shape, (blocks, f"{name}_scales"), 2 * each, decode)


# -- GPTQ and AWQ ------------------------------------------------------------------------------------------------------


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in words of 32 bits, lowest first, along a new last dimension."""
    return (words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32)) & (1 << bits) - 1


def _expect_words(tensors: Tensors, name: str, shape: tuple[int, int], zeros: tuple[int, int], rows: int) -> None:
    """Raise Unfit unless a matrix of words, its zeros and the scales of its rows have these shapes."""
    _expect(tensors, f"{name}qweight", (torch.int32,), shape)
    _expect(tensors, f"{name}qzeros", (torch.int32,), zeros)
    _expect(tensors, f"{name}scales", FLOATS, (zeros[0], rows))


def _gptq(earlier: bool, tensors: Tensors, read: Read, packed: str) -> Decoded | None:
    """Return a matrix whose columns are packed in words; `earlier`: zeros are stored less one, word by word."""
    if not packed.endswith(".qweight"):
        return None
    name, (high, rows) = packed.removesuffix("qweight"), _matrix(tensors, packed)
    groups = _matrix(tensors, f"{name}scales")[0]
    columns = tensors[f"{name}g_idx"].numel if f"{name}g_idx" in tensors else 0
    bits = next((bits for bits in (2, 4, 8) if high * 32 == columns * bits), 0)
    if not bits or rows * bits % 32:
        raise Unfit(f"{packed} of shape {[high, rows]} is not of {columns} columns, of which {name}g_idx says")
    _expect(tensors, f"{name}g_idx", (torch.int32, torch.int64), (columns,))
    _expect_words(tensors, name, (high, rows), (groups, rows * bits // 32), rows)
    one = sum(1 << at for at in range(0, 32, bits)) if earlier else 0

    def decode(read: Read, start: int, stop: int) -> torch.Tensor:
        words = read(packed, 0, columns * bits // 32 * rows).view(-1, rows)
        zeros = _unpack(read(f"{name}qzeros", 0, groups * rows * bits // 32) + one, bits).view(groups, rows)
        scales = read(f"{name}scales", 0, groups * rows).view(groups, rows)
        group = read(f"{name}g_idx", 0, columns).long()
        if int(group.min()) < 0 or int(group.max()) >= groups:
            raise Unfit(f"{name}g_idx names a group beyond its {groups}")
        made = torch.empty(rows, columns, dtype=scales.dtype)
        for part in _parts(rows, columns):
            codes = _unpack(words[:, part].t(), bits).reshape(-1, columns)
            made[part] = (codes - zeros[:, part].t()[:, group]).float() * scales[:, part].t()[:, group].float()
        return made.view(-1)

    return _whole(tensors, name, (rows, columns), ("qweight", "qzeros", "scales", "g_idx"), decode)


def _awq(tensors: Tensors, read: Read, packed: str) -> Decoded | None:
    """Return a matrix whose rows are packed in words of eight, out of order."""
    if not packed.endswith(".qweight"):
        return None
    name, (columns, wide) = packed.removesuffix("qweight"), _matrix(tensors, packed)
    groups = _matrix(tensors, f"{name}scales")[0]
    if columns % groups:
        raise Unfit(f"{name}scales of {groups} groups do not divide {columns} columns")
    rows = 8 * wide
    _expect_words(tensors, name, (columns, wide), (groups, wide), rows)

    def decode(read: Read, start: int, stop: int) -> torch.Tensor:
        order, size = list(AWQ_ORDER), columns // groups
        words = read(packed, 0, columns * rows // 8).view(columns, -1)
        zeros = _unpack(read(f"{name}qzeros", 0, groups * rows // 8), 4).view(groups, -1, 8)[..., order]
        scales = read(f"{name}scales", 0, groups * rows).view(groups, rows)
        zeros = zeros.reshape(groups, rows)
        made = torch.empty(rows, columns, dtype=scales.dtype)
        for part in _parts(rows, columns):
            some = slice(part.start // 8, part.stop // 8)
            codes = _unpack(words[:, some], 4)[..., order].reshape(groups, size, -1)
            values = (codes - zeros[:, None, part]).float() * scales[:, None, part].float()
            made[part] = values.view(columns, -1).t()
        return made.view(-1)

    return _whole(tensors, name, (rows, columns), ("qweight", "qzeros", "scales"), decode)


def _parts(rows: int, columns: int) -> Iterator[slice]:
    """Yield slices of rows, multiples of eight, that are unpacked together."""
    each = max(8, PACKED_AT_A_TIME // columns // 8 * 8)
    for first in range(0, rows, each):
        yield slice(first, min(rows, first + each))


def _whole(tensors: Tensors, name: str, shape: tuple[int, int], ends: tuple[str, ...], decode: Decode) -> Decoded:
    """Return a matrix that is decoded as one: its columns are packed across rows."""
    dtype = tensors[f"{name}scales"].dtype
    return Decoded(f"{name}weight", dtype, shape, tuple(name + end for end in ends), math.prod(shape), decode)


# -- the methods -------------------------------------------------------------------------------------------------------


def _fp8(about: Mapping[str, Any]) -> Method:
    block = about.get("weight_block_size")
    known = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
    return functools.partial(_scaled, "_scale_inv", tuple(block) if known else (128, 128))  # type: ignore[arg-type]


METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "bitsandbytes": lambda about: _bitsandbytes,
    "mxfp4": lambda about: _mxfp4,
    "fp8": _fp8,
    "compressed-tensors": lambda about: functools.partial(_scaled, "_scale", (128, 128)),
    "gptq": lambda about: functools.partial(
        _gptq, "gptq_v2" not in (about.get("checkpoint_format"), about.get("format"))
    ),
    "awq": lambda about: _awq,
}
"""What reads a method's folders, by the name in `quantization_config`, given that table."""


def decoded(method: str, about: Mapping[str, Any], tensors: Tensors, read: Read) -> dict[str, Decoded]:
    """Return the tensors that a folder stores quantized, by their names in the model; raise Unfit if sizes disagree."""
    found: dict[str, Decoded] = {}
    matrix_of = METHODS[method](about)
    for each in filter(None, (matrix_of(tensors, read, name) for name in tensors)):
        if each.name in found or (each.name in tensors and each.name not in each.parts):
            raise Unfit(f"{each.name} is stored twice")
        found[each.name] = each
    return found
