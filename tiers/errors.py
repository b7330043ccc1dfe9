"""What a tier says when it cannot: the fact and the numbers in one line, and a hint at the way on."""

from __future__ import annotations

from typing import Any


def format_nbytes(nbytes: int) -> str:
    """Return `nbytes` as people read it: `94.2 GiB`, `8 MiB`, `512 B`."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}".replace(".0 ", " ")
    return f"{nbytes} B"


class TierError(Exception):
    """A tier could not do what was asked; `str()` is one line for a person, `hint` says what to try."""

    def __init__(self, message: str, *, tier: str, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.path = path
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks by pickle, which would otherwise call us with the message alone.
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[TierError], args: tuple[Any, ...], state: dict[str, Any]) -> TierError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class TierFull(TierError):
    """There is no room for `needed` bytes: `available` are there."""

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
