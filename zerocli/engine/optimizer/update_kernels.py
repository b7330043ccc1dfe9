"""Adam and AdamW in one pass over all that a parameter has; imported only if triton is installed.

That is 26 bytes per bf16 parameter with a split master: gradient, parameter, remainder and two moments are read (14
bytes), and all but the gradient are written (12). The arithmetic is in fp32, as in torch's fused kernel. All rounding
is written out, and is that of adam.c: a CPU that updates a part of the parameters must give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from zerocli.engine.optimizer.compiled_update import VALUES, table_of
from zerocli.engine.optimizer.optim import StepValues
from zerocli.layout.shards import Span

_BLOCK, _WARPS = 1024, 4
"""Elements and warps per program."""
_VECTOR = 16
"""Only if parts begin and end at multiples of this, and Triton knows it, can it read and write whole vectors, which is
up to twice as fast (4.2 TB/s on an H200). The layout aligns parameters, so parts do."""
_VALUES = tl.constexpr(len(VALUES) + 1)
"""Length of a row of values: `VALUES`, and the gradient's sign."""
_PART = tl.constexpr(5)
"""Length of a part: its first program, start, stop, group and class of counts."""


@dataclass(frozen=True)
class Parts:
    """The parts of a chunk that an update changes, as the kernel reads them."""

    table: torch.Tensor
    num_parts: int
    num_blocks: int
    aligned: bool
    """Whether all begin and end at multiples of `_VECTOR`."""


class FusedAdamUpdate:
    """Adam, or AdamW if `decoupled`, without amsgrad, of bf16 or fp16 parameters with their master and moments."""

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self.table = torch.empty(0)
        """A row of values for each class of counts and, within it, each group."""
        self.factor = torch.empty(0)
        """What gradients are multiplied by, before their sign."""

    def begin(self, values: StepValues) -> None:
        """Prepare a step; its values are on the device."""
        self.table, self.factor = table_of(values, self._decoupled), 1 / values.grad_scale

    def parts(self, spans: Sequence[tuple[Span, int, int]]) -> Parts:
        """Return the parts of a chunk, each given by its span, group and class of counts."""
        rows, block = [], 0
        for span, group, history in spans:
            rows.append([block, span.start, span.stop, group, history])
            block += -(-span.numel // _BLOCK)
        aligned = all(span.start % _VECTOR == span.stop % _VECTOR == 0 for span, _, _ in spans)
        return Parts(torch.tensor(rows).to(self.table.device, non_blocking=True), len(rows), block, aligned)

    def update(
        self,
        parameters: torch.Tensor,
        master: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        values: StepValues,
        parts: Parts,
    ) -> None:
        """Update the parts of a chunk in place; its master is given whole or, as int16, by its remainder.

        `grad`, of any dtype, is multiplied by the step's factor. If `values.skip` is 1 nothing changes.
        """
        _adam[(parts.num_blocks,)](
            *(parameters, master, grad, states["exp_avg"], states["exp_avg_sq"], self.factor, values.skip),
            *(self.table, self.table.shape[1], parts.table, parts.num_parts, self._decoupled),
            *(master.dtype == torch.int16, parameters.dtype == torch.bfloat16, _VECTOR if parts.aligned else 1, _BLOCK),
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


@triton.jit
def _adam(
    parameters,
    masters,
    grads,
    averages,
    squares,
    factor,
    skip,
    table,
    num_groups,
    parts,
    num_parts,
    decoupled: tl.constexpr,
    split: tl.constexpr,
    bf16: tl.constexpr,
    vector: tl.constexpr,
    block: tl.constexpr,
):
    skipped = tl.load(skip) != 0.0
    program = tl.program_id(0)
    part = parts
    for _ in range(1, num_parts):
        part = tl.where(program >= tl.load(part + _PART), part + _PART, part)
    values = table + (tl.load(part + 4) * num_groups + tl.load(part + 3)) * _VALUES
    start, stop = tl.multiple_of(tl.load(part + 1), vector), tl.multiple_of(tl.load(part + 2), vector)
    place = start + (program - tl.load(part)) * block + tl.arange(0, block)
    inside = place < stop
    grad = tl.load(grads + place, mask=inside, other=0.0).to(tl.float32) * (tl.load(factor) * tl.load(values + 8))
    if split:
        high = tl.load(parameters + place, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        master = (high + tl.load(masters + place, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        master = tl.load(masters + place, mask=inside, other=0.0)
    average = tl.load(averages + place, mask=inside, other=0.0)
    square = tl.load(squares + place, mask=inside, other=0.0)
    # In a skipped step too all is written: parameters that pass through a slot are only there once they are.
    old_master, old_average, old_square = master, average, square
    if not decoupled:
        decay = tl.load(values)
        grad = tl.where(decay != 0.0, tl.fma(master, decay, grad), grad)
    weight = tl.load(values + 2)
    change = grad - average
    near = tl.fma(weight, change, average)  # as torch.lerp does it, in two ways
    average = tl.where((weight > -0.5) & (weight < 0.5), near, tl.fma(weight - 1.0, change, grad))
    square = tl.fma(tl.load(values + 4) * grad, grad, square * tl.load(values + 3))
    denominator = tl.div_rn(tl.sqrt_rn(square), tl.load(values + 6)) + tl.load(values + 7)
    master = master * tl.load(values + 1) + tl.div_rn(tl.load(values + 5) * average, denominator)
    master = tl.where(skipped, old_master, master)
    average = tl.where(skipped, old_average, average)
    square = tl.where(skipped, old_square, square)
    tl.store(averages + place, average, mask=inside)
    tl.store(squares + place, square, mask=inside)
    if bf16:  # ties away from zero: [Note: split master]
        bits = master.to(tl.int32, bitcast=True)
        high = tl.where(master == master, (bits + 0x8000) >> 16, 0x7FC0)  # adding would carry NaN bits into the sign
        tl.store(parameters + place, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    else:
        tl.store(parameters + place, master.to(tl.float16), mask=inside)
    if split:
        tl.store(masters + place, (bits - (high << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(masters + place, master, mask=inside)
