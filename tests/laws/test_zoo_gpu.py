"""The zoo's law on a GPU: two ranks that share it, over gloo."""

from __future__ import annotations

import pytest
from lengths import LONG
from zoo.cases import CASES
from zoo.server import check_case, serving

pytestmark = pytest.mark.gpu
PLACES = ("stage2", "stage3", "stage3-cpu")
ON_GPU = {name: [place for place in PLACES if place in case.quick] for name, case in CASES.items() if case.gpu}
RUNS = [
    (name, place)
    for number, (name, places) in enumerate(ON_GPU.items())
    for at, place in enumerate(places)
    if LONG or at == number % len(places)
]
"""Each case in one place by turns; in the long set in all of them."""


server = pytest.fixture(serving, scope="module")


@pytest.mark.parametrize(("name", "variant"), RUNS, ids=[f"{name}-{variant}" for name, variant in RUNS])
def test_zoo_on_a_gpu(server, name, variant):
    """What runs on CPU ranks runs on a GPU too, with the numbers of plain torch there or the same refusal."""
    check_case(server, CASES[name], variant, "cuda")


def test_the_cases_on_a_gpu_are_many():
    assert len({name for name, _ in RUNS}) >= 25
