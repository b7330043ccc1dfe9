"""Laws of bytes that random configurations found missing: an update's arrays, gloo's copies, units by default."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lengths import LONG
from ranks import run_ranks

import zerocli
from zerocli.config import ModelConfig
from zerocli.engine.engine import Engine
from zerocli.engine.optimizer.rules import make_optimizer
from zerocli.engine.settings import Settings
from zerocli.engine.streams import Waits
from zerocli.engine.units.buckets import Completion, Pool
from zerocli.models import build
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.measure import LiveBytes, update_arrays
from zerocli.plan.memory.build import plan_model
from zerocli.plan.memory.flats import plan_flats
from zerocli.plan.memory.step import ROUNDING
from zerocli.plan.setup import Setup

MODEL = ModelConfig(layers=3, hidden=64, heads=4, vocab=600, tie=False)
SEQ = 8


def measured_peak(setup: dict[str, Any], model: ModelConfig = MODEL, seq: int = SEQ) -> int:
    """Return the most bytes alive at once in two steps; by default of so few tokens that the peak is in the update."""
    with LiveBytes() as live:
        decoder = build(model, seq, "meta")
        common: dict[str, Any] = {"units": decoder.unit_modules(), "device": "cpu", "clip": 1.0, "weight_decay": 0.1}
        engine = Engine(decoder, Settings(**setup, **common))
        for _ in range(2):
            tokens = torch.randint(model.vocab, (2, 1, seq))
            engine.backward(engine(tokens[0], tokens[1]))
            engine.step()
        engine.synchronize()
    engine.close()
    return live.peak


def plan(setup: dict[str, Any], world: int = 1, model: ModelConfig = MODEL, seq: int = SEQ) -> Any:
    common: dict[str, Any] = {"ranks": world, "ranks_per_node": world, "batch": 1, "seq": seq, "device": "cpu"}
    return plan_model(shape_of(model, seq), Setup(**(common | setup)))


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        ("adamw", (0, 0)),
        ("sgd", (0, 0)),
        ("adagrad", (3, 2)),
        ("rmsprop", (3, 2)),
        ("adamax", (4, 2)),
        ("nadam", (5, 3)),
    ],
)
def test_arrays_of_an_update_are_counted(name, arrays):
    """In the first update a rule of torch's makes new states too, which are copied."""
    assert update_arrays(make_optimizer(name, {})) == Setup(optimizer=name).num_temporaries == arrays


@pytest.mark.parametrize("name", ["adagrad", "nadam"])
def test_a_plan_holds_where_the_update_is_the_peak(name):
    setup = {"stage": 2, "precision": "fp32", "optimizer": name}
    peak, planned = measured_peak(setup), plan(setup)
    assert planned.moment == "update"
    assert peak <= planned.allocated <= peak * 1.01


NARROW = dataclasses.replace(MODEL, layers=2, hidden=32, vocab=96)
MUON: list[tuple[ModelConfig, dict[str, Any]]] = [
    (NARROW, {}),  # tall, wide and square matrices, embeddings and vectors
    (dataclasses.replace(NARROW, family="llama", mlp_hidden=200, tie=True), {"options": {"nesterov": False}}),
    (NARROW, {"precision": "bf16"}),
    (NARROW, {"offload": "optimizer=cpu"}),
]


def _muon_measured(cases: list[tuple[ModelConfig, dict[str, Any]]]) -> list[int]:
    torch.backends.mkldnn.set_flags(_enabled=False)  # its refusal of bf16 on old cores costs more than the matmul
    return [measured_peak({"precision": "fp32", "optimizer": "muon"} | setup, model) for model, setup in cases]


@pytest.mark.longer
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_plan_has_the_whole_matrices_of_muon(world):
    """Every rank gathers all states of a unit, and orthogonalises one matrix at a time."""
    cases = [(model, {"stage": stage} | setup) for model, setup in MUON for stage in (3, 1)]
    cases = cases if LONG else cases[:4:3]
    measured = [max(peaks) for peaks in zip(*run_ranks(world, _muon_measured, cases), strict=True)]
    for (model, setup), peak in zip(cases, measured, strict=True):
        planned = plan({"precision": "fp32", "optimizer": "muon"} | setup, world, model)
        assert planned.moment == "update"
        assert peak <= planned.allocated <= peak * 1.01, setup


@pytest.mark.parametrize("recompute", [True, False])
def test_a_plan_holds_where_scores_with_dropout_are_most_of_the_memory(recompute):
    model, setup = dataclasses.replace(MODEL, dropout=0.1), {"stage": 0, "precision": "fp32", "recompute": recompute}
    peak, planned = measured_peak(setup, model, 128), plan(setup, 1, model, 128).allocated
    assert peak <= planned <= peak * 1.01


def test_what_rounding_a_whole_master_allocates_is_known():
    from zerocli.engine.units.master import narrow

    values = torch.ones(1 << 12)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with LiveBytes() as live:
            narrow(values, dtype)
        assert live.peak == ROUNDING[precision] * values.numel()


def test_a_bucket_that_is_free_is_used_again_before_another_is_made():
    """A pass with one bucket makes one, however many passes there are: the plan counts those of a pass. One that is
    busy is used again once its reduction is complete."""
    pool = Pool(2, torch.device("cpu"), Waits(torch.device("cpu")))
    first = pool.take(8, torch.float32)
    assert pool.take(8, torch.float32) is first  # its use never began
    ended: list[str] = []
    first.busy = Completion(lambda: ended.append("the first reduction"))
    assert pool.take(8, torch.float32) is not first and len(pool.all()) == 2 and not ended
    assert pool.take(8, torch.float32) is first and ended
    pool.clear()
    pool.take(8, torch.float32)
    assert len(pool.all()) == 2


# -- gloo --------------------------------------------------------------------------------------------------------------


def _gloo_nbytes(setup: dict[str, Any], world: int) -> int:
    rows = plan(setup, world).rows
    return sum(row.nbytes for row in rows if "gloo" in row.formula) // world


def test_gloos_copies_are_host_memory_of_ranks_that_reduce_scatter():
    common = {"precision": "fp32"}
    flats = plan_flats(shape_of(MODEL, SEQ), Setup(stage=2, ranks=2, device="cpu", **common))
    two = sum(sorted((flat.total for flat in flats), reverse=True)[:2]) * 4
    assert 0 < _gloo_nbytes({"stage": 2, **common}, 2) <= two  # of the two buckets in flight
    assert 0 < _gloo_nbytes({"stage": 1, **common}, 2) <= 4 * sum(flat.total for flat in flats)
    assert _gloo_nbytes({"stage": 0, **common}, 2) == 0  # an all-reduce is in place
    assert _gloo_nbytes({"stage": 2, **common}, 1) == 0


# -- units -------------------------------------------------------------------------------------------------------------


def _default_totals(changes: dict[str, Any]) -> list[int]:
    engine = zerocli.shard(build(dataclasses.replace(MODEL, **changes), SEQ), lr=1e-3, stage=3, device="cpu")
    totals = [flat.layout.total for flat in engine.flats()]
    engine.close()
    return totals


@pytest.mark.parametrize("changes", [{}, {"tie": True}, {"layers": 1}, {"layers": 1, "family": "llama"}])
def test_units_by_default_are_those_of_the_plan(changes):
    planned = plan_flats(shape_of(dataclasses.replace(MODEL, **changes), SEQ), Setup(stage=3, ranks=1, device="cpu"))
    assert [flat.total for flat in planned] == _default_totals(changes)


def test_units_by_default_are_those_of_the_plan_on_two_ranks():
    planned = plan_flats(shape_of(MODEL, SEQ), Setup(stage=3, ranks=2, device="cpu"))
    assert run_ranks(2, _default_totals, {}) == [[flat.total for flat in planned]] * 2
