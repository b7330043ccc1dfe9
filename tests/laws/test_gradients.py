"""Laws of memory that comes and goes: gradients exist from backward to the update; a closed engine holds nothing."""

from __future__ import annotations

import pytest
import torch
from deep import WIDTH, Deep, live_nbytes
from ranks import run_cases
from toys import train_uneven

import zerocli

SOME = [
    {"stage": 1, "precision": "bf16", "accumulate": 2},
    {"stage": 2, "offload": "grads=hbm:2KB+cpu,optimizer=cpu", "update": "cpu", "reduce": "fp32"},
    {"stage": 3, "precision": "bf16", "offload": "optimizer=cpu", "update": "stream", "staging_nbytes": 48000},
]
MORE = [{"stage": 0}, {"stage": 2, "precision": "bf16"}, {"stage": 3, "accumulate": 3}]


def _train(settings: dict) -> list[list[float]]:
    return [train_uneven(steps=3, keep_gradients=keep, **settings) for keep in (True, False)]


@pytest.mark.parametrize("cases", [SOME, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_freeing_gradients_changes_no_number(cases):
    for settings, ranks in zip(cases, run_cases(2, _train, [(settings,) for settings in cases]), strict=True):
        for kept, freed in ranks:
            assert kept == freed, settings


def _zeroed(zero: bool, **settings: object) -> list[float]:
    torch.manual_seed(3)
    model, losses = Deep(4), []
    settings |= {"precision": "bf16", "keep_gradients": False, "lr": 0.01}
    engine = zerocli.shard(model, offload="optimizer=cpu", update="stream", staging_nbytes=48000, **settings)
    for _ in range(3):
        if zero:
            engine.optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if zero:
            engine.zero_grad(set_to_none=True)
    engine.close()
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_zeroing_gradients_after_a_step_leaves_its_update_what_it_reads(stage):
    """As every loop of torch's does: updates of units that the next forward has not reached are still to be made."""
    settings = {"stage": stage, "defer_update": stage == 1}
    assert _zeroed(True, **settings) == _zeroed(False, **settings)


def _held(stage: int) -> list[int]:
    model = Deep(4)
    engine = zerocli.shard(model, stage=stage, precision="bf16", keep_gradients=False)
    found = []
    for _ in range(2):
        loss = model(torch.randn(4, WIDTH))
        found.append(engine.memory()["gradients"])
        engine.backward(loss)
        found.append(engine.memory()["gradients"])
        engine.step()
    numel = sum(flat.layout.total if stage < 2 else flat.held.numel for flat in engine.trainable())
    assert found == [0, 2 * numel, 0, 2 * numel]
    engine.backward(model(torch.randn(4, WIDTH)))
    engine.zero_grad()
    return [engine.memory()["gradients"]]


def test_gradients_exist_from_backward_to_the_update():
    assert run_cases(2, _held, [(stage,) for stage in range(4)]) == [[[0], [0]]] * 4


@pytest.mark.parametrize(
    "settings",
    [{"stage": 0, "precision": "bf16"}, {"stage": 3, "precision": "bf16", "offload": "params=cpu", "recompute": True}],
    ids=["resident", "gathered"],
)
def test_a_closed_engine_holds_nothing_but_resident_parameters(settings):
    """At once, while the engine itself is still referred to."""
    model = Deep(4)
    engine = zerocli.shard(model, **settings)
    engine.backward(model(torch.randn(4, WIDTH)))
    engine.step()
    numel = sum(flat.held.numel for flat in engine.flats())
    kept = sum(flat.resident.nbytes for flat in engine.flats() if flat.resident is not None)
    held, before = sum(engine.memory().values()), live_nbytes()
    assert held >= 10 * numel + kept
    engine.close()
    assert before - live_nbytes() >= held - kept
    with pytest.raises(zerocli.Refused, match="engine is closed"):
        engine.state_dict()
    engine.close()  # again: nothing to do
    if kept:
        assert torch.isfinite(model(torch.randn(4, WIDTH).bfloat16())).all()
