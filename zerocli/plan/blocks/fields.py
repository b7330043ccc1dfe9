"""`Fields`: reads the numbers of a Hugging Face config and checks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerocli.config.hub import MAX_LAYERS as MAX_LAYERS
from zerocli.config.hub import MAX_SIZE
from zerocli.errors import ConfigError, Problem, quote


class NoFormula(ConfigError):
    """A config of a family with a formula has parameters that the formula does not count."""


class Fields:
    """Reads and validates the fields of a config; collects every problem with its place in the file."""

    def __init__(self, values: Mapping[str, Any], places: Mapping[str, str], path: str) -> None:
        self._values, self._places, self._path = values, places, path
        self.problems: list[Problem] = []
        self.hint = ""
        """What to do about the problems."""
        self.uncounted: list[Problem] = []
        """Fields with a value for which the family has no formula; transformers may build the model."""

    def whole(self, name: str, default: int, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number, or the family's default if it is absent or null."""
        value = self._values.get(name)
        if value is None:
            if default > most:
                fact = f"{name} is missing, and the family's default {default} is more than {most}"
                self.refuse(name, fact, hint=f"give {name} in {self._path}")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, f"{name} {quote(value)} is not a whole number")
            return least
        if not least <= value <= most:
            self.refuse(name, f"{name} {quote(value)} is not between {least} and {most}")
            return least
        return value

    def is_null(self, name: str) -> bool:
        """Whether the config has this field and says null: there is no such part, where absent means the default."""
        return name in self._values and self._values[name] is None

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"{name} {quote(value)} is not true or false")
            return default
        return value

    def wholes(self, name: str) -> tuple[int, ...]:
        """Return a list of whole numbers; empty if it is absent."""
        value = [] if self._values.get(name) is None else self._values[name]
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            self.refuse(name, f"{name} {quote(value)} is not a list of whole numbers")
            return ()
        return tuple(value)

    def divides(self, part: str, whole: str, parts: int, total: int) -> None:
        """Refuse a number of parts that does not divide the whole: transformers may build such a model, not run it."""
        if total % parts:
            told, hint = f"{part} {parts}", ""
            if self._values.get(part) is None:
                told, hint = f"{part} is missing, and the family's default {parts}", f"give {part} in {self._path}"
            self.refuse(part, f"{told} does not divide {whole} {total}", hint)

    def fixed(self, name: str, value: object) -> None:
        """Collect a field that has another value than the only one that the family's formula knows."""
        given = self._values.get(name)
        if given is not None and given != value:
            place = self._places.get(name, self._path)
            self.uncounted.append(Problem(place, f"{name} {quote(given)} is not counted by the family's formula"))

    def refuse(self, name: str, fact: str, hint: str = "") -> None:
        """Collect a problem with this field, and what to do about it."""
        self.hint = hint or self.hint
        self.problems.append(Problem(self._places.get(name, self._path), fact))
