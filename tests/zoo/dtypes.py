"""Parameters of several dtypes: fp32 parts of bf16 models, adapters, complex kernels, integers, autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from zoo.blocks import WIDTH, WORDS, Block, Regressor, Stack, pairs
from zoo.case import case, either, trained

BF16 = torch.bfloat16
TOLERANCE = 5e-3


class Fp32Head(Stack):
    """A bf16 trunk with an fp32 head."""

    def __init__(self):
        super().__init__()
        self.to(BF16)
        self.head.float()

    def loss(self, x, tokens):
        return super().loss(x.float(), tokens)


class Fp32Router(nn.Module):
    """bf16 experts behind an fp32 router, within one unit."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block().to(BF16) for _ in range(2))

    def forward(self, x):
        weights = self.router(x.float()).softmax(-1)
        return x + sum(weights[..., i, None].to(x.dtype) * e(x) for i, e in enumerate(self.experts))


class RoutedStack(Stack):
    def __init__(self):
        super().__init__()
        self.to(BF16)
        self.blocks = nn.ModuleList(Fp32Router() for _ in range(2))


class Adapter(nn.Module):
    """A frozen bf16 layer with trainable fp32 adapters."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(BF16).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x):
        return x + self.base(x) + (x.float() @ self.a.t() @ self.b.t()).to(x.dtype)


class Adapted(Stack):
    def __init__(self):
        super().__init__()
        self.to(BF16)
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(Adapter() for _ in range(3))


def _checks_dtypes(name: str, make, **about) -> None:
    """Enter a mixed model that must train and keep each parameter's dtype."""

    @case(name, tolerance=TOLERANCE, **about)
    def program(run):
        trainer = run.shard(make, precision="bf16")
        with torch.no_grad():
            run.log("dtypes", torch.tensor([p.dtype == torch.float32 for p in trainer.model.parameters()]))
        run.train(trainer, 3)


_checks_dtypes("fp32-head-in-a-bf16-model", Fp32Head, also=("stage0", "stage3-cpu"))
_checks_dtypes("fp32-router-in-a-bf16-model", RoutedStack, also=("stage0", "stage3-cpu"), gpu=True)
_checks_dtypes("fp32-adapters-in-a-bf16-model", Adapted, also=("stage0", "stage3-cpu"))


class CastsHead(Stack):
    def loss(self, x, tokens):
        return super().loss(x.to(self.head.weight.dtype), tokens)


@case("keep-fp32-by-name", tolerance=TOLERANCE, also=("stage0", "stage3-cpu"))
def keep_fp32(run):
    """A model of fp32 alone is cast but for the parameters that are to stay."""
    trainer = run.shard(CastsHead, precision="bf16", keep_fp32="head", plain_fp32="head")
    run.log("head is fp32", trainer.model.head.weight.dtype == torch.float32)
    run.log("rest is bf16", trainer.model.embed.weight.dtype == BF16)
    run.train(trainer, 3)


@case("keep-fp32-norms-by-function", tolerance=TOLERANCE)
def keep_norms(run):
    """Norms in fp32 within blocks in bf16."""

    class Normed(Stack):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(NormedBlock() for _ in range(3))

    class NormedBlock(Block):
        def forward(self, x):
            normed = F.layer_norm(x.float(), (WIDTH,), self.norm.weight.float(), self.norm.bias.float()).to(x.dtype)
            return x + self.down(F.silu(self.up(normed)))

    trainer = run.shard(Normed, precision="bf16", keep_fp32=lambda name, p: ".norm." in name, plain_fp32=".norm.")
    run.train(trainer, 3)


trained("bf16", Stack, settings={"precision": "bf16"}, tolerance=TOLERANCE, also=("stage3-cpu",))
trained("bf16-accumulated-and-clipped", Stack, settings={"precision": "bf16", "clip": 0.1}, tolerance=TOLERANCE)
trained("fp16", Stack, settings={"precision": "fp16"}, tolerance=TOLERANCE)


class State(nn.Module):
    """An S4-like layer: a complex diagonal state, convolved by FFT."""

    def __init__(self):
        super().__init__()
        self.pole = nn.Parameter(torch.complex(-torch.rand(WIDTH), torch.randn(WIDTH)))
        self.gain = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device)
        kernel = (self.gain[:, None] * torch.exp(self.pole[:, None] * steps)).real
        size = 2 * x.shape[1]
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=size) * torch.fft.rfft(kernel, n=size)
        return x + torch.fft.irfft(spectrum, n=size)[..., : x.shape[1]].transpose(1, 2) * 0.1


class Fourier(nn.Module):
    """An FNO-like layer: complex weights on the lowest modes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, 3, dtype=torch.complex64) * 0.2)
        self.local = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        modes = torch.fft.rfft(x.transpose(1, 2))[..., :3]
        mixed = torch.einsum("bik,iok->bok", modes, self.weight)
        return self.local(x) + torch.fft.irfft(mixed, n=x.shape[1]).transpose(1, 2)


class RealFourier(Fourier):
    """The same with the weights kept as pairs of real numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.view_as_real(self.weight.detach()).clone())

    def forward(self, x):
        modes = torch.fft.rfft(x.transpose(1, 2))[..., :3]
        mixed = torch.einsum("bik,iok->bok", modes, torch.view_as_complex(self.weight))
        return self.local(x) + torch.fft.irfft(mixed, n=x.shape[1]).transpose(1, 2)


def _layers(layer) -> type[Regressor]:
    class Layers(Regressor):
        def __init__(self):
            super().__init__(0)
            self.blocks = nn.ModuleList(layer() for _ in range(3))

    return Layers


def _waves(run, step):
    return run.randn(step, 2, 6, WIDTH), run.randn(step + 100, 2, 6, WIDTH)


COMPLEX = either("complex")
trained("s4-complex-parameters", _layers(State), _waves, below3=COMPLEX, at3=COMPLEX, also=("stage0", "stage3-cpu"))
trained("fno-complex-parameters", _layers(Fourier), _waves, below3=COMPLEX, at3=COMPLEX, also=("stage0",))
trained("fno-real-pairs", _layers(RealFourier), _waves, also=("stage3-cpu",), gpu=True)


class Quantised(nn.Module):
    """A frozen int8 weight with a trainable scale."""

    def __init__(self):
        super().__init__()
        weight = torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.005))

    def forward(self, x):
        return x + F.linear(x, self.weight * self.scale)


trained("frozen-int8-weights", _layers(Quantised), pairs, also=("stage3-cpu",))


class Double(nn.Module):
    """Computes in fp64 inside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.linear(x.double(), self.linear.weight.double()).to(x.dtype) + self.linear(x)


trained("fp64-inside", _layers(Double), pairs)


@case("fp64-parameters", below3=either("float64"), at3=either("float64"))
def doubles(run):
    """fp64 parameters train as fp64, or are refused; they are not cast in silence."""
    trainer = run.shard(lambda: Regressor().double())
    for step in range(2):
        x, y = (value.double() for value in pairs(run, step))
        trainer.backward(trainer(x, y))
        trainer.step()


@case("autocast", tolerance=TOLERANCE, also=("stage3-cpu",))
def autocast(run):
    """fp32 parameters, bf16 products by torch.autocast."""
    trainer = run.shard(Stack)
    for step in range(3):
        with torch.autocast(run.device.type, dtype=BF16):
            loss = trainer(run.tokens(step, 4, 8))
        trainer.backward(loss.float())
        trainer.step()


@case("autocast-inside", tolerance=TOLERANCE)
def autocast_inside(run):
    class Inside(Stack):
        def body(self, x):
            with torch.autocast(x.device.type, dtype=BF16):
                return super().body(x).float()

    run.train(run.shard(Inside), 3)


class Sparse(Stack):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=True)


SPARSE = {"optimizer": "sgd", "weight_decay": 0.0}
trained(
    "sparse-embedding",
    Sparse,
    settings=SPARSE,
    below3=either("sparse"),
    at3=either("sparse"),
    also=("stage0", "stage1"),
)
