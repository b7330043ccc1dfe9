"""The Triton kernels on a GPU: no less exact than torch's operations, on any shape, in the memory that is planned."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zerocli.layout.constants import padded_vocab
from zerocli.models import fused, loss
from zerocli.models.llama import Rotary
from zerocli.models.loss import IGNORED, linear_cross_entropy

pytestmark = pytest.mark.gpu

HALF = [torch.bfloat16, torch.float16]
DTYPES = [*HALF, torch.float32]
FP32_EPS = torch.finfo(torch.float32).eps
SEEDS = [seed if seed < 4 else pytest.param(seed, marks=pytest.mark.long) for seed in range(12)]


@pytest.fixture(autouse=True)
def kernels():
    """Skip where there is no triton: all other tests run there, on torch's operations."""
    found = fused.kernels_for(torch.zeros(1, device="cuda", dtype=torch.bfloat16))
    if found is None:
        pytest.skip("needs triton and a GPU with bf16")
    return found


@pytest.fixture
def plainly(monkeypatch):
    """Return a function that calls another with torch's operations in place of the kernels."""

    def call(function, *given):
        with monkeypatch.context() as patch:
            patch.setattr(fused, "kernels_for", lambda x: None)
            patch.setattr(loss, "kernels_for", lambda x: None)
            return function(*given)

    return call


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, device="cuda", generator=generator)).to(dtype)


def assert_no_less_exact(got, plain, exact) -> None:
    """Compare errors against fp64: at most 1.5 times the plain path's, or a few roundings in fp32."""
    for a, b, reference in zip(got, plain, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        error, allowed = ((t.double() - reference).norm() for t in (a, b))
        assert error <= 1.5 * allowed + 8 * FP32_EPS * reference.norm(), (error, allowed, reference.norm())


def requested() -> tuple[int, int]:
    """Return the bytes that tensors ask of the GPU now, and the most since the last reset; no rounding in them."""
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]


def gradients(function, grad: Tensor | None, *inputs: Tensor) -> list[Tensor]:
    """Return the output and the gradient of each input."""
    inputs = tuple(t.detach().requires_grad_() for t in inputs)
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, None if grad is None else grad.to(out.dtype))]


# -- loss --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_loss_is_no_less_exact(plainly, dtype, seed) -> None:
    draw = random.Random(seed)
    tokens, hidden = draw.randrange(1, 200), 8 * draw.randrange(1, 20)
    vocab = draw.choice([draw.randrange(1, 300), draw.randrange(4000, 4200), draw.randrange(8000, 30000)])
    chunk = draw.randrange(1, tokens + 1)
    x, weight = normal(tokens, hidden, dtype=dtype, seed=seed), normal(vocab, hidden, dtype=dtype, seed=seed + 1)
    weight *= draw.choice([0.02, 0.3, 2.0])
    targets = torch.tensor([draw.choice([IGNORED, draw.randrange(vocab)]) for _ in range(tokens)], device="cuda")
    if seed % 6 == 5:
        targets.fill_(IGNORED)

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(a, b, targets, chunk)

    def exact(a: Tensor, b: Tensor) -> Tensor:
        total = F.cross_entropy(a @ b.t(), targets, ignore_index=IGNORED, reduction="sum")
        return total / (targets != IGNORED).sum().clamp_min(1)

    got, plain = gradients(ours, None, x, weight), plainly(gradients, ours, None, x, weight)
    assert_no_less_exact(got, plain, gradients(exact, None, x.double(), weight.double()))
    with torch.no_grad():
        assert torch.equal(ours(x, weight), got[0])
    if dtype == torch.float32:
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("seed", SEEDS)
def test_softmax_of_given_logits_is_no_less_exact(kernels, dtype, seed) -> None:
    draw = random.Random(100 + seed)
    rows, vocab = draw.randrange(1, 40), draw.choice([1, 2, 63, 4095, 4096, 4097, 50257, 128256])
    buffer = normal(rows, padded_vocab(vocab), dtype=dtype, seed=seed, scale=draw.choice([0.1, 3.0, 30.0]))
    targets = torch.tensor([draw.choice([IGNORED, draw.randrange(vocab)]) for _ in range(rows)], device="cuda")
    logits = buffer[:, :vocab].double().requires_grad_()
    exact = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    (of_logits,) = torch.autograd.grad(exact.sum(), logits)

    plain = buffer.clone()
    plain[:, vocab:] = float("-inf")
    plain_losses = loss._softmax_loss_(plain, vocab, targets, True, None)
    losses = torch.full((rows,), 7.0, device="cuda")
    before = buffer.clone()
    kernels.softmax_loss_(buffer[:, :vocab], targets, losses, IGNORED, False)
    assert torch.equal(buffer, before), "without gradient the logits stay"
    assert_no_less_exact([losses], [plain_losses], [exact.detach()])
    kernels.softmax_loss_(buffer[:, :vocab], targets, losses, IGNORED, True)
    assert_no_less_exact([losses, buffer[:, :vocab]], [plain_losses, plain[:, :vocab]], [exact.detach(), of_logits])
    assert torch.equal(buffer[:, vocab:], before[:, vocab:]), "padding is neither read nor written"
    assert (buffer[targets == IGNORED, :vocab] == 0).all()


def test_bad_logits_and_targets_are_seen_in_the_loss(kernels) -> None:
    logits = torch.zeros(4, 100, device="cuda", dtype=torch.float16)
    logits[0, 5], logits[1, 5], logits[2, :50] = float("nan"), float("inf"), float("-inf")
    losses = torch.empty(4, device="cuda")
    kernels.softmax_loss_(logits, torch.tensor([1, 1, 60, 100], device="cuda"), losses, IGNORED, True)
    assert losses[:2].isnan().all() and losses[3] == float("inf")
    torch.testing.assert_close(losses[2], torch.tensor(50.0, device="cuda").log())


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_takes_the_memory_of_its_formula(dtype) -> None:
    tokens, hidden, vocab, chunk = 4096, 256, 8001, 1024
    x, weight = normal(tokens, hidden, dtype=dtype, seed=0), normal(vocab, hidden, dtype=dtype, seed=1)
    x.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(vocab, (tokens,), device="cuda")
    linear_cross_entropy(x, weight, targets, chunk)  # what cuBLAS takes once
    before, _ = requested()
    torch.cuda.reset_peak_memory_stats()
    value = linear_cross_entropy(x, weight, targets, chunk)
    taken = requested()[1] - before
    width = dtype.itemsize
    formula = chunk * padded_vocab(vocab) * width + tokens * hidden * width + vocab * hidden * 4
    assert formula <= taken <= formula + 40 * tokens
    assert value.isfinite()


# -- SwiGLU and rotation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_swiglu_is_no_less_exact(plainly, dtype, seed) -> None:
    draw = random.Random(200 + seed)
    width = draw.choice([1, 3, 1000, 1024, 1025, 5632])
    gate_up = normal(draw.randrange(1, 4), draw.randrange(1, 70), 2 * width, dtype=dtype, seed=seed, scale=4.0)
    if draw.random() < 0.3:
        gate_up = gate_up.transpose(0, 1)
    grad = normal(*gate_up.shape[:-1], width, dtype=dtype, seed=seed + 1)
    if draw.random() < 0.3:
        grad = grad[..., :1].expand_as(grad)
    got, plain = gradients(fused.swiglu, grad, gate_up), plainly(gradients, fused.swiglu, grad, gate_up)
    assert_no_less_exact(got, plain, gradients(fused._plain_swiglu, grad.double(), gate_up.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_rotation_is_no_less_exact(plainly, dtype, seed) -> None:
    draw = random.Random(300 + seed)
    batch, seq, heads = draw.randrange(1, 4), draw.randrange(1, 50), draw.choice([1, 2, 5, 12, 40])
    head_dim = 2 * draw.choice([1, 4, 5, 32, 40, 64, 128])
    rotary = Rotary(seq + draw.randrange(5), head_dim, 1e4).cuda()
    cos, sin = rotary.cos[:seq], rotary.sin[:seq]
    x = normal(batch, seq, heads + 3, head_dim, dtype=dtype, seed=seed)[:, :, :heads]
    if draw.random() < 0.3:
        x = normal(batch, heads, head_dim, seq, dtype=dtype, seed=seed).permute(0, 3, 1, 2)
    grad = normal(batch, seq, heads, head_dim, dtype=dtype, seed=seed + 1)

    def exact(y: Tensor) -> Tensor:
        return y * cos + torch.roll(y, head_dim // 2, dims=-1) * sin

    got = gradients(rotary, grad, x)
    assert_no_less_exact(got, plainly(gradients, rotary, grad, x), gradients(exact, grad.double(), x.double()))


@pytest.mark.parametrize("dtype", HALF)
def test_edges_allocate_their_outputs_only(dtype) -> None:
    rotary = Rotary(256, 64, 1e4).cuda()
    gate_up = normal(4, 256, 2048, dtype=dtype, seed=0).requires_grad_()
    x = normal(4, 256, 16, 64, dtype=dtype, seed=1).requires_grad_()
    for function, given in ((fused.swiglu, gate_up), (rotary, x)):
        function(given).backward(function(given).detach())  # compiles both kernels
        given.grad = None
        before, _ = requested()
        torch.cuda.reset_peak_memory_stats()
        out = function(given)
        nbytes = out.numel() * dtype.itemsize
        assert requested() == (before + nbytes, before + nbytes)
        torch.autograd.grad(out, given, out.detach())
        assert requested()[1] == before + nbytes + given.numel() * dtype.itemsize
        del out


def test_results_are_reproducible() -> None:
    x, weight = normal(300, 64, dtype=torch.bfloat16, seed=0), normal(9001, 64, dtype=torch.bfloat16, seed=1)
    targets = torch.randint(9001, (300,), device="cuda")

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return linear_cross_entropy(a, b, targets, 128)

    runs = [gradients(ours, None, x, weight) for _ in range(3)]
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotation_by_positions_of_each_token_is_rotation_by_row(dtype) -> None:
    rotary = Rotary(32, 64, 1e4).cuda()
    x = torch.randn(3, 32, 5, 64, device="cuda", dtype=dtype)
    whole = torch.arange(32, device="cuda").repeat(3, 1)
    assert torch.equal(rotary(x, rotary.cos[whole], rotary.sin[whole]), rotary(x))
    restarts = whole % 10
    found = rotary(x, rotary.cos[restarts], rotary.sin[restarts])
    for start in (0, 10, 20):
        assert torch.equal(found[:, start : start + 10], rotary(x[:, start : start + 10]))
