"""The metrics of one training step, from which profiles and reports are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zerocli.engine.engine import Engine


@dataclass(frozen=True)
class Line:
    """The metrics of one training step, over all ranks."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    tokens_per_second: float
    peak: dict[str, int]
    fragmentation: int
    """Bytes that the allocator reserved beyond the allocated peak, on the worst rank."""
    comm: dict[str, int]
    """Bytes of collectives among the ranks over which states are partitioned, by kind."""
    comm_across: dict[str, int]
    """The same among ranks that hold the same slices."""
    comm_tp: dict[str, int]
    wait: dict[str, float]
    skipped: bool
    adapted: str = ""
    """What the run changed to before this step, and why; empty for nothing."""
    slowest: dict[str, Any] | None = None
    """Of some lines: the slowest rank of the last steps, see `run/output/stragglers.py`."""

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if value or name not in ("adapted", "slowest")}


class History(list[Line]):
    """The lines of a run so far: the first and at least the newest `KEPT`; the metrics file has all of them."""

    KEPT = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def append(self, line: Line) -> None:
        super().append(line)
        self.num_steps += 1
        if len(self) > 2 * self.KEPT:
            del self[1 : self.KEPT + 1]


def device_peak(engine: Engine) -> dict[str, int]:
    """Return this rank's peak bytes by tier: the allocator's on a GPU, what the engine holds on a CPU."""
    if engine.device.type == "cuda":
        hbm = torch.cuda.max_memory_allocated(engine.device)
    else:
        hbm = sum(engine.memory().values())
    return {"hbm": hbm, "dram": engine.tiers.used("dram"), "nvme": engine.tiers.used("nvme")}


def fragmentation(engine: Engine) -> int:
    """Return the bytes reserved on the device beyond the allocated peak; 0 where no allocator counts them."""
    if engine.device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved(engine.device) - torch.cuda.max_memory_allocated(engine.device)
