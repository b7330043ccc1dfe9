"""`TierEvents`: events about the bytes that tiers move, for subscribers. Importing this imports no torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiers.base import Block
    from tiers.transfer import Transfer

Scope = AbstractContextManager[Any]
"""A context manager around an event: entered before it, left after it."""

NOTHING = nullcontext()
"""A scope that does nothing; a single shared instance, so that events without subscribers cost almost nothing."""


class TierEvents:
    """Does nothing; a subscriber overrides the events it needs. Events come from several threads."""

    def transfer(self, block: Block, transfer: Transfer, writes: bool, began: float) -> None:
        """Report a transfer that was requested at `began` (time.perf_counter); it may be in flight or done."""

    def copy(self, direction: str, nbytes: int) -> Scope:
        """Return a scope around issuing a copy between host and device (up or down), with its CUDA stream current."""
        return NOTHING


SILENT = TierEvents()
"""The default: no subscriber."""
