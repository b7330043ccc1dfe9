"""Types of options that click does not have."""

from __future__ import annotations

import math
from typing import Any

import click


class Steps(click.ParamType[Any]):
    """A number of steps, a share of the run's steps below 1, or `never`, which is 0."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "never":
            return 0
        try:
            number = float(value)
            return number if 0 < number < 1 else int(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no number of steps, no share of the run below 1 and not never", param, ctx)


class FiniteRange(click.FloatRange):
    """A number within bounds; click's own range takes NaN, which no bound excludes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number
