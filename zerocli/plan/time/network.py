"""The network: seconds of a collective, by the links inside a node, the adapters between nodes, and each hop's delay.

NCCL's rings and trees. In a ring a part of the buffer passes all ranks in turn, so its delay grows with them; in a tree
it grows with the logarithm of the nodes. NCCL has trees for all-reduces only: gathers and reduce-scatters are rings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from zerocli.plan.time.hardware import Hardware

GB, MICRO = 1e9, 1e-6


@dataclass(frozen=True)
class Protocol:
    """One of NCCL's ways to pass data on: microseconds to begin and of a hop over a link and over the network, in rings
    and in trees, and the share of the bandwidth that is left for data."""

    ring: tuple[float, float, float]
    tree: tuple[float, float, float]
    share: float


PROTOCOLS = (
    Protocol((6.6, 0.6, 2.7), (6.8, 0.6, 5.0), 0.5),
    Protocol((14.0, 1.9, 4.0), (14.0, 1.25, 8.5), 120 / 128),
    Protocol((8.4, 3.4, 14.0), (8.4, 4.0, 14.0), 1.0),
)
"""LL, LL128 and Simple, with the delays that NCCL itself assumes when it chooses one (its tuning tables)."""


@dataclass(frozen=True)
class Group:
    """The ranks of a collective, `near` of them on each node; a node's groups each use the adapters of their ranks."""

    ranks: int
    near: int

    @property
    def here(self) -> int:
        """Ranks on one node."""
        return min(self.ranks, self.near)

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.here)

    def _passing(self, nbytes: float, hardware: Hardware) -> float:
        """Return the seconds in which each rank gets all of `nbytes`, of which it has its part, without delays.

        Between nodes every rank of a node uses its own network adapter, and each of the other nodes' bytes crosses
        once; inside a node they go over its links.
        """
        inside = nbytes * (self.ranks - 1) / self.ranks / (hardware.links * GB)
        between = nbytes * (self.nodes - 1) / self.nodes / (self.here * hardware.network * GB)
        return max(inside if self.here > 1 else 0.0, between)

    def gather(self, nbytes: float, hardware: Hardware, pieces: float = 1) -> float:
        """Return the seconds of all-gathers, or of reduce-scatters, of `nbytes` in this many equal pieces."""
        passing, crossings = self._passing(nbytes, hardware), self.nodes - 1

        def ring(each: Protocol) -> float:
            begin, link, network = each.ring
            delay = begin + (self.ranks - 1 - crossings) * link + crossings * network
            return pieces * delay * MICRO + passing / each.share

        return self._fastest(ring)

    def all_reduce(self, nbytes: float, hardware: Hardware, pieces: float = 1) -> float:
        """Return the seconds of all-reduces: two rings, or a tree up and down, whichever is faster."""
        passing = 2 * self._passing(nbytes, hardware)

        def tree(each: Protocol) -> float:
            begin, link, network = each.tree
            delay = begin + 2 * ((self.here - 1) * link + math.ceil(math.log2(self.nodes)) * network)
            return pieces * delay * MICRO + passing / each.share

        return min(2 * self.gather(nbytes, hardware, pieces), self._fastest(tree))

    def _fastest(self, seconds: Callable[[Protocol], float]) -> float:
        return min(map(seconds, PROTOCOLS)) if self.ranks > 1 else 0.0
