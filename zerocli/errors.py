"""Errors that are shown to a user: the fact, the numbers, the next command; never a traceback."""

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

OK = 0
FAILURE = 1
USAGE = 2
DOES_NOT_FIT = 3
PREEMPTED = 75
"""Ended early, on request, after saving: the same command with `--resume` goes on."""
INTERRUPTED = 130


class UserError(Exception):
    """Something the user can act on; `exit_code` is the program's, `hint` the command to try next."""

    def __init__(self, *lines: str, hint: str = "", exit_code: int = USAGE):
        super().__init__(*lines)
        self.lines = tuple(lines)
        self.hint = hint
        self.exit_code = exit_code

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def render(self) -> str:
        """Return the text to print: the message lines, then `try: ...` when there is a hint."""
        return "\n".join([*self.lines, f"try: {self.hint}"] if self.hint else self.lines)


class ShownElsewhere(UserError):
    """An error that another rank shows: this rank ends with its exit code, and shows nothing."""


class WrongValue(ValueError):
    """A wrong argument; `hint` is what to try on the command line."""

    def __init__(self, message: str, hint: str):
        super().__init__(message)
        self.hint = hint


def user_error(error: ValueError) -> UserError:
    """Return a wrong argument as a user's error, with its hint if it has one."""
    return UserError(str(error), hint=getattr(error, "hint", ""))


class Refused(RuntimeError):
    """Something that sharding cannot do exactly, refused before it gives a wrong number; says what to do instead."""

    latest: ClassVar[tuple[type["Refused"], tuple[Any, ...]] | None] = None
    """The class and the words of the last refusal made in this process; kept without its traceback and its frames."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        Refused.latest = type(self), words


def raise_caught(before: object) -> None:
    """Raise the last refusal again if it was made since `Refused.latest` was `before`: a model's code has caught it."""
    latest = Refused.latest
    if latest is not before and latest is not None:
        kind, words = latest
        raise kind(*words)


class RefusedValue(Refused, ValueError):
    """An argument that sharding cannot do exactly: both a refusal and a wrong value."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: where it stands, what is wrong, what was probably meant."""

    place: str
    fact: str
    suggestion: str = ""
    hint: str = ""
    """What to try on the command line."""

    def __str__(self) -> str:
        meant = f"; did you mean {self.suggestion}?" if self.suggestion else ""
        return f"{self.place}: {self.fact}{meant}"


class ConfigError(UserError):
    """All the problems of a config at once, a line each."""

    def __init__(self, problems: Sequence[Problem], hint: str = ""):
        super().__init__(*map(str, problems), hint=hint)
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        # multiprocessing's pickle would otherwise call us with the message lines.
        return type(self), (self.problems, self.hint)


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that `word` was probably meant to be, or an empty string."""
    matches = difflib.get_close_matches(word.lower()[:100], list(known), n=1, cutoff=0.6)
    return matches[0] if matches else ""


def quote(value: object, limit: int = 60) -> str:
    """Return `value` as one would write it in a file, cut to about `limit` characters; never raises."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # Dates, integers of thousands of digits, nested beyond reason.
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."
