"""`TierEvents`: what tiers report of the bytes they move, to whoever subscribes. Importing this imports no torch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiers.base import Block
    from tiers.transfer import Transfer

Scope = AbstractContextManager[Any]
"""Surrounds something that happens: entered before it, left after it."""


class _Nothing:
    """A scope that does nothing; one instance serves everybody, so that an event nobody hears costs next to nothing."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        return None


NOTHING = _Nothing()


class TierEvents:
    """Does nothing; a subscriber overrides what it wants to hear of. Events come from several threads."""

    def transfer(self, block: Block, transfer: Transfer, writes: bool, began: float) -> None:
        """Report a transfer that a tier was asked for at `began` (time.perf_counter); it may be under way or over."""

    def copy(self, direction: str, nbytes: int) -> Scope:
        """Surround the issue of a copy between host and device (up or down) on the CUDA stream that it runs on."""
        return NOTHING


SILENT = TierEvents()
"""Nobody has subscribed."""
