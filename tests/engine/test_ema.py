"""EMA: equal to torch's AveragedModel under every stage and placement, and the trained parameters come back exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import Uneven, split, uneven_batch

import zerocli

STEPS, DECAY = 3, 0.8
CASES = [{"stage": stage} for stage in range(4)] + [
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "precision": "bf16", "offload": "cpu"},
]


def model_of(seed: int = 7) -> Uneven:
    torch.manual_seed(seed)
    return Uneven()


def train_plain() -> tuple[dict[str, torch.Tensor], float]:
    """Train in plain torch on the joined batch; return the average and the loss with it."""
    model = model_of()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*uneven_batch(step, slice(0, 24))).backward()
        optimizer.step()
        averaged.update_parameters(model)
    with torch.no_grad():
        return averaged.module.state_dict(), averaged(*uneven_batch(99, slice(0, 24))).item()


def train(settings: dict[str, Any]) -> tuple[Any, Any]:
    model = model_of()
    engine = zerocli.shard(model, lr=1e-2, **settings)
    ema = zerocli.EMA(engine, decay=DECAY)
    ema.by_hand = {}
    for step in range(STEPS):
        rows = split(engine.collectives.rank, engine.collectives.world)
        engine.backward(model(*uneven_batch(step, rows)))
        engine.step()
        ema.update()
        for name, value in engine.state_dict().items():
            ema.by_hand[name] = value.lerp(ema.by_hand.get(name, value), DECAY)
    return engine, ema


def _averages() -> list[dict[str, Any]]:
    found = []
    for settings in CASES:
        engine, ema = train(settings)
        model, batch = engine.model, uneven_batch(99, slice(0, 24))
        with torch.no_grad():
            before, state = model(*batch).item(), engine.state_dict()
            with ema.applied():
                inside, applied = model(*batch).item(), engine.state_dict()
            after = model(*batch).item()
        again = engine.state_dict()
        found.append(
            dict(
                average=ema.state_dict(),
                by_hand=ema.by_hand,
                applied=applied,
                inside=inside,
                before=before,
                after=after,
                restored=all(torch.equal(state[name], again[name]) for name in state),
                numel=sum(part.average.numel() for part in ema._parts.values()),
                total=sum(flat.layout.total for flat in engine.trainable()),
            )
        )
        engine.backward(model(*uneven_batch(6, slice(0, 24))))
        engine.step()  # training goes on
        found[-1]["next"] = engine.state_dict()
        engine.close()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, _averages)[1]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_average_is_that_of_torch(found, case):
    expected, loss = train_plain()
    for name, value in found[case]["by_hand"].items():
        torch.testing.assert_close(found[case]["average"][name], value, rtol=1e-5, atol=1e-7)
        if "precision" not in CASES[case]:
            torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
        assert torch.equal(found[case]["applied"][name], found[case]["average"][name]), name
    assert found[case]["inside"] == pytest.approx(loss, rel=5e-2 if "precision" in CASES[case] else 1e-4)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_trained_parameters_come_back_to_the_bit(found, case):
    one = found[case]
    assert one["restored"] and one["before"] == one["after"] != one["inside"]
    assert any(not torch.equal(one["next"][name], one["applied"][name]) for name in one["next"])


def test_a_rank_keeps_its_part_alone(found):
    for settings, one in zip(CASES, found, strict=True):
        parts = 2 if settings["stage"] else 1
        assert one["numel"] == one["total"] / parts  # padding included


def _resumed(state: dict[str, torch.Tensor], stage: int) -> dict[str, torch.Tensor]:
    engine = zerocli.shard(model_of(11), stage=stage)
    ema = zerocli.EMA(engine, decay=0.5)
    ema.load_state_dict(state)
    ema.update()
    return ema.state_dict()


def test_an_average_loads_at_any_stage_and_goes_on(found):
    state, fresh = found[3]["average"], model_of(11).state_dict()
    for stage in (0, 3):
        result = run_ranks(3, _resumed, state, stage)[0]
        for name, value in result.items():
            torch.testing.assert_close(value, state[name].lerp(fresh[name], 0.5), rtol=1e-5, atol=1e-6)


def test_what_would_lose_numbers_is_refused():
    engine, ema = train({"stage": 0})
    for call in (ema.update, ema.state_dict, lambda: ema.applied().__enter__()):
        with ema.applied(), pytest.raises(RuntimeError, match="inside ema.applied"):
            call()
    with pytest.raises(RuntimeError, match="1 steps were made inside"), ema.applied():
        engine.backward(engine.model(*uneven_batch(6, slice(0, 24))))
        engine.step()
    with pytest.raises(ValueError, match="no average of"):
        ema.load_state_dict({})
    with pytest.raises(ValueError, match="between 0 and 1"):
        zerocli.EMA(engine, decay=1.5)


def _moved() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """Average a model whose flats are laid out anew: the engine's are those of another with one parameter frozen."""
    engine, ema = train({"stage": 3})
    before = ema.state_dict()
    other = model_of(11)
    other.large.requires_grad_(False)
    ema._engine = zerocli.shard(other, stage=3)
    after = ema.state_dict()
    return before, after, sum(part.average.numel() for part in ema._parts.values())


def test_an_average_follows_its_parameters_into_another_layout():
    before, after, numel = run_ranks(2, _moved)[0]
    fresh = model_of(11).state_dict()
    assert numel < 7 * 997
    for name, value in after.items():
        assert torch.equal(value, fresh[name] if name == "large" else before[name]), name


def _averaged_unequally() -> str:
    engine = zerocli.shard(model_of(), stage=1)
    ema = zerocli.EMA(engine)
    for _ in range(1 + engine.collectives.rank):
        ema.update()
    with pytest.raises(RuntimeError) as refused, ema.applied():
        pass
    return str(refused.value)


def test_ranks_apply_an_average_of_equally_many_updates():
    for said in run_ranks(2, _averaged_unequally):
        assert "ema.applied(1 updates)" in said and "ema.applied(2 updates)" in said
