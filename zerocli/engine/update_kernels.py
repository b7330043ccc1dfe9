"""Adam and AdamW in one pass over all that a parameter has; imported only if triton is installed.

That is 26 bytes per bf16 parameter with a split master: gradient, parameter, remainder and two moments are read (14
bytes), and all but the gradient are written (12). The arithmetic is in fp32, as in torch's fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from zerocli.engine.optim import At, Group, StepValues

_BLOCK, _WARPS = 512, 8
"""Elements and warps per program: two elements a thread. With more, a piece whose length is no multiple of 16, of which
Triton cannot read whole vectors, takes up to three times as long (H200: 4.1 and 4.0 TB/s with these)."""


class FusedAdamUpdate:
    """Adam, or AdamW if `decoupled`, without amsgrad, of bf16 or fp16 parameters with their master and moments."""

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self._corrections: dict[tuple[float, float], torch.Tensor] = {}
        """By betas: (1 - beta1 ** count, sqrt(1 - beta2 ** count)) of each class of counts."""

    def begin(self, values: StepValues) -> None:
        """Prepare a step; its values are on the device."""
        counts = values.counts.double()
        self._corrections = {}
        for beta1, beta2 in {tuple(group.options["betas"]) for group in values.groups}:
            both = torch.stack([1 - beta1**counts, (1 - beta2**counts).sqrt()], 1)
            self._corrections[beta1, beta2] = both.float()

    def update(
        self,
        parameters: torch.Tensor,
        master: torch.Tensor | None,
        remainder: torch.Tensor | None,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        scale: torch.Tensor,
        group: Group,
        at: At,
    ) -> None:
        """Update a piece in place; its master is given whole or as a remainder.

        `grad`, of any dtype, is divided by `scale`. If `at.skip` is 1 nothing changes.
        """
        if not (numel := parameters.numel()):
            return
        options: Mapping[str, Any] = group.options
        beta1, beta2 = options["betas"]
        split = remainder is not None
        _adam[(triton.cdiv(numel, _BLOCK),)](
            *(parameters, remainder if split else master, grad, states["exp_avg"], states["exp_avg_sq"]),
            *(scale, self._corrections[beta1, beta2][at.history], at.skip, numel),
            *(group.lr, group.lr * group.weight_decay if self._decoupled else group.weight_decay),
            *(1 - beta1, beta2, 1 - beta2, options["eps"]),
            *(self._decoupled, options["maximize"], split, parameters.dtype == torch.bfloat16, _BLOCK),
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
    corrections,
    skip,
    numel,
    lr,
    decay,
    weight1,
    beta2,
    weight2,
    eps,
    decoupled: tl.constexpr,
    maximize: tl.constexpr,
    split: tl.constexpr,
    bf16: tl.constexpr,
    block: tl.constexpr,
):
    if tl.load(skip) != 0.0:
        return
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < numel
    grad = tl.load(grads + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    if maximize:
        grad = -grad
    if split:
        high = tl.load(parameters + place, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        master = (high + tl.load(masters + place, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    else:
        master = tl.load(masters + place, mask=inside, other=0.0)
    average = tl.load(averages + place, mask=inside, other=0.0)
    square = tl.load(squares + place, mask=inside, other=0.0)
    if decoupled:
        master -= decay * master
    else:
        grad += decay * master
    average += weight1 * (grad - average)
    square = beta2 * square + weight2 * grad * grad
    step_size = lr / tl.load(corrections)
    master -= step_size * average / (tl.sqrt_rn(square) / tl.load(corrections + 1) + eps)
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
