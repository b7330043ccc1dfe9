"""Facts about this machine and the bandwidths of its tiers, measured once and stored in the user's cache."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from zerocli import machine
from zerocli.console import say
from zerocli.errors import UserError
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular, write_text

BENCH_NBYTES = 1 << 30
BENCH_SECONDS = 5.0
COMPUTE = "compute"
"""Names the rates of `zerocli.plan.time.rates`."""


def gather(paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the facts of this machine as one JSON-able document; sizes in bytes, null where there is no limit."""
    memory = machine.memory()
    disks = {}
    for path in paths or (".",):
        total, free = machine.disk(path)
        disks[str(Path(path).absolute())] = {"total": total, "free": free}
    return {
        "schema": 1,
        "host": socket.gethostname(),
        "system": machine.system(),
        "cores": machine.cores(),
        "gpus": [{"name": gpu.name, "memory": gpu.nbytes} for gpu in machine.gpus()],
        "memory": {"total": memory.total, "available": memory.available},
        "limits": {"cgroup_memory": memory.limit, "memlock": machine.memlock()},
        "disks": disks,
        "versions": {name: machine.version(name) for name in ("zerocli", "torch", "numpy")}
        | {"python": ".".join(map(str, sys.version_info[:3]))},
        "backends": machine.backends(),
    }


def measure(facts: dict[str, Any], paths: tuple[str, ...]) -> None:
    """Measure compute, host memory, GPU and the disks under `paths`, and store the results in the cache."""
    try:
        from tiers import bench
    except ImportError as error:
        raise UserError(f"nothing to measure with: {error}", hint="zerocli env, without --bench") from error
    say("measuring; this takes some seconds per tier")
    results = {bench_key(facts): bench.bench_dram_hbm(BENCH_NBYTES), bench_key(facts, COMPUTE): _compute_rates()}
    for path in paths:
        folder = Path(path)
        try:
            results[bench_key(facts, path)] = bench.bench_nvme([str(folder)], BENCH_NBYTES, BENCH_SECONDS)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}", hint="another --nvme-path") from error
    cache = read_cache()
    for key, result in results.items():
        cache[key] = {"time": time.time(), "result": result}
    target = cache_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, json.dumps(cache, indent=2))


def _compute_rates() -> dict[str, float]:
    import torch

    from zerocli.plan.time.host_times import measure_host
    from zerocli.plan.time.rates import measure_rates

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    host = measure_host(device) if device.type == "cuda" else {}  # without a GPU, the host is what computes
    return measure_rates(device) | host


def remembered(facts: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """Return this machine's cached measurements with their age in seconds, for `paths` or, without any, all disks."""
    prefix = bench_key(facts)
    wanted = {prefix, bench_key(facts, COMPUTE), *(bench_key(facts, path) for path in paths)}
    found = {}
    for key, entry in read_cache().items():
        if key in wanted or (not paths and key.startswith(f"{prefix} ")):
            name = key.removeprefix(prefix).strip() or "dram_hbm"
            found[name] = {"age": max(0.0, time.time() - entry["time"]), "result": entry["result"]}
    return found


def bench_key(facts: dict[str, Any], what: str = "") -> str:
    """Return the cache key of a measurement: the host and its GPU, then `COMPUTE` or, for a disk, the folder."""
    gpu = facts["gpus"][0]["name"] if facts["gpus"] else "cpu"
    name = what if what == COMPUTE else str(Path(what).absolute())
    return f"{facts['host']}/{gpu}" + (f" {name}" if what else "")


def cache_path() -> Path:
    """Return the path of the cache of measurements."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerocli" / "bench.json"


def read_cache() -> dict[str, Any]:
    """Return the cached measurements; empty if the file is missing or unreadable."""
    try:
        cache = json.loads(read_regular(cache_path(), MAX_CONFIG_NBYTES))
    except (OSError, ValueError, UserError):
        return {}
    return cache if isinstance(cache, dict) else {}
