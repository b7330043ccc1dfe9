"""Law: any model and any training loop gives the numbers of plain torch, or a refusal in clear words."""

from __future__ import annotations

import os

import pytest
from zoo.case import VARIANTS
from zoo.cases import CASES
from zoo.server import Server, failure, missing_package

RUNS = [
    (name, variant)
    for name, case in CASES.items()
    for variant in (VARIANTS if "ZEROCLI_TEST_LONG" in os.environ else case.quick)
]


@pytest.fixture(scope="module")
def server():
    ranks = Server()
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(("name", "variant"), RUNS, ids=[f"{name}-{variant}" for name, variant in RUNS])
def test_zoo(server, name, variant):
    """Parameters, losses and gradient norms are plain torch's; what cannot be so is refused on every rank."""
    case = CASES[name]
    if missing := missing_package(case.needs):
        pytest.skip(f"{missing} is not installed")
    if message := failure(case, variant, server.run(name, variant, "cpu")):
        pytest.fail(message, pytrace=False)


def test_the_zoo_is_large():
    assert len(CASES) >= 70
