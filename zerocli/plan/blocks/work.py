"""`Work`: what some operations of one rank compute, whether formulas or a trace counted it."""

from __future__ import annotations

import operator
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Operations and bytes of one rank."""

    products: float = 0.0
    attention: float = 0.0
    """Operations, weighted: those of backward count as the forward operations that take as long."""
    moved: float = 0.0
    """Bytes of kernels that are bound by memory."""
    calls: float = 0.0
    """Operations that the host launches, as far as `host` does not have their time."""
    host: float = 0.0
    """Seconds in which the host launches it."""

    def __add__(self, other: Work) -> Work:
        return Work(*map(operator.add, vars(self).values(), vars(other).values()))

    def times(self, number: float) -> Work:
        return Work(*(number * each for each in vars(self).values()))

    def launched(self, seconds: float, nbytes: float) -> Work:
        """Return the same work with what each of its calls takes: the host's seconds, and the device's as bytes."""
        moved, host = self.moved + self.calls * nbytes, self.host + self.calls * seconds
        return Work(self.products, self.attention, moved, host=host)

    def compiled(self, moved: float, host: float) -> Work:
        """Return the work of the same operations in compiled blocks, which move a share of the bytes."""
        return Work(self.products, self.attention, self.moved * moved, host=host)
