"""Errors of tiers: the fact and the numbers in one line, and a hint at what to try."""

from __future__ import annotations

import copyreg
from typing import Any


def format_nbytes(nbytes: int) -> str:
    """Return `nbytes` as readable text: `94.2 GiB`, `8 MiB`, `512 B`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}".replace(".0 ", " ")
    return f"{nbytes} B"


class TierError(Exception):
    """An operation of a tier failed; `str()` is one line for the user, `hint` says what to try."""

    def __init__(self, message: str, *, tier: str, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.path = path
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # multiprocessing pickles errors to send them; `__init__` has required keywords, so bypass it.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class TierFull(TierError):
    """There is no room for `needed` bytes; only `available` are free."""

    def __init__(
        self,
        *,
        tier: str,
        needed: int,
        available: int,
        path: str | None = None,
        reason: str | None = None,
        hint: str | None = None,
    ) -> None:
        place = f" in {path}" if path else ""
        because = f" ({reason})" if reason else ""
        numbers = f"{format_nbytes(needed)} needed, {format_nbytes(max(available, 0))} free"
        super().__init__(f"{tier} is full: {numbers}{place}{because}", tier=tier, path=path, hint=hint)
        self.needed = needed
        self.available = max(available, 0)
