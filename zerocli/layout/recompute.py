"""`Recompute`: which of a model's blocks run again in backward, and how much of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
ALL = 1 << 30
"""Stands for all blocks, or all that remain, however many there are."""


@dataclass(frozen=True)
class Recompute:
    """How blocks are recomputed in backward: the first `whole` of them, then `selective` of them in part.

    A block that is recomputed whole keeps only its input. One that is recomputed selectively also keeps the outputs of
    its matrix products and of attention, and runs only the cheap operations between them again. The blocks after those
    keep everything. Backward needs the last blocks first, so what they keep is held for the shortest time.
    """

    whole: int = 0
    selective: int = 0

    def __bool__(self) -> bool:
        return self != NOTHING

    def __str__(self) -> str:
        if not self.selective:
            return {0: "False", ALL: "True"}.get(self.whole, str(self.whole))
        words = ["all" if number == ALL else str(number) for number in (self.whole, self.selective)]
        return SELECTIVE if self == SELECTIVELY else f"{words[0]} whole and {words[1]} selective"

    @property
    def policy(self) -> str:
        """The text of `activations.policy` that means this choice: the inverse of `read_recompute`."""
        named = [name for name, choice in POLICIES.items() if choice == self]
        parts = [f"recompute:{self.whole}"] if self.whole else []
        parts += [f"{SELECTIVE}:{self.selective}"] if self.selective else []
        return named[0] if named else "+".join(parts)

    @property
    def count(self) -> int:
        """The number of blocks that are recomputed in any way: each has a checkpoint, its input."""
        return self.whole + self.selective

    def of(self, layers: int) -> Recompute:
        """Return the same choice in numbers, for a model of `layers` blocks; ValueError if it has fewer."""
        whole = layers if self.whole == ALL else self.whole
        selective = layers - whole if self.selective == ALL else self.selective
        if min(whole, selective) < 0 or whole + selective > layers:
            raise ValueError(f"recompute={self}: the model has {layers} repeated blocks")
        return Recompute(whole, selective)


SELECTIVE = "selective"
NOTHING = Recompute()
WHOLE = Recompute(ALL)
SELECTIVELY = Recompute(0, ALL)
POLICIES: dict[str, Recompute | str] = {"keep": NOTHING, SELECTIVE: SELECTIVELY, "recompute": WHOLE, AUTO: AUTO}
"""What `activations.policy` stands for. `auto` is decided by a device's memory (zerocli/plan/search/recompute.py)."""
POLICY = re.compile(rf"{'|'.join(POLICIES)}|(recompute:(?P<whole>\d+))?\+?({SELECTIVE}:(?P<selective>\d+))?")
"""The texts of `activations.policy`: a word for all blocks, or numbers of blocks such as recompute:12+selective:20."""


def read_recompute(value: Any) -> Any:
    """Return the `Recompute` that a setting means; `auto` and what only an engine knows (modules) as they are.

    True is all blocks, a number N the first N, both whole; a str is a policy. Raises ValueError for another str.
    """
    if isinstance(value, str):
        found = POLICY.fullmatch(value)
        if not value or found is None:
            raise ValueError(f"recompute={value!r}: pass True, False, 'selective', a number of blocks, or the units")
        numbers = (int(found[name] or 0) for name in ("whole", "selective"))
        return POLICIES[value] if value in POLICIES else Recompute(*numbers)
    if value is None or isinstance(value, bool):
        return WHOLE if value else NOTHING
    return Recompute(value) if isinstance(value, int) else value
