"""Peak rates of the hardware: matrix rates by the GPU's name, links as `zerocli env --bench` measured them.

A rate that is not known for certain is None and printed as unknown, so no percentage is based on a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TFLOPS: tuple[tuple[str, float, float], ...] = (
    # (pattern of the driver's name, dense bf16, dense fp16), from the data sheets, in TFLOPS; 0: not supported
    (r"\bGH200\b", 989, 989),
    (r"\bB200\b", 2250, 2250),
    (r"\bH200 NVL\b", 835, 835),
    (r"\bH200\b", 989, 989),
    (r"\bH100 PCIe\b", 756, 756),
    (r"\bH100 NVL\b", 835, 835),
    (r"\bH100 (80GB|SXM)", 989, 989),
    (r"\bA100[- ]", 312, 312),
    (r"\bL40S\b", 362, 362),
    (r"\bRTX 4090$", 165, 165),
    (r"\bRTX 3090$", 71, 71),
    (r"\bV100-SXM", 0, 125),
    (r"\bV100-PCIE", 0, 112),
)


def peak_tflops(gpu: str, precision: str) -> float | None:
    """Return the dense matrix rate of a GPU by its name; None for an unknown GPU, and for fp32."""
    if "MIG" in gpu or precision not in ("bf16", "fp16"):
        return None
    for pattern, bf16, fp16 in _TFLOPS:
        if re.search(pattern, gpu):
            return (bf16 if precision == "bf16" else fp16) or None
    return None


def best_links(measured: Mapping[str, Any]) -> dict[str, float]:
    """Return the best rate of each link in GB/s, by lane, as saved by `zerocli env --bench` on this machine."""
    best: dict[str, float] = {}
    for name, entry in measured.items():
        result = entry.get("result", {}) if isinstance(entry, dict) else {}
        if not isinstance(result, dict):
            continue
        keys = {"disk read": "read", "disk write": "write"}
        if name == "dram_hbm":  # without a GPU, device memory is host memory
            keys = {"host to device": "up", "device to host": "down"}
            keys = keys if "up" in result else {"host to device": "read", "device to host": "write"}
        for lane, key in keys.items():
            rate = result.get(key)
            if isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
                best[lane] = max(best.get(lane, 0.0), float(rate))
    return best
