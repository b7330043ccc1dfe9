"""`Fields`: reads the numbers of a Hugging Face config and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerocli.config.hub import MAX_LAYERS as MAX_LAYERS
from zerocli.config.hub import MAX_SIZE
from zerocli.errors import Problem, quote


class Fields:
    """Reads and validates the fields of a config; collects every problem with its place in the file."""

    def __init__(self, values: Mapping[str, Any], places: Mapping[str, str], path: str) -> None:
        self._values, self._places, self._path = values, places, path
        self.problems: list[Problem] = []

    def whole(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number, or the default if it is absent or null; without a default that is a problem."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                self._refuse(name, f"{name} is missing: without it the model's size is not known")
                return least
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(name, f"{name} {quote(value)} is not a whole number")
            return least
        if not least <= value <= most:
            self._refuse(name, f"{name} {quote(value)} is not between {least} and {most}")
            return least
        return value

    def first(self, *names: str) -> str:
        """Return the first of these names of one field that the config has; the first of all if it has none."""
        return next((name for name in names if self._values.get(name) is not None), names[0])

    def is_null(self, name: str) -> bool:
        """Whether the config has this field and says null: there is no such part, where absent means the default."""
        return name in self._values and self._values[name] is None

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(name, f"{name} {quote(value)} is not true or false")
            return default
        return value

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; empty if it is absent."""
        value = self._values.get(name) or []
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            self._refuse(name, f"{name} {quote(value)} is not a list of whole numbers")
            return ()
        return tuple(value)

    def divides(self, part: str, whole: str, parts: int, total: int) -> None:
        if total % parts:
            self._refuse(part, f"{part} {parts} does not divide {whole} {total}")

    def _refuse(self, name: str, fact: str) -> None:
        self.problems.append(Problem(self._places.get(name, self._path), fact))
