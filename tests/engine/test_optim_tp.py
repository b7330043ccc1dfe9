"""Groups and left-out parameters under tensor parallelism: what one process computes; matrix rules are refused."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from split_models import BATCH, MODELS, SEQ, batch

import zerocli
from zerocli import ParamGroup
from zerocli.models import build

FROZEN = ("mlp", "norm")


def _trained(tp: int, stage: int):
    model = build(MODELS["llama"], SEQ, "meta")
    groups = [ParamGroup("embed", lr_factor=0.1), ParamGroup("head|attention", weight_decay=0.3)]
    engine = zerocli.shard(model, tp=tp, stage=stage, lr=1e-2, weight_decay=0.1, eps=1e-5, seed=3, groups=groups)
    rank, each = engine.collectives.rank, BATCH // engine.collectives.world
    for step in range(4):
        for name, parameter in model.named_parameters():
            if any(word in name for word in FROZEN):
                parameter.requires_grad_(step < 2)
        engine.backward(engine(*batch(step, slice(rank * each, (rank + 1) * each))))
        engine.step()
    whole = {name: value.tolist() for name, value in engine.state_dict().items()}
    return whole, engine.counts.by_name()


@pytest.mark.parametrize(("world", "stage"), [pytest.param(2, 0, marks=pytest.mark.long), (4, 2)])
def test_groups_and_frozen_parameters_are_those_of_one_process(world, stage):
    expected, counts = _trained(1, 2)
    assert set(counts.values()) == {2, 4}
    for found, its_counts in run_ranks(world, _trained, 2, stage):
        assert its_counts == counts
        for name, value in expected.items():
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(value), rtol=1e-3, atol=1e-5), name


def _refused():
    with pytest.raises(ValueError, match="use tp=1"):
        zerocli.shard(build(MODELS["llama"], SEQ, "meta"), "muon", lr=1e-3, tp=2)
    return True


def test_rules_on_whole_matrices_are_refused():
    assert run_ranks(2, _refused) == [True, True]
