"""Products with a matrix whose number of rows is no multiple of 8, such as GPT-2's vocabulary of 50257.

On a GPU such products take four to eight times as long in bf16 or fp16 as those of the next multiple. So the rows are
cut in two: as many as are a multiple of 8, and at most seven others, whose products take no time. Rows of logits must
begin at multiples of 16 bytes too, so they are kept in a wider buffer. Nothing is padded that a caller sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerocli.layout.shards import round_up

MULTIPLE = 8
MIN_WIDTH = 1024
"""Narrower products take too little time to be cut."""
_HALF = (torch.bfloat16, torch.float16)


def cut(width: int, x: Tensor) -> int:
    """Return the number of rows of a weight that are multiplied first; the whole width if it need not be cut."""
    odd = width % MULTIPLE != 0 and width >= MIN_WIDTH and x.is_cuda and x.dtype in _HALF
    return width - width % MULTIPLE if odd else width


def project_(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Write x @ weight.T to `out`, whose rows may be longer than they are wide."""
    at, width = cut(weight.shape[0], x), weight.shape[0]
    torch.mm(x, weight[:at].t(), out=out[:, :at])
    if at < width:
        torch.mm(x, weight[at:].t(), out=out[:, at:])
    return out


def project_back_(out: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
    """Write grad @ weight, the gradient of x, to `out`."""
    at, width = cut(weight.shape[0], grad), weight.shape[0]
    torch.mm(grad[:, :at], weight[:at], out=out)
    if at < width:
        out.addmm_(grad[:, at:], weight[at:])
    return out


def row_parts(grad: Tensor, total: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (columns of grad, rows of total) whose products with x are the parts of the weight's gradient."""
    at, width = cut(total.shape[0], grad), total.shape[0]
    return [(grad[:, rows], total[rows]) for rows in (slice(at), slice(at, width)) if rows.start != width]


def linear_forward(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a forward of a Linear with an odd width that is fast on a GPU; None for all other modules."""
    # A scripted module's class raises when it is asked for its forward.
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return None
    if "forward" in module.__dict__:
        return None
    if module.out_features < MIN_WIDTH or module.out_features % MULTIPLE == 0:
        return None

    def forward(input: Tensor) -> Tensor:  # named as torch's
        weight, bias = module.weight, module.bias
        plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        odd = not plain and not torch.is_autocast_enabled(input.device.type) and weight.dtype == input.dtype
        if not odd or cut(len(weight), input) == len(weight):
            return F.linear(input, weight, bias)
        out: Tensor = _OddLinear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
        return out

    return forward


def _wide_rows(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return empty memory whose rows begin at multiples of 16 bytes.

    It is no view of a wider tensor: torch forbids in-place changes of a view that an autograd function returns.
    """
    strides, stride = [1], round_up(shape[-1], MULTIPLE)
    for size in reversed(shape[:-1]):
        strides.append(stride)
        stride *= max(1, size)
    return like.new_empty_strided(tuple(shape), strides[::-1])


class _OddLinear(torch.autograd.Function):
    """x @ weight.T + bias; the rows of its output begin at multiples of 16 bytes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        flat, out = x.reshape(-1, x.shape[-1]), _wide_rows(x, (*x.shape[:-1], len(weight)))
        project_(out.view(len(flat), len(weight)), flat, weight)
        if bias is not None:
            out += bias
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows, flat = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        bias = rows.sum(0) if of_bias else None
        if torch.is_grad_enabled():  # someone differentiates this backward
            return (grad @ weight if of_x else None), (rows.t() @ flat if of_weight else None), bias
        if rows.stride(1) != 1 or rows.stride(0) % MULTIPLE:
            rows = _wide_rows(rows, rows.shape).copy_(rows)
        grad_x = project_back_(torch.empty_like(flat), rows, weight).view(x.shape) if of_x else None
        grad_weight = torch.empty_like(weight) if of_weight else None
        if grad_weight is not None:
            for part, total in row_parts(rows, grad_weight):
                torch.mm(part.t(), flat, out=total)
        return grad_x, grad_weight, bias
