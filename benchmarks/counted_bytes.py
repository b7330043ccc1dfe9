"""Observers that count one rank's bytes when its run ends, for `measured_bytes`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from typing import Any

import torch

from tiers.pages import resident_nbytes
from zerocli.engine.engine import Engine
from zerocli.layout.sizes import format_bytes
from zerocli.profile import places
from zerocli.profile.document import predict
from zerocli.profile.nvml import process_nbytes
from zerocli.profile.observer import Observer, facts
from zerocli.profile.profiler import Profiler


class Counting(Observer):
    """Counts by the operating system and the driver; `found` has the result."""

    found: dict[str, Any]

    def __init__(self, others: int = 0) -> None:
        super().__init__()
        self._others = others
        """Bytes of the GPU that other processes use."""
        self._outside: dict[str, int] = {}
        """What the driver counts beyond the allocator's bytes, by moment."""
        self._seen: dict[str, int] = {}
        """The peak of resident memory, by moment."""
        self._base = 0

    def build(self, make: Callable[[], Engine]) -> Engine:
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
            self._note("context")
        free_unused()
        if not torch.cuda.is_available():
            places.forget_rss_peak()
        self._base = places.rss()[0]
        engine = super().build(make)
        self._note("built")
        step = engine.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            done = step(*args, **kwargs)
            self._note(f"step {len(self._seen)}")
            return done

        engine.step = stepped  # type: ignore[method-assign]
        return engine

    def _note(self, moment: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self._outside[moment] = self._taken_by_driver() - torch.cuda.memory_reserved()
        if moment != "context":
            self._seen[moment] = places.rss()[1]

    def _taken_by_driver(self) -> int:
        mine = process_nbytes(torch.device("cuda", torch.cuda.current_device()))
        free, total = torch.cuda.mem_get_info()
        return mine if mine is not None else total - free - self._others

    def report(self, config: Any, options: Any, engine: Engine, lines: Any) -> None:
        about, rss = facts(engine), places.rss()[1]  # planning takes memory too
        plan, problem = predict(config, about)
        if plan is None:
            raise RuntimeError(problem)
        tiers = [row for row in plan.rows if row.tier == "dram" and row.category != "runtime"]
        memory = list(places.host_memory(engine))
        self.found = {
            "plan": {tier: plan.needed(tier) for tier in ("hbm", "dram", "nvme")}
            | {"tiers": sum(row.nbytes for row in tiers), "moment": plan.moment},
            "hbm": self.peak(),
            "rss_peak": rss,
            "seen": self._seen,
            "base": self._base,
            "tiers": sum(map(resident_nbytes, memory)),
            "mapped": sum(each.nbytes for each in memory),
            "nvme": sum(tier.file_nbytes for tier in engine.tiers.opened()),
            "rows": [[row.category, row.tier, row.nbytes, row.formula] for row in plan.rows],
            "recompute": about["recompute"].policy,
            "holders": self.holders(),
            "update_on_cpu": about["update_on_cpu"],
        }
        if about["device"] == "cuda":
            self.found |= {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "planned_allocated": plan.allocated,
                "outside": self._outside,
                "pinned": places.pinned_nbytes(engine),
                "said": f"{format_bytes(self._taken_by_driver())} by the driver",
            }

    def holders(self) -> list[Any]:
        """Return what was live at the peak, where tensors are followed."""
        return []

    def peak(self) -> int:
        """Return the most bytes of the GPU that the driver counted; 0 without a GPU."""
        if not torch.cuda.is_available():
            return 0
        self._note("end")
        return torch.cuda.max_memory_reserved() + max(self._outside.values())


class Following(Counting, Profiler):
    """Counts live tensors on CPU ranks, operation by operation."""

    def report(self, config: Any, options: Any, engine: Engine, lines: Any) -> None:
        self.detach()
        super().report(config, options, engine, lines)

    def holders(self) -> list[Any]:
        peak = self.ledger.peak()
        return [peak.moment, dict(peak.rows), peak.holders]

    def peak(self) -> int:
        return self.ledger.peak().nbytes


def free_unused() -> None:
    """Collect garbage, and return freed memory to the operating system."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
