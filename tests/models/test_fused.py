"""SwiGLU and rotation as single functions: on a CPU the bits of the plain expressions, and less kept for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zerocli.models.fused import rotate, swiglu
from zerocli.models.llama import Rotary

SEQ = 7
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def plain_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = torch.roll(x, x.shape[3] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)


def tables(head_dim: int) -> tuple[Tensor, Tensor]:
    rotary = Rotary(SEQ + 3, head_dim, 1e4)
    return rotary.cos[:SEQ], rotary.sin[:SEQ]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def with_gradient(function, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = function(x, *rest)
    (grad,) = torch.autograd.grad(out, x, draw(*out.shape, dtype=out.dtype, seed=1))
    return out.detach(), grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 48, 131, 512])
def test_swiglu_has_the_bits_of_the_plain_expression(width: int, dtype: torch.dtype) -> None:
    gate_up = draw(3, SEQ, 2 * width, dtype=dtype)
    expected = with_gradient(plain_swiglu, gate_up)
    assert all(torch.equal(a, b) for a, b in zip(with_gradient(swiglu, gate_up), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, head_dim", [(1, 2), (3, 10), (4, 64), (5, 80)])
@pytest.mark.parametrize("strided", [False, True])
def test_rotation_has_the_bits_of_the_plain_expression(heads, head_dim, strided, dtype) -> None:
    x = draw(2, SEQ, heads + 2 * strided, head_dim, dtype=dtype)[:, :, :heads]
    expected = with_gradient(plain_rotate, x, *tables(head_dim))
    assert all(torch.equal(a, b) for a, b in zip(with_gradient(rotate, x, *tables(head_dim)), expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_by_positions_of_each_token_has_the_bits_of_rotation_by_row(dtype) -> None:
    cos, sin = tables(8)
    places = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6]])
    x = draw(2, SEQ, 3, 8, dtype=dtype)
    found = with_gradient(rotate, x, cos[places], sin[places])
    expected = with_gradient(plain_rotate, x, cos[places], sin[places])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(found[0][1], rotate(x, cos, sin)[1])


def test_backward_keeps_the_input_of_swiglu_and_the_tables_of_a_rotation() -> None:
    cos, sin = tables(8)
    gate_up, x = draw(2, SEQ, 48).requires_grad_(), draw(2, SEQ, 3, 8).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        outs = swiglu(gate_up), rotate(x, cos, sin)
    assert len(outs) == 2
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (gate_up, cos, sin)}


def test_second_derivatives_are_those_of_the_plain_expressions() -> None:
    def penalty(function, x: Tensor, *rest: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(function(x, *rest).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for ours, plain, given in (
        (swiglu, plain_swiglu, (draw(2, 12),)),
        (rotate, plain_rotate, (draw(2, SEQ, 3, 8), *tables(8))),
    ):
        torch.testing.assert_close(penalty(ours, *given), penalty(plain, *given))


def test_functorch_sees_plain_operations() -> None:
    gate_up, x = draw(4, 12), draw(2, SEQ, 3, 8)
    got = torch.func.vmap(torch.func.grad(lambda row: swiglu(row).sum()))(gate_up)
    torch.testing.assert_close(got, torch.func.grad(lambda rows: plain_swiglu(rows).sum())(gate_up))
    out, tangent = torch.func.jvp(lambda y: rotate(y, *tables(8)), (x,), (x,))
    torch.testing.assert_close(out, tangent)  # it is linear


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_regions_have_no_graph_break(backend: str) -> None:
    def both(gate_up: Tensor, x: Tensor) -> Tensor:
        return swiglu(gate_up).sum() + rotate(x, *given).square().sum()

    given = tables(8)
    inputs = draw(2, 12).requires_grad_(), draw(2, SEQ, 3, 8).requires_grad_()
    compiled = torch.compile(both, backend=backend, fullgraph=True)
    expected = torch.autograd.grad(both(*inputs), inputs)
    for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
        torch.testing.assert_close(a, b)
