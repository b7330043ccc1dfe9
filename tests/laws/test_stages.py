"""Law: the stage never changes a number."""

from __future__ import annotations

import pytest
from ranks import run_cases
from toys import train_uneven


def losses(world: int, stages: tuple[int, ...], **settings) -> list[list[float]]:
    """Return the losses at each stage, which all ranks agree on."""
    found = run_cases(world, _train, [({"stage": stage, **settings},) for stage in stages])
    assert all(result == results[0] for results in found for result in results)
    return [results[0] for results in found]


def _train(settings):
    return train_uneven(**settings)


@pytest.fixture(scope="module")
def single() -> list[float]:
    return train_uneven(stage=0)


def test_stages_are_bit_identical_on_two_ranks(single):
    first, *others = losses(2, (0, 1, 2, 3))
    assert first[-1] < first[0]
    for stage, other in enumerate(others, 1):
        assert other == first, f"stage {stage}"
    assert first == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.long)])
def test_more_ranks_equal_to_rounding(single, world):
    for stage, found in enumerate(losses(world, (0, 1, 2, 3), steps=3)):
        assert found == pytest.approx(single[:3], rel=1e-5), f"stage {stage}"


def test_accumulation_equal_to_rounding(single):
    for stage, found in enumerate(losses(2, (0, 1, 2, 3), steps=3, accumulate=3)):
        assert found == pytest.approx(single[:3], rel=1e-5), f"stage {stage}"
