"""Laws of `defer_update`: no number changes, and forward starts before the updates of later units are issued."""

from __future__ import annotations

import pytest
import torch
from lengths import LONG
from ranks import run_cases
from small_gpt import make, train_step

import zerocli

CASES = [
    {"stage": 1, "offload": "optimizer=cpu"},
    {"stage": 2, "offload": "optimizer=hbm:200KiB+cpu"},
    {"stage": 3, "offload": "optimizer=cpu"},
    {"stage": 2, "offload": "", "accumulate": 2},
]
STREAM = {"update": "stream", "staging_nbytes": 96000}


def _trained(settings: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = make(**STREAM | settings)
    losses = [loss for step in range(3) for loss in train_step(engine, step)]
    state = engine.state_dict()  # right after a step, whose updates may not all be issued
    engine.close()
    return losses, state


@pytest.mark.longer
def test_deferring_the_update_changes_no_number():
    cases = [
        ({**each, "defer_update": deferred},) for each in (CASES if LONG else CASES[1:3]) for deferred in (False, True)
    ]
    results = [each[0] for each in run_cases(2, _trained, cases)]
    results += [_trained(*case) for case in cases[: 4 if LONG else 0]]
    for (losses, state), (others, other) in zip(results[::2], results[1::2], strict=True):
        assert losses == others
        assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("deferred", [False, True])
def test_forward_begins_before_all_updates_are_issued(deferred):
    """Of resident parameters with offloaded states; without deferring, step() issues all updates."""
    engine = make(stage=1, offload="optimizer=cpu", defer_update=deferred, **STREAM)
    train_step(engine, 0)
    owed = [engine.updater.has_pending_update(flat) for flat in engine.trainable()]
    assert owed == [deferred] * len(owed)
    last, seen = engine.units[-1].trainable[0], []
    engine.units[1].module.register_forward_pre_hook(
        lambda module, args: seen.append(engine.updater.has_pending_update(last))
    )
    train_step(engine, 1)
    assert seen == [deferred]
    engine.close()


@pytest.mark.parametrize("stage", [1, 2])
def test_tensors_on_parameters_are_refused_while_their_update_is_under_way(stage, tmp_path):
    """Those that were taken before the step, which no guard of the parameter itself sees."""
    engine = make(stage=stage, offload="optimizer=cpu", defer_update=True, **STREAM)
    model = engine.model
    taken = [p.data for p in model.parameters()], [p.detach() for p in model.parameters()], model.state_dict()
    for step in range(2):
        train_step(engine, step)
        for kept in (taken[0][0], taken[1][-1], next(iter(taken[2].values()))):
            with pytest.raises(zerocli.Refused, match=r"defer_update=True: call engine.synchronize\(\) first"):
                kept.mul_(0.5)
        with pytest.raises(zerocli.Refused, match="is used before its update is done"):
            torch.save(taken[2], tmp_path / "weights.pt")
        with pytest.raises(zerocli.Refused, match="before load_state_dict"):
            engine.units[-1].module.load_state_dict({})
        engine.synchronize()
        values = engine.state_dict()
        for (name, _), kept in zip(model.named_parameters(), taken[0], strict=True):
            assert type(kept) is torch.Tensor and torch.equal(kept, values[name])
        taken[0][0].mul_(0.5)
        assert torch.equal(next(model.parameters()), taken[0][0])
    train_step(engine, 2)
    engine.close()
    assert torch.equal(next(model.parameters()), taken[0][0])


def test_a_view_from_before_shard_is_refused_while_its_update_is_under_way():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    kept = model[1].weight.detach().view(-1)
    engine = zerocli.shard(model, stage=1, offload="optimizer=cpu", defer_update=True, device="cpu", **STREAM)
    engine.backward(engine(torch.randn(4, 8)).sum())
    engine.step()
    with pytest.raises(zerocli.Refused, match="the memory of 1.weight"):
        kept.norm()
    engine(torch.randn(4, 8))
    assert torch.equal(kept, model[1].weight.detach().view(-1))
    engine.close()
