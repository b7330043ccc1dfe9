"""`TierSet`: the tiers one rank uses, opened when first needed and closed together."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.placement import ACTIVATIONS, HBM, Placement
from offload.verify import Verifier
from tiers.base import Tier
from tiers.events import SILENT, TierEvents
from tiers.limits import read_limits
from tiers.registry import open_tier

CACHE = "cache"
"""The kind of copies, in host memory, of data on slower tiers."""


class TierSet:
    """Opens tiers by name; resources that a node's ranks share (host memory, disks) are divided among them."""

    def __init__(
        self,
        ranks_per_node: int,
        device: torch.device,
        nvme_path: Sequence[str] = (),
        options: Mapping[str, Mapping[str, Any]] | None = None,
        verify: bool = False,
        events: TierEvents = SILENT,
    ) -> None:
        self._device, self._events = device, events
        self._ranks_per_node = ranks_per_node
        self._nvme_path = tuple(nvme_path)
        self._options = dict(options or {})
        self._open: dict[tuple[str, str], Tier] = {}
        self._peaks: Counter[tuple[str, str]] = Counter()
        """Peak bytes of the tiers that `close_unused` has closed."""
        self.traffic: Counter[str] = Counter()
        """Bytes moved by kind and direction, such as `optimizer read`."""
        self.verifier = Verifier(verify)
        """Compares what is read with what was written, if requested."""

    def open(self, name: str, kind: str, **fixed: Any) -> Tier:
        """Return the tier for a kind of state, opening it the first time, with these options if any are fixed.

        Parameters have their own tier object, and so their own queue on a disk: the next forward's parameters must not
        queue behind all the states of the update. The same holds for activations.
        """
        key = (name, kind if kind in ("parameters", ACTIVATIONS, CACHE) else "states")
        if key not in self._open:
            options = {**self._options.get(name, {}), **fixed}
            if name == "nvme":
                options.setdefault("paths", self._nvme_path or (os.getcwd(),))
            elif name == HBM:
                options.setdefault("device", self._device)
            elif name == "dram":
                options.setdefault("capacity", self.available(name))
            self._open[key] = open_tier(name, **options)
            self._open[key].events = self._events
        return self._open[key]

    def open_cache(self, nbytes: int) -> Tier:
        """Return the host memory tier for copies of data on slower tiers, opened the first time with `nbytes`."""
        return self.open("dram", CACHE, capacity=nbytes)

    def available(self, name: str) -> int | None:
        """Return the bytes that this rank may put on a tier, None if unknown."""
        if name == "dram":
            return read_limits().available // self._ranks_per_node
        if name == "nvme":
            disks: dict[int, int] = {}
            for path in self._nvme_path or (os.getcwd(),):
                if os.path.isdir(path):
                    disks[os.stat(path).st_dev] = shutil.disk_usage(path).free
            return sum(disks.values()) // self._ranks_per_node if disks else None
        return None

    def opened(self) -> list[Tier]:
        """Return the open tiers, in the order they were opened."""
        return list(self._open.values())

    def name_of(self, tier: Tier) -> str:
        """Return the name under which an open tier was opened."""
        return next((name for (name, _), opened in self._open.items() if opened is tier), tier.name)

    def addressable(self) -> frozenset[str]:
        """Return the names of open tiers whose memory the CPU can access directly."""
        return frozenset(name for (name, _), tier in self._open.items() if tier.addressable)

    def used(self, name: str) -> int:
        """Return the peak bytes in use on a tier."""
        peaks = self._peaks | Counter({key: tier.peak for key, tier in self._open.items()})
        return sum(peak for (opened, _), peak in peaks.items() if opened == name)

    def footprint(self) -> dict[str, int]:
        """Return the bytes that each open tier has taken from the machine."""
        taken: Counter[str] = Counter()
        for (name, _), tier in self._open.items():
            taken[name] += tier.footprint
        return dict(taken)

    @property
    def notes(self) -> list[str]:
        """What the open tiers found and decided, one line each."""
        found = {name: tier.describe() for (name, _), tier in self._open.items()}
        return [f"{name}: {line}" for name, line in found.items()]

    def close_unused(self) -> None:
        """Close the tiers that hold nothing, and return the free memory of the others to the machine."""
        for key, tier in list(self._open.items()):
            if tier.used:
                tier.trim()
                continue
            self._peaks[key] = max(self._peaks[key], tier.peak)
            tier.close()
            del self._open[key]

    def close(self) -> None:
        for tier in self._open.values():
            tier.close()
        self._open.clear()


def shortage(placement: Placement, needed: Mapping[str, int], tiers: TierSet) -> list[tuple[str, int, int]]:
    """Return (tier, bytes needed, bytes available) for each tier of the placement with too little space."""
    found = []
    for name in placement.tiers:
        there = tiers.available(name)
        if name != HBM and there is not None and needed.get(name, 0) > there:
            found.append((name, needed[name], there))
    return found
