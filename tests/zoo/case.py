"""A case of the zoo: a training program, and at each variant either the numbers of plain torch or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage2-cpu": {"stage": 2, "offload": "cpu"},
    "stage3-cpu": {"stage": 3, "offload": "cpu"},
    "stage3-nvme": {"stage": 3, "offload": "nvme"},
}
"""What the cases run under, by name: settings of `zerocli.shard`."""

QUICK = ("stage3",)
"""The variants that every case runs under in the short suite; the long one has all."""


@dataclass(frozen=True)
class Expected:
    """What must come of a case: the numbers of plain torch, a refusal that contains `words`, or either of them."""

    exact: bool
    refused: bool
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        outcomes = ["exact"] * self.exact + [f"refused with {', '.join(self.words) or 'any words'}"] * self.refused
        return " or ".join(outcomes)

    def admits(self, outcome: str, text: str) -> bool:
        """Return whether a run that ended as `outcome` ("exact", "refused", ...) with `text` is as expected."""
        if outcome == "refused":
            return self.refused and all(word in text for word in self.words)
        return outcome == "exact" and self.exact


EXACT = Expected(True, False)


def refused(*words: str) -> Expected:
    """Expect `zerocli.Refused` with a message that contains every word."""
    return Expected(False, True, words)


def either(*words: str) -> Expected:
    """Expect the numbers of plain torch, or a refusal that contains every word."""
    return Expected(True, True, words)


@dataclass(frozen=True)
class Case:
    """One training program. `program(run)` builds, shards and trains; see `trainers.Run`."""

    name: str
    program: Callable[[Any], None]
    below3: Expected
    """At the stages where parameters stay whole: 0, 1 and 2."""
    at3: Expected
    """At stage 3, offloaded or not."""
    quick: tuple[str, ...]
    """Variants of the short suite."""
    tolerance: float
    """Largest difference, relative to the largest value of what is compared."""
    needs: tuple[str, ...]
    """Packages without which the case is skipped."""
    gpu: bool
    """Whether it is one of the cases that run on a GPU too."""

    def expected(self, variant: str) -> Expected:
        return self.at3 if VARIANTS[variant]["stage"] == 3 else self.below3


CASES: dict[str, Case] = {}


def case(
    name: str,
    *,
    below3: Expected = EXACT,
    at3: Expected = EXACT,
    also: tuple[str, ...] = (),
    tolerance: float = 1e-5,
    needs: tuple[str, ...] = (),
    gpu: bool = False,
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter a program into the zoo; `also` names other variants of interest, of which the short suite has stage 1."""

    def enter(program: Callable[[Any], None]) -> Callable[[Any], None]:
        assert name not in CASES, name
        quick = tuple(variant for variant in VARIANTS if variant in QUICK or (variant == "stage1" and variant in also))
        CASES[name] = Case(name, program, below3, at3, quick, tolerance, needs, gpu)
        return program

    return enter


def trained(
    name: str,
    make: Callable[[], Any],
    batch: Callable[[Any, int], Any] | None = None,
    steps: int = 3,
    settings: Mapping[str, Any] | None = None,
    **about: Any,
) -> None:
    """Enter the plainest program: shard what `make` builds, train it for `steps`, compare a last evaluation."""

    @case(name, **about)
    def program(run: Any) -> None:
        trainer = run.shard(make, **(settings or {}))
        run.train(trainer, steps, batch)
