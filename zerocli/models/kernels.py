"""Triton kernels for the edges of the models: softmax and loss of a chunk of logits, SwiGLU, rotation of heads.

Imported only if triton is installed; `zerocli.models.fused` chooses between these and torch's operations. Each kernel
reads its inputs and writes its outputs once, except that the loss reads the logits twice. All of them compute in fp32
and round once, to the type of the tensor that they write. None uses atomic additions, so results are reproducible.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOSS_BLOCK, _LOSS_WARPS = 4096, 8
"""Logits of a row that one program holds at a time, and its warps."""
_BLOCK = 1024
"""Elements per program of the elementwise kernels."""


def softmax_loss_(logits: Tensor, targets: Tensor, losses: Tensor, ignored: int, needs_grad: bool) -> None:
    """Write each row's loss to `losses`, and with `needs_grad` replace the logits by its gradient.

    logits: (rows, vocab), with adjacent columns; targets: (rows,), int64; losses: (rows,), fp32. A row whose target is
    `ignored` gives zeros. A target beyond the vocabulary gives an infinite loss.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1 and losses.is_contiguous()
    with _device_of(logits):
        _softmax_loss[(rows,)](
            *(logits, targets.contiguous(), losses, logits.stride(0)),
            vocab=vocab,
            ignored=ignored,
            needs_grad=needs_grad,
            block=_LOSS_BLOCK,
            num_warps=_LOSS_WARPS,
        )


def swiglu(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` for (..., 2 * width) `gate_up`."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        with _device_of(out):
            _swiglu[(out.numel() // width, triton.cdiv(width, _BLOCK))](gate_up, out, width, block=_BLOCK)
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `gate_up`, given that of `swiglu(gate_up)`."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    width = grad.shape[-1]
    out = torch.empty_like(gate_up)
    if out.numel():
        with _device_of(out):
            grid = (grad.numel() // width, triton.cdiv(width, _BLOCK))
            _swiglu_backward[grid](gate_up, grad, out, width, block=_BLOCK)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    """Return (batch, seq, heads, head_dim) `x` rotated by the tables of `Rotary`; `transposed`: rotated back.

    cos and sin: (seq, 1, head_dim), or (batch, seq, 1, head_dim) with a row per token, contiguous fp32; of each row the
    second half is read.
    """
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, seq, heads, head_dim = x.shape
    assert cos.is_contiguous() and sin.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        half = triton.next_power_of_2(head_dim // 2)
        group = max(1, min(triton.next_power_of_2(heads), _BLOCK // half))
        with _device_of(out):
            _rotate[(batch * seq, triton.cdiv(heads, group))](
                *(x, cos, sin, out, seq, heads, head_dim // 2, x.stride(0), x.stride(1), x.stride(2)),
                transposed=transposed,
                per_token=cos.dim() == 4,
                group=group,
                block=half,
            )
    return out


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which the tensor's GPU is the current one: triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@triton.jit
def _softmax_loss(
    logits, targets, losses, stride,
    vocab: tl.constexpr, ignored: tl.constexpr, needs_grad: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(losses + row, 0.0)
        if needs_grad:
            for start in range(0, vocab, block):
                column = start + tl.arange(0, block)
                zeros = tl.zeros((block,), dtype=logits.dtype.element_ty)
                tl.store(logits + column, zeros, mask=column < vocab)
    else:
        target = tl.maximum(target, 0)
        inside = target < vocab
        of_target = tl.load(logits + target, mask=inside, other=float("-inf")).to(tl.float32)
        # The start is finite, so that a first block of -inf leaves no NaN.
        highest = -3.0e38
        total = 0.0
        for start in range(0, vocab, block):
            column = start + tl.arange(0, block)
            x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(x, 0))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
            highest = higher
        of_target -= highest
        tl.store(losses + row, tl.log(total) - of_target)
        if needs_grad:
            # No thread writes before all have read the target's logit.
            tl.debug_barrier()
            scale = 1.0 / total
            for start in range(0, vocab, block):
                column = start + tl.arange(0, block)
                x = tl.load(logits + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
                grad = tl.exp(x - highest) * scale - (column == target).to(tl.float32)
                tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < vocab)


@triton.jit
def _swiglu(gate_up, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(out + row * width + column, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(gate_up, grad, out, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside).to(tl.float32)
    given = tl.load(grad + row * width + column, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    of_gate = given * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    of_up = given * gate * sigmoid
    tl.store(out + at, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + width, of_up.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    x, cos, sin, out, seq, heads, half, stride_batch, stride_token, stride_head,
    transposed: tl.constexpr, per_token: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    place = token % seq
    element = tl.arange(0, block)[None, :]
    head = (tl.program_id(1) * group + tl.arange(0, group))[:, None]
    inside = (head < heads) & (element < half)
    row = token if per_token else place
    table = row * 2 * half + half + element
    c = tl.load(cos + table, mask=element < half, other=0.0)
    s = tl.load(sin + table, mask=element < half, other=0.0)
    if transposed:
        s = -s
    source = x + (token // seq) * stride_batch + place * stride_token + head * stride_head + element
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    to = out + (token * heads + head) * 2 * half + element
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)
