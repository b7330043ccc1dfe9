"""Adam and AdamW in one pass over all that a parameter has; imported only if triton is installed.

That is 26 bytes per bf16 parameter with a split master: gradient, parameter, remainder and two moments are read (14
bytes), and all but the gradient are written (12). The arithmetic is in fp32, as in torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from zerocli.engine.optimizer.optim import StepValues
from zerocli.layout.shards import Span

_BLOCK, _WARPS = 1024, 4
"""Elements and warps per program."""
_VECTOR = 16
"""Only if parts begin and end at multiples of this, and Triton knows it, can it read and write whole vectors, which is
up to twice as fast (4.2 TB/s on an H200). The layout aligns parameters, so parts do."""
_VALUES = tl.constexpr(9)
"""Length of a row of values: lr, decay, 1 - beta1, beta2, 1 - beta2, eps, the gradient's sign, and two corrections."""
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
        self._table = torch.empty(0)
        """A row of values for each class of counts and, within it, each group."""
        self._num_groups = 1

    def begin(self, values: StepValues) -> None:
        """Prepare a step; its values are on the device."""
        rows = []
        for group in values.groups:
            (beta1, beta2), decay = group.options["betas"], group.weight_decay
            sign = -1.0 if group.options["maximize"] else 1.0
            row = [group.lr, group.lr * decay if self._decoupled else decay, 1 - beta1, beta2, 1 - beta2]
            rows.append([*row, group.options["eps"], sign, beta1, beta2])
        given = torch.tensor(rows, dtype=torch.float64).to(values.counts.device, non_blocking=True)
        powers = given[:, -2:] ** values.counts.double()[:, None, None]
        table = given.repeat(values.counts.numel(), 1, 1)
        table[:, :, -2:] = 1 - powers
        table[:, :, -1].sqrt_()
        self._table, self._num_groups = table.float(), len(rows)

    def parts(self, spans: Sequence[tuple[Span, int, int]]) -> Parts:
        """Return the parts of a chunk, each given by its span, group and class of counts."""
        rows, block = [], 0
        for span, group, history in spans:
            rows.append([block, span.start, span.stop, group, history])
            block += -(-span.numel // _BLOCK)
        aligned = all(span.start % _VECTOR == span.stop % _VECTOR == 0 for span, _, _ in spans)
        return Parts(torch.tensor(rows).to(self._table.device, non_blocking=True), len(rows), block, aligned)

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

        `grad`, of any dtype, is divided by `values.grad_scale`. If `values.skip` is 1 nothing changes.
        """
        _adam[(parts.num_blocks,)](
            *(parameters, master, grad, states["exp_avg"], states["exp_avg_sq"], values.grad_scale, values.skip),
            *(self._table, self._num_groups, parts.table, parts.num_parts, self._decoupled),
            *(master.dtype == torch.int16, parameters.dtype == torch.bfloat16, _VECTOR if parts.aligned else 1, _BLOCK),
            num_warps=_WARPS,
        )


@triton.jit
def _adam(
    parameters,
    masters,
    grads,
    averages,
    squares,
    scale,
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
    decay = tl.load(values + 1)
    grad = tl.load(grads + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scale) * tl.load(values + 6)
    if split:
        high = tl.load(parameters + place, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        master = (high + tl.load(masters + place, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        master = tl.load(masters + place, mask=inside, other=0.0)
    average = tl.load(averages + place, mask=inside, other=0.0)
    square = tl.load(squares + place, mask=inside, other=0.0)
    # In a skipped step too all is written: parameters that pass through a slot are only there once they are.
    old_master, old_average, old_square = master, average, square
    if decoupled:
        master -= decay * master
    else:
        grad += decay * master
    average += tl.load(values + 2) * (grad - average)
    square = tl.load(values + 3) * square + tl.load(values + 4) * grad * grad
    step_size = tl.load(values) / tl.load(values + 7)
    master -= step_size * average / (tl.sqrt_rn(square) / tl.load(values + 8) + tl.load(values + 5))
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
