"""Law: any model and any training loop gives the numbers of plain torch, or a refusal in clear words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lengths import ALL, LONG, THIRD
from zoo.case import EXACT, VARIANTS, Case, either, refused
from zoo.cases import CASES
from zoo.compare import differences
from zoo.refusals import table, unlisted
from zoo.server import check_case, serving

FINDERS = ("stale-list-of-a-hook", "function-keeps-attribute")
"""Cases that alone find a defect of benchmarks/defects.txt."""
OTHERS = [variant for variant in VARIANTS if variant != "stage3"]


def ways(number: int, case: Case) -> tuple[str, ...]:
    """Return the variants that a case runs under here, by its number in the zoo."""
    if ALL:
        return tuple(VARIANTS)
    if LONG:
        two = ("stage3", OTHERS[number % len(OTHERS)])
        return two if THIRD is None else two[(number + THIRD) % 3 :][:1]
    return case.quick if number % 40 == 0 or case.name in FINDERS else ()


RUNS = [(name, variant) for number, (name, case) in enumerate(CASES.items()) for variant in ways(number, case)]
"""Every 40th case and the finders, in a few ways; in the long set all of them in two, each of them in another third of
it; with ZEROCLI_TEST_LONG=all in every way."""


server = pytest.fixture(serving, scope="module")


@pytest.mark.parametrize(("name", "variant"), RUNS, ids=[f"{name}-{variant}" for name, variant in RUNS])
def test_zoo(server, name, variant):
    """Parameters, losses and gradient norms are plain torch's; what cannot be so is refused on every rank."""
    check_case(server, CASES[name], variant, "cpu")


@pytest.mark.longer
@pytest.mark.parametrize("name", ["engines-gan-of-equal-nets", "engines-chained-blocks-skipped-per-rank"])
def test_several_engines_are_exact_every_time(server, name):
    """What depends on the timing of a thread shows in one run of many."""
    for _ in range(200 if LONG else 1):
        check_case(server, CASES[name], "stage3", "cpu")


def test_no_difference_is_overlooked():
    """The comparison finds wrong, missing, extra and non-finite values, and refusals without the expected words."""
    right = {"loss #0": torch.tensor([1.0, 2.0]), "tokens #1": torch.tensor([3, 4])}
    assert differences(dict(right), right, 1e-5) == []
    assert differences(right | {"loss #0": torch.tensor([1.0, 2.0001])}, right, 1e-5)
    assert differences(right | {"loss #0": torch.tensor([1.0, float("nan")])}, right, 1e-5)
    assert differences(right | {"tokens #1": torch.tensor([3, 5])}, right, 1e-5)
    assert differences({"loss #0": right["loss #0"]}, right, 1e-5)
    assert differences(right | {"more #2": torch.zeros(1)}, right, 1e-5)
    assert refused("gathered").admits("refused", "use engine.gathered")
    assert not refused("gathered").admits("refused", "no") and not refused("gathered").admits("exact", "")
    assert either("a").admits("exact", "") and not EXACT.admits("refused", "") and not either().admits("error", "")


def test_the_list_of_what_is_refused_is_made_from_the_zoo():
    assert list(unlisted(CASES.values())) == []
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    assert f"| refused | instead |\n|---|---|\n{table()}\n" in page


def test_the_zoo_is_large():
    assert len(CASES) >= 550
