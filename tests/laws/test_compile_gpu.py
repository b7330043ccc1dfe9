"""Compiled blocks on a GPU, with inductor: right, compiled once, never recompiled, at every stage and placement."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from commands import run
from ranks import run_ranks

import zerocli
from zerocli.config import ModelConfig
from zerocli.models import build

pytestmark = pytest.mark.gpu

LAYERS, SEQ, VOCAB = 4, 64, 256
EVERYTHING = "params=cpu,grads=cpu,optimizer=cpu,activations=cpu"


def _train(model: Any, settings: dict[str, Any], steps: int = 5) -> tuple[list[float], list[int], list[str]]:
    """Return losses, the number of graphs after each step, and the notes."""
    torch._dynamo.reset()
    units = {"units": model.unit_modules()} if hasattr(model, "unit_modules") else {}
    engine = zerocli.shard(model, device="cuda", **units, **settings)
    losses, graphs = [], []
    for step in range(steps):
        for micro in range(engine.settings.accumulate):
            torch.manual_seed(100 * step + 10 * micro + engine.collectives.rank)
            tokens = torch.randint(0, VOCAB, (2, SEQ + 1)).cuda()
            if units:
                loss = engine(tokens[:, :-1], tokens[:, 1:])
            else:
                loss = engine(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
            engine.backward(loss)
            losses.append(loss.item())
        engine.step()
        graphs.append(engine.hooks.blocks.num_graphs)
    notes = engine.hooks.blocks.notes
    engine.close()
    return losses, graphs, notes


def _built_in(family: str, settings: dict[str, Any], dropout: float = 0.0) -> tuple[list[float], list[int], list[str]]:
    torch.manual_seed(0)
    shape = ModelConfig(
        family=family, layers=LAYERS, hidden=128, heads=2, vocab=VOCAB, dropout=dropout, tie=family == "gpt2"
    )
    return _train(build(shape, SEQ, "cpu"), settings)


CASES = [
    {"stage": 0, "precision": "fp32"},
    {"stage": 0, "precision": "bf16"},
    {"stage": 0, "precision": "fp16", "recompute": True},
    {"stage": 2, "precision": "bf16", "accumulate": 2},
    {"stage": 3, "precision": "bf16"},
    {"stage": 3, "precision": "bf16", "recompute": True},
    {"stage": 3, "precision": "bf16", "offload": "optimizer=cpu"},
    {"stage": 3, "precision": "bf16", "offload": EVERYTHING},
]


IN_SUITE = [("gpt2", CASES[3]), ("llama", CASES[7])]
LONG = [pytest.param(f, c, marks=pytest.mark.long) for f in ("gpt2", "llama") for c in CASES if (f, c) not in IN_SUITE]
MAYBE_RECOMPUTED = [pytest.param(False, marks=pytest.mark.long), True]


@pytest.mark.parametrize(("family", "settings"), [*IN_SUITE, *LONG], ids=str)
def test_built_in_models_compile_once_and_train_like_eager_ones(family, settings):
    expected, _, _ = _built_in(family, settings)
    losses, graphs, notes = _built_in(family, settings | {"compile": True})
    assert graphs == [1] * 5, notes
    assert losses == pytest.approx(expected, rel=1e-4 if settings["precision"] == "fp32" else 2e-2)
    assert len(notes) == 1 and notes[0].startswith(f"compiled {LAYERS} blocks in ")


def _two_ranks(settings: dict[str, Any]) -> tuple[list[float], list[int]]:
    losses, graphs, _ = _built_in("llama", settings)
    return losses, graphs


@pytest.mark.parametrize("recompute", MAYBE_RECOMPUTED)
def test_two_ranks_on_one_gpu_compile_once_at_stage_3(recompute):
    settings = {"stage": 3, "recompute": recompute}
    expected = run_ranks(2, _two_ranks, settings, seconds=300)
    found = run_ranks(2, _two_ranks, settings | {"compile": True}, seconds=300)
    for (losses, graphs), (other, _) in zip(found, expected, strict=True):
        assert graphs == [1] * 5
        assert losses == pytest.approx(other, rel=1e-4)


def test_where_checkpoints_are_kept_changes_no_bit_of_compiled_blocks():
    kept, _, _ = _built_in("llama", {"stage": 3, "precision": "bf16", "recompute": True, "compile": True})
    moved, _, _ = _built_in("llama", {"stage": 3, "precision": "bf16", "offload": "activations=cpu", "compile": True})
    assert moved == kept


@pytest.mark.parametrize("recompute", MAYBE_RECOMPUTED)
def test_compiled_dropout_is_the_same_twice_with_one_seed(recompute):
    settings = {"stage": 3, "precision": "bf16", "recompute": recompute, "compile": True}
    first, graphs, notes = _built_in("gpt2", settings, dropout=0.1)
    assert graphs == [1] * 5, notes
    assert _built_in("gpt2", settings, dropout=0.1)[0] == first


def _step_peak(recompute: bool) -> int:
    """Return the most bytes that a step's activations and gradients take above what is allocated between steps."""
    gc.collect()  # engines of other tests, which would otherwise be freed while this one is measured
    torch._dynamo.reset()
    torch.manual_seed(0)
    seq = 512
    model = build(ModelConfig(family="llama", layers=8, hidden=256, heads=4, vocab=VOCAB), seq, "cpu")
    settings = {"stage": 0, "precision": "bf16", "recompute": recompute, "compile": True}
    engine = zerocli.shard(model, device="cuda", units=model.unit_modules(), **settings)
    tokens = torch.randint(0, VOCAB, (8, seq + 1)).cuda()
    for _ in range(3):  # the first compiles, the second has all optimizer states: the last one counts
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert engine.hooks.blocks.num_graphs == 1, engine.hooks.blocks.notes
    engine.close()
    return peak


def test_recomputed_compiled_blocks_keep_less_memory():
    kept, recomputed = _step_peak(recompute=False), _step_peak(recompute=True)
    assert recomputed < kept


@pytest.mark.parametrize(
    "settings", [pytest.param({"stage": 0}, marks=pytest.mark.long), {"stage": 3, "recompute": True}], ids=str
)
def test_llama_of_transformers_compiles_once(settings):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 10, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=SEQ, **shape)
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        results.append(_train(model, {"precision": "bf16", "compile": compiled, **settings}))
    (expected, _, _), (losses, graphs, notes) = results
    assert graphs == [1] * 5, notes
    assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("command", ["train", pytest.param("profile", marks=pytest.mark.long)])
def test_commands_with_compiled_blocks_say_what_they_compiled(tmp_path, command):
    words = [command, "tiny", "--ranks", "1", "--steps", "6", "--run-dir", str(tmp_path / "run")]
    result = run(tmp_path, *words, "--set", "model.compile=true")
    assert result.returncode == 0, result.stderr
    assert "compile true (as asked)" in result.stderr
    assert " blocks in " in result.stderr and "(1 graph)" in result.stderr
