"""Products with a width that is no multiple of 8: cut in two on a GPU, and the same function."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zerocli
from zerocli.engine.units import odd_widths
from zerocli.models.loss import linear_cross_entropy

WIDTH, HIDDEN = 1027, 24


def values(device: str = "cpu", dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(*shape, generator=generator) for shape in ((2, 5, HIDDEN), (WIDTH, HIDDEN), (WIDTH,))]
    return [each.to(device, dtype).requires_grad_() for each in made]


def gradients(function, inputs):
    out = function(*inputs)
    weights = torch.sin(torch.arange(out.numel(), device=out.device)).view(out.shape).to(out.dtype)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)


@pytest.fixture
def cuts_everywhere(monkeypatch):
    monkeypatch.setattr(odd_widths, "cut", lambda width, x: width - width % 8)


def test_a_cut_product_is_the_product(cuts_everywhere):
    """In fp64 on a CPU, with a bias, and where someone differentiates the gradient."""
    cut = gradients(odd_widths._OddLinear.apply, values())
    for mine, plain in zip(cut, gradients(F.linear, values()), strict=True):
        torch.testing.assert_close(mine, plain)
    assert cut[0].stride(1) % 8 == 0
    x, weight, bias = values()
    few = x[:1, :2].detach().requires_grad_(), weight[:11].detach(), bias[:11].detach()
    assert torch.autograd.gradgradcheck(odd_widths._OddLinear.apply, few)


def test_what_comes_back_may_be_changed_in_place(cuts_everywhere):
    def halved(function):
        return lambda *inputs: function(*inputs).div_(2)

    x, weight, bias = values()
    for part in (x, x[0], x[0, 0], x[:0]):
        inputs = part.detach().requires_grad_(), weight, bias
        cut, plain = (gradients(halved(function), inputs) for function in (odd_widths._OddLinear.apply, F.linear))
        for mine, usual in zip(cut, plain, strict=True):
            torch.testing.assert_close(mine, usual)


def test_a_cut_loss_is_the_loss(cuts_everywhere):
    x, weight, _ = values(dtype=torch.float32)
    targets = torch.tensor([0, WIDTH - 1, WIDTH - 4, 3, 1024]).repeat(2, 1)
    cut = torch.autograd.grad(linear_cross_entropy(x, weight, targets, chunk=3), (x, weight))
    plain = torch.autograd.grad(F.cross_entropy((x @ weight.t()).flatten(0, 1), targets.flatten()), (x, weight))
    for mine, usual in zip(cut, plain, strict=True):
        torch.testing.assert_close(mine, usual)


def test_which_modules_are_cut():
    assert odd_widths.linear_forward(nn.Linear(8, WIDTH)) is not None
    assert odd_widths.linear_forward(nn.Linear(8, 1024)) is None
    assert odd_widths.linear_forward(nn.Linear(8, 9)) is None
    assert odd_widths.linear_forward(nn.Bilinear(8, 8, WIDTH)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_an_odd_head_trains_as_a_plain_one(stage):
    """Beside plain torch in fp32: the head's products are cut, and what comes back are its own rows alone."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WIDTH)).cuda()
    plain = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WIDTH)).cuda()
    plain.load_state_dict(model.state_dict())
    engine = zerocli.shard(model, stage=stage, precision="bf16", lr=1e-2, units=list(model))
    x = torch.randn(64, HIDDEN, device="cuda")
    targets = torch.randint(WIDTH, (64,), device="cuda")
    out = model(x)
    assert out.shape == (64, WIDTH) and out.stride() == (WIDTH + 5, 1)
    loss = F.cross_entropy(out.float(), targets)
    engine.backward(loss)
    F.cross_entropy(plain(x), targets).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(engine.grad(name).float(), parameter.grad.cpu(), rtol=0.1, atol=2e-4)
    engine.step()
    engine.close()
