"""The output projection and its cross-entropy in one function that never holds all the logits.

For N tokens and a vocabulary of V, whole logits take N x V elements, often more than every other activation together.
`linear_cross_entropy` walks over chunks of tokens instead, and since the gradient of the loss is known up to one factor
while a chunk's logits are there, it computes both gradients in the forward pass: three matmuls in all, as without
chunks, and nothing computed twice.

Memory of a call, in bytes, for a chunk of c tokens (`chunk_tokens`), a padded vocabulary P and compute type size b:

    c*P*b            a chunk's logits, freed before the forward pass returns
    c*P*4            a copy of them in fp32, only in bf16 or fp16 and only without the kernel
    N*H*b + V*H*4    the two gradients, kept until backward

The kernel (`zerocli.models.kernels`) turns a chunk's logits into their gradient in place. It runs where
`zerocli.models.fused` says, and where the vocabulary is whole.

If the vocabulary is split over ranks, V and P are a rank's part of it. Ranks then exchange three numbers per token
(the highest logit; the sum and the target's logit together) and sum the gradient of x.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zerocli.engine.events import RUNNING
from zerocli.engine.units.odd_widths import project_, project_back_, row_parts
from zerocli.layout.constants import chunk_tokens, padded_vocab
from zerocli.models.fused import kernels_for

if TYPE_CHECKING:
    from zerocli.engine.tensor_parallel import TensorParallel

P = ParamSpec("P")

IGNORED = -100
"""A target of this (negative) value is ignored in the loss."""


@dataclass(frozen=True)
class Part:
    """A rank's range of the vocabulary, which begins with token `first`; the others have the rest."""

    tp: TensorParallel
    first: int

    @property
    def last(self) -> bool:
        """Whether it is the last range: a target beyond the vocabulary is an error there."""
        return self.tp.rank == self.tp.world - 1


_chunks_of = ""


@contextlib.contextmanager
def chunks_of(device_type: str) -> Iterator[None]:
    """While the body runs, use the chunk size of this type of device, wherever the tensors are."""
    global _chunks_of
    outer, _chunks_of = _chunks_of, device_type
    try:
        yield
    finally:
        _chunks_of = outer


def _outside_compiler(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Return `function` such that torch.compile does not trace it: it breaks the graph and runs as it is.

    The same as torch.compiler.disable, which however loads the compiler; here that is left to those who compile.
    """
    disabled: list[Callable[P, Tensor]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run


@_outside_compiler
def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0, part: Part | None = None
) -> Tensor:
    """Return the mean cross-entropy of `x @ weight.T` against `targets` as an fp32 scalar; 0 if all are ignored.

    x: (..., hidden) and weight: (vocab, hidden), of one type; targets: (...), int64, `IGNORED` where there is none.
    `chunk` is the number of tokens at a time; 0 means `chunk_tokens`. With a `part`, `weight` has the rows of that part
    of the vocabulary; all ranks get the same loss, and the same gradient of x. The loss can be differentiated once:
    backward scales the gradients in place.
    """
    chunk = chunk or chunk_tokens(weight.shape[0], _chunks_of or x.device.type)
    # Grad mode is always off inside forward, so it is queried here.
    with_grad = torch.is_grad_enabled()
    given = (x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1), chunk, part, with_grad)
    with RUNNING.events.loss():
        loss: Tensor = _LinearCrossEntropy.apply(*given)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward computes the gradients of the summed loss; backward multiplies them by grad_output / num_targets.

    The division waits until then because a probability divided by thousands of tokens would underflow in fp16.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, part: Part | None, with_grad: bool
    ) -> Tensor:
        grad_x = torch.empty_like(x) if with_grad and ctx.needs_input_grad[0] else None
        grad_weight = None
        if with_grad and ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)

        needs_grad = grad_x is not None or grad_weight is not None
        num_targets = (targets != IGNORED).sum().clamp_min(1)
        num_tokens, vocab = x.shape[0], weight.shape[0]
        kernels = kernels_for(x) if part is None else None
        losses = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
        buffer = x.new_empty(min(chunk, num_tokens), padded_vocab(vocab))
        for start in range(0, num_tokens, chunk):
            rows = slice(start, min(start + chunk, num_tokens))
            padded = buffer[: rows.stop - start]
            logits = padded[:, :vocab]
            project_(logits, x[rows], weight)
            if kernels is not None:
                kernels.softmax_loss_(logits, targets[rows], losses[rows], IGNORED, needs_grad)
            else:
                padded[:, vocab:].fill_(float("-inf"))
                losses[rows] = _softmax_loss_(padded, vocab, targets[rows], needs_grad, part)
            if grad_x is not None:
                project_back_(grad_x[rows], logits, weight)
            if grad_weight is not None:
                for columns, total in row_parts(logits, grad_weight):
                    _add_matmul_(total, columns.t(), x[rows])

        if part is not None and grad_x is not None:
            part.tp.sum_(grad_x)
        ctx.save_for_backward(grad_x, grad_weight, num_targets)
        ctx.weight_dtype = weight.dtype
        return losses.sum() / num_targets

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weight, num_targets = ctx.saved_tensors
        # Two dimensions, so that type promotion holds the product, and a loss scale, in fp32 and not in x's type.
        scale = (grad_output.float() / num_targets).reshape(1, 1)
        if grad_x is not None:
            grad_x.mul_(scale)
        if grad_weight is not None:
            rounded = grad_weight.dtype != ctx.weight_dtype
            out = torch.empty_like(grad_weight, dtype=ctx.weight_dtype) if rounded else grad_weight
            grad_weight = torch.mul(grad_weight, scale, out=out)
        return grad_x, grad_weight, None, None, None, None


def _softmax_loss_(padded: Tensor, vocab: int, targets: Tensor, needs_grad: bool, part: Part | None) -> Tensor:
    """Return each row's loss, (rows,) fp32, and replace the logits by their gradient; ignored rows give zeros.

    The only other buffer of the logits' size is in fp32, and only if the logits are not fp32 themselves. `part` is the
    part of the vocabulary of these logits.
    """
    mask = (targets != IGNORED).float()[:, None]
    here = targets - part.first if part is not None else targets
    bound = None if part is None or part.last else vocab - 1
    indices = here.clamp(0, bound)[:, None]  # any index serves a row that its mask sets to zero
    mine = None if part is None else here[:, None] == indices

    highest = padded.amax(-1, keepdim=True).float()
    if part is not None:
        part.tp.max_(highest)
    shifted = padded.sub_(highest) if padded.dtype == torch.float32 else torch.sub(padded, highest)
    of_target = shifted.gather(1, indices)
    total = shifted.exp_().sum(-1, keepdim=True)
    if part is not None and mine is not None:
        both = part.tp.sum_(torch.cat((total, of_target.where(mine, 0)), 1))
        total, of_target = both[:, :1], both[:, 1:]
    if needs_grad:
        torch.mul(shifted, mask / total, out=padded)
        at_target = ((of_target.exp() / total - 1) * mask).to(padded.dtype)
        if mine is not None:
            at_target = torch.where(mine, at_target, padded.gather(1, indices))
        padded.scatter_(1, indices, at_target)
    return ((total.log() - of_target) * mask)[:, 0]


def _add_matmul_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to the fp32 `total`, rounding no product to the type of `a` and `b`."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif not a.is_cuda:
        total.addmm_(a.float(), b.float())
    elif _has_mixed_addmm(a.dtype, a.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(torch.mm(a, b, out_dtype=torch.float32))


@functools.cache
def _has_mixed_addmm(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether this build of torch adds a product of `dtype` matrices to an fp32 one in a single kernel."""
    total = torch.zeros(16, 16, device=device)
    a = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
