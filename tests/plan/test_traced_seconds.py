"""The times of models without a formula: by the operations of a trace."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zerocli.config import ModelConfig, hub
from zerocli.layout.recompute import NOTHING, SELECTIVELY, WHOLE
from zerocli.models import build
from zerocli.models.loss import linear_cross_entropy
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.blocks.work import Work
from zerocli.plan.models.formula import Formula
from zerocli.plan.models.operations import BALANCE, work_of
from zerocli.plan.models.traced import HOST_OPERATION, LOOKED_AT, REPEATED, trace
from zerocli.plan.search.auto import choose
from zerocli.plan.search.candidates import weigh
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import BACKWARD_OPS
from zerocli.plan.time.hardware import PRESETS

H200 = PRESETS["h200"]
SETUP = Setup(stage=3, ranks=1, ranks_per_node=1, batch=8, seq=1024, precision="bf16", device="cuda", recompute=False)
WAYS = [dataclasses.replace(SETUP, recompute=each) for each in (NOTHING, WHOLE, SELECTIVELY)]


class Block(nn.Module):
    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(2048, 2048, bias=False)
        self.more = more

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.more):
            x = torch.sin(x)
        return x + F.gelu(self.inner(x))


class Chain(nn.Module):
    """Eight blocks of one matrix each."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 2048)
        self.layers = nn.ModuleList(Block(more) for _ in range(8))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy((x @ self.embed.weight.T).flatten(0, 1).float(), targets.flatten())


def chain(more: int = 0) -> nn.Module:
    with torch.device("meta"):
        return Chain(more)


def test_operations_are_those_that_run():
    tokens = 8 * 1024
    blocks = 2 * tokens * 8 * 2048 * 2048
    matrices = blocks + 2 * tokens * 2048 * 1000
    traced = trace("chain", lambda: chain(1), SETUP)
    for recompute, repeated in ((NOTHING, 0), (WHOLE, blocks), (SELECTIVELY, 0)):
        passes = traced.computed(dataclasses.replace(SETUP, recompute=recompute))
        assert passes.forward.products == matrices and passes.backward.products == 2 * matrices
        assert passes.again.products == repeated and (passes.again.moved > 0) == bool(recompute)
        assert passes.operations == 3 * matrices


def test_the_host_takes_longer_for_operations_that_are_recomputed():
    """Each of 8 x 10 further operations runs in forward and backward; recomputation repeats it, or looks at it."""

    def host(more: int, setup: Setup) -> float:
        found = weigh(trace("chain", lambda: chain(more), setup), setup, H200).estimate
        assert found is not None
        return found.parts["host"]

    kept, whole, selective = (host(10, each) - host(0, each) for each in WAYS)
    assert kept == pytest.approx(8 * 10 * 3 * HOST_OPERATION)  # backward has a cosine and a product
    assert whole == pytest.approx(kept + REPEATED * 8 * 10 * HOST_OPERATION)
    assert selective == pytest.approx(kept + LOOKED_AT * 8 * 10 * HOST_OPERATION)


class Operations(TorchDispatchMode):
    """Adds up what operations compute."""

    def __init__(self, in_loss: bool = False) -> None:
        super().__init__()
        self.total, self._in_loss = Work(), in_loss

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.total += work_of(function, args, kwargs or {}, out, self._in_loss)
        return out

    def take(self) -> Work:
        found, self.total = self.total, Work()
        return found


def test_a_thin_product_waits_for_memory_and_a_square_one_does_not():
    with Operations() as operations:
        thin = torch.empty(8, 2048, 64, dtype=torch.bfloat16, device="meta")
        scores = thin @ thin.mT
        work = operations.take()
        assert work.products == 8 * 2 * 2048 * 2048 * 64
        nbytes = scores.nbytes + 2 * thin.nbytes
        assert work.moved + work.products / BALANCE[2] == pytest.approx(nbytes)
        square = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
        square @ square
        assert operations.take().moved == 0


def test_views_and_queries_are_no_work_and_each_byte_of_a_kernel_counts_once():
    with Operations() as operations:
        x = torch.empty(64, 32)
        x.view(32, 64).t()[1:].detach()
        assert operations.take() == Work()
        x.add_(x)
        assert operations.take().moved == x.nbytes
        torch.add(x, 1)
        assert operations.take().moved == 2 * x.nbytes


def test_of_the_chunked_loss_only_products_and_their_bytes_count():
    x, weight = torch.randn(64, 32, requires_grad=True), torch.randn(500, 32, requires_grad=True)
    with Operations(in_loss=True) as operations:
        linear_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64), chunk=64)
    logits = 64 * 500 * 4
    assert operations.total.products == 3 * 2 * 64 * 500 * 32
    assert operations.total.moved == pytest.approx(3 * logits + 3 * weight.nbytes + 3 * x.nbytes, rel=0.03)


def test_attention_counts_by_its_queries_keys_and_values():
    q, k, v = (torch.randn(2, 4, rows, 16, requires_grad=True) for rows in (8, 24, 24))
    with Operations() as operations:
        out = F.scaled_dot_product_attention(q, k, v)
        forward = operations.take().attention
        out.sum().backward()
        backward = operations.take().attention
    assert forward == 2 * 2 * 4 * 8 * 24 * (16 + 16)
    assert backward == pytest.approx(forward * BACKWARD_OPS)


@pytest.mark.long
@pytest.mark.parametrize("layers", [3, 8])
def test_a_trace_of_a_model_with_a_formula_takes_as_long(layers):
    """The formula is held by measurements (test_seconds.py). Its launches are of a GPU's kernels, so hosts differ."""
    model = ModelConfig(family="gpt2", layers=layers, hidden=4096, heads=32, vocab=32000, tie=False)
    shape, traced = shape_of(model, 1024), trace("gpt2", lambda: build(model, 1024, "meta"), SETUP)
    for setup in WAYS:
        formula, ours = (weigh(each, setup, H200).estimate for each in (Formula(shape), traced))
        assert formula and ours
        assert ours.parts["compute"] == pytest.approx(formula.parts["compute"], rel=0.05), setup.recompute
        # A trace has a CPU's operations, of which kernels of ours on a GPU join several, and none of the engine's.
        assert 0.9 < ours.parts["host"] / formula.parts["host"] < 1.3, setup.recompute
        assert ours.mfu == pytest.approx(formula.mfu, rel=0.08)


def test_a_choice_for_a_traced_model_recomputes_and_offloads_only_what_it_must():
    traced = trace("chain", lambda: chain(1), SETUP)
    setup = dataclasses.replace(SETUP, recompute="auto")
    roomy = choose(traced, setup, H200, [3]).best
    assert roomy is not None and not roomy.setup.offload and not roomy.setup.recomputed
    less = dataclasses.replace(H200, gpu_memory=roomy.plan.needed("hbm"))  # of which a share stays free
    tight = choose(traced, setup, less, [3]).best
    assert tight is not None and (tight.setup.offload or tight.setup.recomputed)
    assert roomy.estimate and tight.estimate and tight.estimate.seconds >= roomy.estimate.seconds


LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}


@pytest.mark.long
@pytest.mark.skipif(not hub.installed(), reason="needs transformers")
def test_transformers_llama_takes_what_was_measured(tmp_path):
    """benchmarks/module_speed.py, one H200: 8,158 tokens/s eager, 9,722 compiled (docs/performance.md)."""
    from zerocli.models import transformers_model

    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))

    def make() -> nn.Module:
        return transformers_model.build(str(tmp_path), 4096)

    setup = dataclasses.replace(SETUP, batch=2, seq=4096, recompute=WHOLE)
    traced = trace("llama", make, setup)
    for compiled, speed in ((False, 8158), (True, 9722)):
        found = weigh(traced, dataclasses.replace(setup, compiled=compiled), H200).estimate
        assert found and found.seconds == pytest.approx(2 * 4096 / speed, rel=0.05), compiled
