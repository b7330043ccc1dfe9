"""Law: the stage never changes a number."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from toys import train_uneven


def losses(world: int, **settings) -> list[float]:
    results = run_ranks(world, _train, settings)
    assert all(result == results[0] for result in results)
    return results[0]


def _train(settings):
    return train_uneven(**settings)


@pytest.fixture(scope="module")
def single() -> list[float]:
    return train_uneven(stage=0)


def test_stages_are_bit_identical_on_two_ranks(single):
    first = losses(2, stage=0)
    assert first[-1] < first[0]
    for stage in (1, 2, 3):
        assert losses(2, stage=stage) == first, f"stage {stage}"
    assert first == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("world", [pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.long), 2, 3])
def test_more_ranks_equal_to_rounding(single, world, stage):
    assert losses(world, stage=stage) == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_equal_to_rounding(single, stage):
    assert losses(2, stage=stage, accumulate=3) == pytest.approx(single, rel=1e-5)
