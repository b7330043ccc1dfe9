"""An in-process case: a transfer of a tier fails or moves too little in the midst of training; nothing stays behind."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

from test_checkpoint import engine_of, train
from test_tiers_dram import PretendRegistrar

from tiers.errors import TierError
from tiers.nvme import NvmeTier
from torture.disks import Calls, worker_class
from torture.faults import Fault
from torture.tally import Result

NUM_STEPS = 3
SMALL = {"workers": 2, "grow_nbytes": 1 << 20, "staging_nbytes": 1 << 20, "unit_nbytes": 1 << 16}
FAULTS = {
    "tier: read error": ("error", "read", errno.EIO),
    "tier: write error": ("error", "write", errno.EIO),
    "tier: disk full": ("error", "write", errno.ENOSPC),
    "tier: short reads": ("short", "read", 0),
    "tier: short writes": ("short", "write", 0),
    "tier: slow": ("slow", "", 0),
}
_undisturbed: dict[str, list[float]] = {}


def case(name: str, draw: random.Random, scratch: Path) -> Result:
    """Train on the nvme and dram tiers with a failing disk, and return how that went."""
    kind = draw.choice(list(FAULTS))
    act, only, number = FAULTS[kind]
    span = 0 if act == "short" else 1
    fault = Fault(kind, act, "nvme", (0,), draw.randint(1, 80), span, only, number, seconds=0.01)
    settings = {
        "stage": 3,
        "precision": draw.choice(["fp32", "bf16"]),
        "offload": draw.choice(["nvme", "params=cpu,optimizer=nvme", "optimizer=nvme"]),
        "update": draw.choice(["cpu", "stream"]),
    }
    result = Result(name, kind, f"{fault} {settings}")
    key = str(settings)
    if key not in _undisturbed:
        _undisturbed[key] = _train(settings, scratch, None, result)
    expected = _undisturbed[key]
    calls = Calls(fault, lambda: setattr(result, "struck", True))
    try:
        losses = _train(settings, scratch, calls, result)
    except TierError as error:
        result.outcome = "refused"
        if act != "error" or str(scratch) not in str(error):
            result.wrong.append(f"{error} (a {act})")
        return result
    result.outcome = "finished"
    if losses != expected:
        result.wrong.append(f"losses {losses}, undisturbed {expected}")
    return result


def _train(settings: dict[str, Any], scratch: Path, calls: Calls | None, result: Result) -> list[float]:
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    registrar = PretendRegistrar()
    options = {"nvme": {**SMALL, "registrar": registrar}, "dram": {"registrar": registrar}}
    usual = NvmeTier.worker_class
    NvmeTier.worker_class = worker_class(calls) if calls is not None else usual
    engine = None
    try:
        model, engine = engine_of({**settings, "nvme_path": (str(scratch),), "tier_options": options})
        return train(engine, model, range(1, NUM_STEPS + 1))
    finally:
        NvmeTier.worker_class = usual
        if engine is not None:
            engine.tiers.close()
        if registrar.held:
            result.leftovers.append(f"{sum(registrar.held.values())} bytes of pinned memory")
        result.leftovers += [f"swap file {path.name}" for path in scratch.iterdir()]
