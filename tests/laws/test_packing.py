"""Laws: documents packed into one row give the losses that they give one by one, however the model is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

import zerocli
from zerocli.config import ModelConfig
from zerocli.models import build
from zerocli.models.loss import IGNORED

SEQ, VOCAB = 24, 50
LENGTHS = ((9, 1, 14), (24,), (3, 3, 18), (12, 5, 7))
"""Tokens of the documents of each row. A document of one token has no target."""
COMMON: dict[str, Any] = {"layers": 3, "hidden": 32, "heads": 4, "vocab": VOCAB, "mlp_hidden": 40}
QWEN: dict[str, Any] = {"qk_norm": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "head_dim": 12}
MODELS = {
    "gpt2": ModelConfig(family="gpt2", **COMMON),
    "gpt2 with more positions": ModelConfig(family="gpt2", positions=64, **COMMON),
    "llama": ModelConfig(family="llama", kv_heads=2, tie=False, **COMMON),
    "mistral": ModelConfig(family="llama", kv_heads=2, window=6, **COMMON),
    "qwen": ModelConfig(family="llama", kv_heads=2, window=6, window_layers="1-2", tie=False, **QWEN, **COMMON),
}


def documents(row: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets, (1, length) each, of a row's documents; the last token of each has no target."""
    generator = torch.Generator().manual_seed(row)
    found = []
    for length in LENGTHS[row]:
        tokens = torch.randint(VOCAB, (1, length), generator=generator)
        found.append((tokens, torch.cat((tokens[:, 1:], torch.tensor([[IGNORED]])), 1)))
    return found


def packed(rows: range) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and positions of these rows."""
    joined = [[torch.cat(parts, 1) for parts in zip(*documents(row), strict=True)] for row in rows]
    tokens, targets = (torch.cat(parts) for parts in zip(*joined, strict=True))
    return tokens, targets, torch.stack([torch.cat([torch.arange(n) for n in LENGTHS[row]]) for row in rows])


def one_by_one(model: Any, rows: range) -> Tensor:
    """Return the mean loss of all targets of these rows, each document in a batch of its own."""
    each = [document for row in rows for document in documents(row)]
    counts = [int((targets != IGNORED).sum()) for _, targets in each]
    losses = [model(*document) * count for document, count in zip(each, counts, strict=True)]
    return torch.stack(losses).sum() / sum(counts)


def fresh(name: str) -> Any:
    torch.manual_seed(0)
    model = build(MODELS[name], SEQ)
    with torch.no_grad():  # larger than at the start, so that attention matters
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_have_the_losses_and_gradients_of_single_ones(name):
    model, rows = fresh(name), range(len(LENGTHS))
    expected = one_by_one(model, rows)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(*packed(rows))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for found, grad in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-6)
    tokens, targets, _ = packed(rows)
    assert abs(model(tokens, targets).item() - expected.item()) > 1e-3, "without positions documents see each other"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_have_the_losses_of_single_ones_on_a_gpu(name, dtype):
    model = fresh(name)
    expected = one_by_one(model, range(4)).item()
    model = model.to("cuda", dtype)
    loss = model(*(each.cuda() for each in packed(range(4))))
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-3 if dtype == torch.float32 else 2e-2)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "qwen"])
def test_positions_of_whole_rows_change_nothing_but_rounding(name):
    model, tokens = fresh(name), packed(range(4))[0]
    plain = model(tokens)
    torch.testing.assert_close(model(tokens, None, torch.arange(SEQ).repeat(4, 1)), plain, rtol=1e-4, atol=1e-5)


# -- sharded -----------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 3": {"stage": 3},
    "recompute": {"stage": 3, "recompute": True},
    "selective": {"stage": 2, "recompute": "selective"},
    "checkpoints leave": {"stage": 3, "recompute": True, "offload": "activations=cpu"},
}


def train(name: str, rows: range, steps: int, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Return losses and gradient norms of a few steps on these rows of packed documents."""
    model = fresh(name)
    engine = zerocli.shard(model, units=model.unit_modules(), lr=1e-2, eps=1e-5, clip=0.3, seed=3, **settings)
    losses, norms = [], []
    for _ in range(steps):
        loss = engine(*packed(rows))
        engine.backward(loss)
        losses.append(loss.item())
        norms.append(engine.step().grad_norm.item())
    assert not any("eagerly" in note for note in engine.hooks.blocks.notes), "each block is one graph"
    engine.close()
    return {"losses": losses, "norms": norms}


def _cases(name: str, cases: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    import torch.distributed as dist

    found = []
    for settings in cases:
        split = settings.get("tp", 1) > 1
        rows = range(2) if split else range(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
        found.append(train(name, rows, 2, settings))
    return found


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "llama")), "qwen"])
def test_packed_losses_are_the_same_however_the_model_is_sharded(name):
    ranks = run_ranks(
        2, _cases, name, [*CASES.values(), {"stage": 0, "tp": 2}, {"stage": 3, "tp": 2, "recompute": True}]
    )
    model = fresh(name)
    for rank, found in enumerate(ranks):
        expected = one_by_one(model, range(2 * rank, 2 * rank + 2)).item()
        for case, result in zip(CASES, found, strict=False):
            assert result["losses"][0] == pytest.approx(expected, rel=1e-5), case
            assert result == found[0], case
    single = train(name, range(2), 2, {"stage": 0})
    for found in ranks:
        for result in found[len(CASES) :]:
            assert result["losses"] == pytest.approx(single["losses"], rel=1e-5)
            assert result["norms"] == pytest.approx(single["norms"], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "qwen"])
def test_compiled_blocks_take_masks_and_positions(name, recompute):
    """Each block is one graph with its mask; those with a window and those without share it."""
    settings: dict[str, Any] = {"stage": 3, "recompute": recompute}
    expected = train(name, range(2), 2, settings)
    compiled = train(name, range(2), 2, settings | {"compile": True, "compile_backend": "aot_eager"})
    assert compiled["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert compiled["norms"] == pytest.approx(expected["norms"], rel=1e-4)
