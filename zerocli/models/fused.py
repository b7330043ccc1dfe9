"""SwiGLU and the rotation of heads, each as one autograd function, computed by torch's operations or by Triton.

Each function saves the same tensors on every device. Only what computes them differs:

- Half-precision tensors on a GPU use `zerocli.models.kernels`, if triton is installed. They compute in fp32 and round
  once, and allocate nothing but their output.
- CPU tensors and fp32 use torch's operations. fp32 stays with them because Triton's exp is less exact than torch's.
- Compiled regions and functorch transforms see the plain expressions, without an autograd function: inductor fuses
  them itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)
_MIN_CAPABILITY = (8, 0)
"""The oldest GPUs with bf16 instructions; older ones keep torch's operations."""


def kernels_for(x: Tensor) -> ModuleType | None:
    """Return `zerocli.models.kernels` where they compute with tensors like `x`, else None."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.dtype not in _HALF:
        return None
    return _kernels_of(x.device)


@functools.cache
def _kernels_of(device: torch.device) -> ModuleType | None:
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return None
    return importlib.import_module("zerocli.models.kernels")


def _is_transformed() -> bool:
    """Whether a compiler or functorch wants to see plain operations."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def swiglu(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, where gate and up are the halves of the last dimension; backward keeps `gate_up`."""
    if _is_transformed():
        return _plain_swiglu(gate_up)
    out: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


def _plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        if (kernels := kernels_for(gate_up)) is not None:
            out: Tensor = kernels.swiglu(gate_up)
            return out
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # someone differentiates this backward
            of_both: tuple[Tensor] = torch.autograd.grad(_plain_swiglu(gate_up), gate_up, grad, create_graph=True)
            return of_both[0]
        if (kernels := kernels_for(gate_up)) is not None:
            out: Tensor = kernels.swiglu_backward(gate_up, grad)
            return out
        # The operations of autograd's own backward, in its order, but each writes to its half of the result.
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        of_gate, of_up = out.chunk(2, dim=-1)
        torch.mul(grad, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        torch.ops.aten.silu.out(gate, out=of_up)
        of_up.mul_(grad)
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return (batch, seq, heads, head_dim) rotated: computed in fp32, rounded once to the type of x.

    cos and sin: (seq, 1, head_dim), or (batch, seq, 1, head_dim) where each token has its own position, in fp32; the
    sine's first half is negative. Backward keeps nothing but these tables.
    """
    if _is_transformed():
        swapped = torch.roll(x, x.shape[3] // 2, dims=-1)
        return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
    out: Tensor = _Rotate.apply(x, cos, sin, False)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    """A rotation, or with `transposed` the opposite one, which is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.transposed = transposed
        if (kernels := kernels_for(x)) is not None:
            out: Tensor = kernels.rotate(x, cos, sin, transposed)
            return out
        half = x.shape[3] // 2
        if transposed:
            # Each product is rounded by itself, as autograd's own backward would.
            swapped = (torch.roll(x, half, dims=-1) * sin).to(x.dtype)
            return (x * cos).to(x.dtype).sub_(swapped)
        swapped = torch.roll(x, half, dims=-1)
        return (x * cos).addcmul_(swapped, sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, sin, not ctx.transposed), None, None, None  # type: ignore[no-untyped-call]
