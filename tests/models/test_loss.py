"""The chunked loss equals the plain one, in value and in gradient, and never holds all the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zerocli.layout.constants import MAX_CHUNK_NUMEL, chunk_tokens, padded_vocab
from zerocli.models.loss import IGNORED, linear_cross_entropy

HIDDEN = 24


def make_case(num_tokens: int, vocab: int, num_ignored: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = torch.randn(vocab, HIDDEN, generator=generator) * 0.3
    targets = torch.randint(vocab, (num_tokens,), generator=generator)
    targets[:num_ignored] = IGNORED
    return x.to(device), weight.to(device), targets.to(device)


def differentiate(loss_function, x: Tensor, weight: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and its gradients, the last two divided by the scale that backward was given."""
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss = loss_function(x, weight)
    loss.backward(torch.tensor(scale, device=loss.device))
    assert x.grad is not None and x.grad.dtype == x.dtype
    assert weight.grad is not None and weight.grad.dtype == weight.dtype
    return loss.detach(), x.grad.float() / scale, weight.grad.float() / scale


def plain(targets: Tensor):
    return lambda x, weight: F.cross_entropy(x.float() @ weight.float().t(), targets, ignore_index=IGNORED)


def chunked(targets: Tensor, chunk: int = 0):
    return lambda x, weight: linear_cross_entropy(x, weight, targets, chunk)


@pytest.mark.parametrize(
    "num_tokens, vocab, num_ignored, chunk",
    [
        (40, 128, 0, 8),  # whole chunks, whole rows
        (37, 131, 5, 8),  # a short last chunk, padded rows, a chunk with both kinds of targets
        (37, 131, 16, 8),  # two chunks ignored as a whole
        (5, 67, 1, 0),  # fewer tokens than a chunk
        (1, 2, 0, 1),
    ],
)
@pytest.mark.parametrize("scale", [1.0, -3.5])
def test_loss_and_gradients_equal_the_plain_ones(num_tokens, vocab, num_ignored, chunk, scale) -> None:
    x, weight, targets = make_case(num_tokens, vocab, num_ignored)
    expected = differentiate(plain(targets), x, weight, scale)
    got = differentiate(chunked(targets, chunk), x, weight, scale)
    assert got[0].dtype == torch.float32 and got[0].shape == ()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_gradients_match_finite_differences() -> None:
    x, weight, targets = make_case(6, 11, 2)
    _, grad_x, grad_weight = differentiate(chunked(targets, 4), x, weight)
    loss = chunked(targets, 4)
    for tensor, grad in ((x, grad_x), (weight, grad_weight)):
        direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
        tensor += 1e-2 * direction
        above = loss(x, weight)
        tensor -= 2e-2 * direction
        below = loss(x, weight)
        tensor += 1e-2 * direction
        torch.testing.assert_close((above - below) / 2e-2, (grad * direction).sum(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_fp32(dtype: torch.dtype) -> None:
    x, weight, targets = make_case(64, 131, 3)
    x, weight = x.to(dtype), weight.to(dtype)
    expected = differentiate(plain(targets), x.float(), weight.float())
    got = differentiate(chunked(targets, 16), x, weight)
    tolerance = 4 * torch.finfo(dtype).eps
    assert got[0].dtype == torch.float32
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


def test_weight_gradient_is_summed_over_chunks_in_fp32() -> None:
    """Many small chunks give the gradient of one chunk to within one rounding to bf16."""
    x, weight, targets = make_case(256, 64)
    x, weight = x.bfloat16(), weight.bfloat16()
    one = differentiate(chunked(targets, 256), x, weight)[2]
    many = differentiate(chunked(targets, 1), x, weight)[2]
    torch.testing.assert_close(many, one, rtol=torch.finfo(torch.bfloat16).eps, atol=1e-6)


def test_fp16_takes_a_loss_scale_beyond_its_range() -> None:
    """2**17 is no fp16 number, but its product with a small gradient is."""
    x, weight, targets = make_case(1, 64)
    x, weight = x.half().requires_grad_(), (weight * 1e-2).half()
    expected = differentiate(plain(targets), x.float(), weight.float())[1]
    linear_cross_entropy(x, weight, targets).backward(torch.tensor(2.0**17))
    assert x.grad is not None
    assert (x.grad.float() / 2**17 - expected).norm() <= 2e-3 * expected.norm()


def test_fp16_gradients_do_not_underflow_with_many_tokens() -> None:
    """A probability near 1/2048 divided by 2048 tokens has few of fp16's bits left, and a loss scale comes too late."""
    x, weight, targets = make_case(2048, 2048)
    x, weight, targets = x[:, :4].half(), weight[:, :4].half(), torch.zeros_like(targets)
    expected = differentiate(plain(targets), x.float(), weight.float())[2][1:]
    got = differentiate(chunked(targets, 1024), x, weight, scale=2.0**11)[2][1:]
    assert (got - expected).norm() <= 2e-3 * expected.norm()


def test_all_targets_ignored_gives_zero() -> None:
    x, weight, targets = make_case(9, 33, 9)
    loss, grad_x, grad_weight = differentiate(chunked(targets, 4), x, weight)
    assert loss == 0 and not grad_x.any() and not grad_weight.any()


def test_extreme_logits_stay_finite() -> None:
    x, weight, targets = make_case(9, 33)
    expected = differentiate(plain(targets), 1e4 * x, weight)
    got = differentiate(chunked(targets, 4), 1e4 * x, weight)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_frozen_inputs_get_no_gradient() -> None:
    x, weight, targets = make_case(9, 33)
    expected = differentiate(plain(targets), x, weight)
    for frozen in (0, 1):
        inputs = [x.clone(), weight.clone()]
        inputs[1 - frozen].requires_grad_()
        linear_cross_entropy(*inputs, targets, 4).backward()
        assert inputs[frozen].grad is None
        torch.testing.assert_close(inputs[1 - frozen].grad, expected[2 - frozen])


def test_no_grad_gives_the_same_loss() -> None:
    x, weight, targets = make_case(9, 33)
    weight.requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets, 4)
    assert not loss.requires_grad
    assert loss == linear_cross_entropy(x, weight, targets, 4)


def test_inputs_are_left_as_they_were() -> None:
    x, weight, targets = make_case(9, 33, 2)
    before = x.clone(), weight.clone(), targets.clone()
    linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets, 4).backward()
    assert all(torch.equal(a, b) for a, b in zip((x, weight, targets), before, strict=True))


def test_a_second_backward_is_refused() -> None:
    x, weight, targets = make_case(9, 33)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Operations(TorchDispatchMode):
    """Records how often each operation runs and the largest tensor that one returns, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest_numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(result, Tensor):
            self.largest_numel = max(self.largest_numel, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_logits_never_exist_and_matmuls_are_three_a_chunk(dtype: torch.dtype) -> None:
    num_tokens, vocab, chunk = 64, 200, 8
    x, weight, targets = make_case(num_tokens, vocab)
    x, weight = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    with Operations() as operations:
        linear_cross_entropy(x, weight, targets, chunk).backward()
    assert operations.largest_numel <= max(chunk * padded_vocab(vocab), vocab * HIDDEN) < num_tokens * vocab
    assert sum(name in ("mm", "addmm_") for name in operations.names) == 3 * num_tokens // chunk
    # What would make a GPU wait for the host.
    assert not {"_local_scalar_dense", "nonzero", "index"} & set(operations.names)


@pytest.mark.parametrize("device_type", MAX_CHUNK_NUMEL)
@pytest.mark.parametrize("vocab", [256, 50257, 50304, 128256, 2**20])
def test_automatic_chunk_stays_within_its_bound(device_type: str, vocab: int) -> None:
    tokens = chunk_tokens(vocab, device_type)
    assert 1 <= tokens <= MAX_CHUNK_NUMEL[device_type] // padded_vocab(vocab)
    assert tokens % 128 == 0 or tokens < 128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_follows_fp32_without_waiting_for_the_host(dtype: torch.dtype) -> None:
    x, weight, targets = make_case(64, 131, 3, device="cuda")
    x, weight = x.to(dtype), weight.to(dtype)
    expected = differentiate(plain(targets), x.float(), weight.float())
    differentiate(chunked(targets, 16), x, weight)
    inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = linear_cross_entropy(*inputs, targets, 16)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tolerance = 4 * max(torch.finfo(dtype).eps, 1e-5)
    for a, b in zip((loss.detach(), inputs[0].grad, inputs[1].grad), expected, strict=True):
        assert a is not None
        assert (a.float() - b).norm() <= tolerance * b.norm()
