"""What this rank has issued and waits for: a collective, or a stage that all ranks enter. Read by a watchdog."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(eq=False)
class Issued:
    """A collective that this rank has issued: its position in the group's launch order, and its payload."""

    number: int
    kind: str
    what: str
    nbytes: int = 0
    """Bytes of the full buffer, twice that for an all-reduce; 0 for control values."""
    begun: float = field(default_factory=time.monotonic)
    pending: Any = None
    """Its completion; None while the host is still inside the call."""
    on_host: bool = False
    """Whether the host waits for it (gloo): until the host does, it is open but delays nothing."""

    @property
    def since(self) -> float:
        """When it began to delay this rank; infinity if it does not yet."""
        if self.pending is None or not self.on_host:
            return self.begun
        return self.pending.since if self.pending.since is not None else math.inf

    @property
    def over(self) -> bool:
        return self.pending is not None and self.pending.done

    def restart(self) -> None:
        """Restart the clock of its delay."""
        self.begun = time.monotonic()

    def end(self) -> None:
        """Mark it as complete."""
        self.pending = SimpleNamespace(done=True, since=None)

    def __str__(self) -> str:
        return f"{self.kind} of {self.what or 'control values'}" if self.kind else self.what
