"""The ledger: live bytes by category, their peak, and the moment of the peak.

A plan replays a step on it with storages that have a size but no memory. Like tensors, they live as long as they are
referenced: Python's reference counts free them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zerocli.layout.categories import CATEGORIES
from zerocli.plan.memory.arena import COMPUTE, Arenas


@dataclass
class Peak:
    """The peak of live bytes, their categories, and the moment."""

    nbytes: int = 0
    moment: str = ""
    held: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Counts allocations and frees; sizes are rounded up to `granularity`, as in the device's allocator.

    With `arenas` it also says what a CUDA allocator reserves for them, and for a `workspace` of each thread.
    """

    def __init__(self, granularity: int = 1, arenas: Arenas | None = None, workspace: int = 0) -> None:
        self._granularity, self._arenas = granularity, arenas
        self._workspace, self._multiplied = workspace, set[str]()
        self.uncounted: list[tuple[int, int]] = []
        """(address, size) in the compute stream's arena of what `add` has added."""
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self._moment = ""
        self._peak = Peak()
        self._rising = False
        """Whether what is held now is the peak, and is not noted in it yet."""
        self.without_gradients = 0
        """The peak of all other bytes."""

    @property
    def peak(self) -> Peak:
        """The peak since the phase began."""
        if self._rising:
            self._note_peak()
        return self._peak

    def _note_peak(self) -> None:
        """Note what is held, before any of it is freed or another moment begins."""
        self._rising = False
        self._peak = Peak(self.total, self._moment, dict(self.held))

    @property
    def moment(self) -> str:
        """What a step does now."""
        return self._moment

    @moment.setter
    def moment(self, moment: str) -> None:
        if self._rising:
            self._note_peak()
        self._moment = moment

    @property
    def reserved(self) -> int:
        """The bytes that an allocator has reserved until now; 0 where none is followed."""
        return self._arenas.nbytes if self._arenas is not None else 0

    def take(self, nbytes: int, category: str, stream: str = COMPUTE) -> tuple[int, int]:
        """Count an allocation; return its rounded size and its address."""
        granularity = self._granularity
        size = -(-nbytes // granularity) * granularity
        held = self.held
        held[category] += size
        total = self.total = self.total + size
        rest = total - held["gradients"]
        if rest > self.without_gradients:
            self.without_gradients = rest
        if total > self._peak.nbytes:
            self._rising = True
            self._peak.nbytes = total
        return size, self._arenas.take(size, stream) if self._arenas is not None and size else 0

    def give(self, size: int, address: int, category: str, stream: str = COMPUTE) -> None:
        """Count the free of what `take` returned."""
        if self._rising:
            self._note_peak()
        self.held[category] -= size
        self.total -= size
        if self._arenas is not None and size:
            self._arenas.give(address, size, stream)

    def multiply(self, thread: str) -> None:
        """Follow a matrix product: the first one of a thread allocates cuBLAS's workspace, which is no category's."""
        if self._arenas is not None and thread not in self._multiplied:
            self._multiplied.add(thread)
            self._arenas.take(self._workspace)

    def rounded(self, nbytes: int) -> int:
        """Return the bytes that an allocation of `nbytes` takes."""
        return -(-nbytes // self._granularity) * self._granularity

    def since(self, before: Mapping[str, int], times: int) -> dict[str, int]:
        """Return `times` the change by category since `before` was held."""
        return {category: times * (nbytes - before[category]) for category, nbytes in self.held.items()}

    def add(self, change: Mapping[str, int], sign: int = 1) -> None:
        """Add a change of what is held, by category; the peak is not looked at."""
        before = self.total
        if self._rising:
            self._note_peak()
        for category, nbytes in change.items():
            self.held[category] += sign * nbytes
            self.total += sign * nbytes
        if self._arenas is not None:
            self._reserve(self.total - before)

    def _reserve(self, change: int) -> None:
        """Follow a change that `add` made in the arenas, as one allocation, or as frees of earlier ones."""
        assert self._arenas is not None
        while change < 0 and self.uncounted:
            address, size = self.uncounted.pop()
            self._arenas.give(address, size)
            change += size
        if change > 0:  # an increase, or what was freed beyond the change
            self.uncounted.append((self._arenas.take(change), change))

    def begin(self, moment: str) -> None:
        """Start a phase; its peak starts at the bytes that are live now."""
        self.moment = moment
        self._peak = Peak(self.total, moment, dict(self.held))


class Storage:
    """A size without memory; its free is counted when the last reference is dropped."""

    __slots__ = ("_category", "_ledger", "_size", "_stream", "address", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int, category: str = "activations", stream: str = COMPUTE) -> None:
        self.nbytes = nbytes
        self._ledger, self._category, self._stream = ledger, category, stream
        self._size, self.address = ledger.take(nbytes, category, stream)

    def __del__(self) -> None:
        if hasattr(self, "address"):  # an interrupt may come before it is counted
            self._ledger.give(self._size, self.address, self._category, self._stream)
