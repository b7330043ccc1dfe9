"""Compiled blocks: one compilation for equal blocks, no recompilation in steady state, and the same numbers.

Most tests use torch's `aot_eager` backend: it traces, partitions and runs the same graphs as inductor, without
generating code, so its numbers are those of eager blocks bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from small_gpt import BATCH, CHECKPOINT, HIDDEN, LAYERS, SEQ, make, train, train_step
from torch import nn
from torch._dynamo.utils import counters

import zerocli
from zerocli import Recompute
from zerocli.config import ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.recompute.compiled import choose_compile
from zerocli.models import build, loss

COMPILED = {"compile": True, "compile_backend": "aot_eager"}
MAYBE_RECOMPUTED = [pytest.param(False, marks=pytest.mark.long), True]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


def _graphs_and_losses(**settings) -> tuple[list[int], list[float]]:
    """Return the number of graphs after each step, and the losses."""
    engine = make(**settings)
    graphs, losses = [], []
    for step in range(4):
        losses += train_step(engine, step)
        graphs.append(engine.hooks.blocks.num_graphs)
    assert engine.hooks.blocks.on == bool(settings.get("compile"))
    engine.close()
    return graphs, losses


# -- the number of compilations ----------------------------------------------------------------------------------------

STEADY = [{"stage": 3, "recompute": "selective", "accumulate": 2}]
MORE = [
    {"stage": 2, "recompute": True, "precision": "bf16"},
    {"stage": 0},
    {"stage": 3, "accumulate": 2},
    {"stage": 3, "offload": "params=cpu,optimizer=cpu,activations=cpu"},
    {"stage": 2, "accumulate": 2},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "recompute": True, "accumulate": 2},
    {"stage": 3, "recompute": True, "precision": "fp16"},
]


def _steady(cases: list[dict[str, Any]]) -> None:
    for settings in cases:
        expected = _graphs_and_losses(**settings)[1]
        graphs, losses = _graphs_and_losses(**settings, **COMPILED)
        assert graphs == [1] * 4, settings
        if "precision" in settings:  # torch's traced operations round fewer intermediates to half precision
            assert losses == pytest.approx(expected, rel=1e-3), settings
        else:
            assert losses == expected, settings
    assert not counters["graph_break"]


@pytest.mark.parametrize("cases", [STEADY, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_equal_blocks_are_one_graph_that_is_never_recompiled_and_changes_no_number(cases):
    run_ranks(2 if cases is MORE else 1, _steady, cases, seconds=300)


def _split(recompute: bool) -> None:
    settings = {"tp": 2, "stage": 0, "dropout": 0.0, "recompute": recompute}
    expected = _graphs_and_losses(**settings)[1]
    graphs, losses = _graphs_and_losses(**settings, **COMPILED)
    assert graphs[1] == graphs[-1]
    assert losses == expected


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_split_over_ranks_are_compiled_between_their_exchanges(recompute):
    run_ranks(2, _split, recompute, seconds=300)


class Numbered(nn.Module):
    """Blocks that are equal but for a Python number that their forward reads."""

    def __init__(self, num_blocks: int, broken: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered.Block(i, broken) for i in range(num_blocks))

    class Block(nn.Module):
        def __init__(self, index: int, broken: bool) -> None:
            super().__init__()
            self.linear, self.index, self.broken = nn.Linear(8, 8), index, broken

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + torch.tanh(self.linear(x)) * (self.index + 1)
            if self.broken:
                torch._dynamo.graph_break()
            return x * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _numbered(num_blocks: int, broken: bool = False, **settings) -> tuple[Engine, list[float]]:
    torch.manual_seed(0)
    engine = zerocli.shard(Numbered(num_blocks, broken), stage=3, **settings)
    x = torch.randn(4, 8)
    losses = []
    for _ in range(3):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


@pytest.mark.long
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_that_differ_in_a_number_are_all_compiled_beyond_the_limit_of_one_function(recompute):
    number = torch._dynamo.config.recompile_limit + 1
    _, expected = _numbered(number, recompute=recompute)
    engine, losses = _numbered(number, recompute=recompute, **COMPILED)
    assert losses == expected
    assert engine.hooks.blocks.num_graphs == number
    assert len(engine.hooks.blocks.notes) == 1
    assert engine.hooks.blocks.notes[0].startswith(f"compiled {number} blocks in ")


@pytest.mark.parametrize(
    "recompute", [*(pytest.param(way, marks=pytest.mark.long) for way in (False, True)), "selective"]
)
def test_a_block_that_breaks_the_graph_is_compiled_in_parts(recompute):
    """One that is recomputed selectively runs eagerly."""
    _, expected = _numbered(2, broken=True, recompute=recompute)
    engine, losses = _numbered(2, broken=True, recompute=recompute, **COMPILED)
    assert losses == expected
    assert (engine.hooks.blocks.num_graphs > 1) == (recompute != "selective")


@pytest.mark.long
def test_another_sequence_length_is_one_more_graph():
    engine = make(recompute=True, **COMPILED)
    for step, seq in enumerate((SEQ, SEQ // 2, SEQ // 2 - 1, SEQ)):
        train_step(engine, step, seq)
    assert engine.hooks.blocks.num_graphs == 2
    engine.close()


def test_only_repeated_blocks_are_compiled():
    torch.manual_seed(0)
    model = build(ModelConfig(family="llama", layers=2, hidden=64, heads=2, vocab=64, tie=False), SEQ, "cpu")
    engine = zerocli.shard(model, units=model.unit_modules(), **COMPILED)
    included = [unit.name for unit in engine.units if engine.hooks.blocks.includes(unit)]
    assert included == ["blocks.0", "blocks.1"]
    train_step(engine, 0)
    assert engine.hooks.blocks.num_graphs == 1
    engine.close()


# -- recomputation inside the graph ------------------------------------------------------------------------------------


def _saved_nbytes(engine: Engine) -> int:
    """Return the bytes that autograd saves in a forward, other than parameters."""
    own = {p.data_ptr() for p in engine.model.parameters()}
    found = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            found[tensor.data_ptr()] = (tensor.nbytes, tensor)
        return tensor

    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(tokens, tokens)
    engine.backward(loss)
    engine.step()
    return sum(nbytes for nbytes, _ in found.values())


@pytest.mark.long
def test_recomputed_graphs_save_only_the_blocks_inputs_and_recompute_no_more_than_eager_ones():
    saved, matmuls = {}, {}
    for name, settings in (("eager", {}), ("compiled", COMPILED)):
        engine = make(stage=0, dropout=0.0, recompute=True, **settings)
        train_step(engine, 0)
        saved[name] = _saved_nbytes(engine)
        assert engine.activations.peak_nbytes == LAYERS * CHECKPOINT
        loss = engine(torch.zeros(BATCH, SEQ, dtype=torch.long), torch.zeros(BATCH, SEQ, dtype=torch.long))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.backward(loss)
        matmuls[name] = sum(event.name in ("aten::mm", "aten::addmm") for event in profile.events())
        engine.close()
    # torch counts attention as random, and keeps the state of the generator for its recomputation.
    assert saved["compiled"] <= saved["eager"] + LAYERS * torch.get_rng_state().nbytes
    # Two for each of the four matmuls of a block, and its first three again: the last one's product is not needed.
    assert matmuls["compiled"] == LAYERS * (4 * 2 + 3) <= matmuls["eager"]


@pytest.mark.long
def test_selective_graphs_save_products_and_run_none_of_them_again():
    saved, matmuls = {}, {}
    for recompute in (True, "selective", False):
        engine = make(stage=0, dropout=0.0, recompute=recompute, **COMPILED)
        train_step(engine, 0)
        saved[recompute] = _saved_nbytes(engine)
        loss = engine(torch.zeros(BATCH, SEQ, dtype=torch.long), torch.zeros(BATCH, SEQ, dtype=torch.long))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.backward(loss)
        matmuls[recompute] = sum(event.name in ("aten::mm", "aten::addmm") for event in profile.events())
        engine.close()
    assert saved[True] < saved["selective"] < saved[False]
    assert matmuls["selective"] == matmuls[False] == LAYERS * 4 * 2 < matmuls[True]


@pytest.mark.long
def test_blocks_that_are_recomputed_in_different_ways_have_graphs_of_their_own():
    kept = _graphs_and_losses(stage=3)[1]
    graphs, losses = _graphs_and_losses(stage=3, recompute=Recompute(1, 2), **COMPILED)
    assert losses == kept and graphs == [3] * 4


def _offloaded(settings: dict[str, Any]) -> None:
    kept = _graphs_and_losses(stage=3, recompute=True, **settings)[1]
    engine = make(stage=3, offload="activations=cpu", **settings)
    losses = [each for step in range(4) for each in train_step(engine, step)]
    assert losses == kept
    moved = engine.tiers.traffic
    assert engine.activations.stack.nbytes().get("dram", 0) >= LAYERS * CHECKPOINT, moved
    engine.close()


@pytest.mark.long
@pytest.mark.parametrize("settings", [COMPILED, {}], ids=["compiled", "eager"])
def test_checkpoints_of_compiled_blocks_go_to_their_tier_and_change_no_number(settings):
    run_ranks(2, _offloaded, settings, seconds=300)


@pytest.mark.long
def test_dropout_of_compiled_blocks_is_the_same_when_recomputed():
    runs = [_graphs_and_losses(stage=2, recompute=recompute, **COMPILED)[1] for recompute in (True, False)]
    assert runs[0] == runs[1]


# -- failures ----------------------------------------------------------------------------------------------------------


def _broken(graph, inputs):
    raise RuntimeError("no such instruction\nsecond line")


def _broken_backward(graph, inputs):
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    return aot_autograd(fw_compiler=boxed_nop, bw_compiler=_broken)(graph, inputs)


@pytest.mark.parametrize(
    ("backend", "recompute"),
    [
        (_broken, False),
        pytest.param(_broken_backward, True, marks=pytest.mark.long),
        pytest.param(_broken_backward, False, marks=pytest.mark.long),
    ],
)
def test_blocks_that_cannot_be_compiled_run_eagerly_with_one_line(backend, recompute):
    name = f"zerocli_test{backend.__name__}"
    if name not in torch._dynamo.list_backends(None):
        torch._dynamo.register_backend(backend, name=name)
    expected = _graphs_and_losses(stage=3, recompute=recompute)[1]
    engine = make(stage=3, recompute=recompute, compile=True, compile_backend=name)
    assert [each for step in range(4) for each in train_step(engine, step)] == expected
    [note] = engine.hooks.blocks.notes
    assert note == "Block runs eagerly, it cannot be compiled: RuntimeError: no such instruction"
    engine.close()


@pytest.mark.long
def test_an_error_of_the_block_itself_is_raised_and_does_not_end_its_compilation():
    engine = zerocli.shard(Numbered(2), **COMPILED)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine(torch.randn(4, 9))
    engine.backward(engine(torch.randn(4, 8)))
    engine.step()
    assert engine.hooks.blocks.notes[0].startswith("compiled 2 blocks")
    engine.close()


# -- the choice --------------------------------------------------------------------------------------------------------


def test_auto_compiles_long_runs_on_a_gpu_only(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("zerocli.machine.missing_compiler", lambda on_gpu: "")
    assert choose_compile("auto", cpu, 24, 1000) == (False, "CPU")
    assert choose_compile("auto", cuda, 24, 1000) == (True, "CUDA, 24 equal blocks, 1000 steps")
    assert choose_compile("auto", cuda, 24, 100) == (False, "100 steps, fewer than 200")
    assert choose_compile("auto", cuda, 24, 0) == (False, "number of steps not known")
    assert choose_compile("auto", cuda, 0, 1000) == (False, "no repeated blocks")
    assert choose_compile(True, cpu, 24, 0) == (True, "as asked")
    assert choose_compile(False, cuda, 24, 1000) == (False, "as asked")
    with pytest.raises(ValueError, match="'maybe' is not one of auto, True, False"):
        choose_compile("maybe", cpu, 24, 0)


def test_without_a_compiler_blocks_run_eagerly(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = make(compile=True)
    assert not engine.hooks.blocks.on
    assert engine.hooks.blocks.reason == "there is no C++ compiler (g++, or CXX)"
    assert train(engine, 1)
    engine.close()


# -- models and users' own compilation ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("sharded", [False, True])
def test_a_users_own_compilation_leaves_the_loss_out(monkeypatch, sharded):
    forward, compiling = loss._LinearCrossEntropy.forward, []

    def watched(ctx, *args):
        compiling.append(torch.compiler.is_compiling())
        return forward(ctx, *args)

    monkeypatch.setattr(loss._LinearCrossEntropy, "forward", staticmethod(watched))
    torch.manual_seed(0)
    model = build(ModelConfig(layers=2, hidden=HIDDEN, heads=2, vocab=64), SEQ, "cpu")
    if sharded:
        zerocli.shard(model, units=model.unit_modules())
    tokens = torch.randint(0, 64, (BATCH, SEQ))
    expected = model(tokens, tokens).item()
    assert torch.compile(model, backend="aot_eager")(tokens, tokens).item() == expected
    assert compiling == [False, False]


@pytest.mark.parametrize(
    "settings", [pytest.param({"stage": 0}, marks=pytest.mark.long), {"stage": 3, "recompute": True}], ids=str
)
def test_llama_of_transformers_is_one_graph_although_it_gives_each_block_a_cache(settings):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 10, "num_attention_heads": 2}
    results = []
    for extra in ({}, COMPILED):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape)
        assert config.use_cache
        engine = zerocli.shard(transformers.LlamaForCausalLM(config), **settings, **extra)
        losses = []
        for _ in range(3):
            tokens = torch.randint(0, 64, (2, 16))
            out = engine(input_ids=tokens, labels=tokens)
            engine.backward(out.loss)
            engine.step()
            losses.append(out.loss.item())
        results.append(losses)
        assert engine.hooks.blocks.num_graphs == (1 if extra else 0)
        with torch.no_grad():  # a cache that is needed is filled
            assert engine(input_ids=tokens).past_key_values.get_seq_length() == 16
        engine.close()
    assert results[0] == results[1]


@pytest.mark.long
def test_inductor_compiles_equal_blocks_once_and_nearly_the_same_numbers():
    for recompute in (False, True):
        expected = _graphs_and_losses(stage=3, dropout=0.0, recompute=recompute)[1]
        graphs, losses = _graphs_and_losses(stage=3, dropout=0.0, recompute=recompute, compile=True)
        assert graphs == [1] * 4
        assert losses == pytest.approx(expected, rel=1e-5)
        runs = [_graphs_and_losses(stage=3, recompute=recompute, compile=True)[1] for _ in range(2)]
        assert runs[0] == runs[1]
