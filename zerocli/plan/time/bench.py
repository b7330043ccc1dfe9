"""Facts about this machine and the bandwidths of its tiers, measured once and stored in the user's cache."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from zerocli import machine
from zerocli.console import say
from zerocli.errors import UserError
from zerocli.plan.time.hardware import HOST
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular, write_text

BENCH_NBYTES = 256 << 20
LINK_SECONDS, DISK_SECONDS, COMPUTE_SECONDS = 2.0, 4.0, {"cuda": 20.0, "cpu": 5.0}
UNMEASURED_NBYTES, UNMEASURED_SECONDS = 64 << 20, 0.5
"""The same for a disk that `--auto` may choose and nobody measured."""
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
    """Measure compute, host memory, GPU and the disks under `paths`; say and store each result as it comes."""
    from tiers import bench  # imports torch

    link = "the link between host and GPU" if facts["gpus"] else "host memory"
    compute = COMPUTE_SECONDS["cuda" if facts["gpus"] else "cpu"]
    jobs: list[tuple[str, str, float, Callable[[], Any]]] = [
        (link, bench_key(facts), LINK_SECONDS, lambda: bench.bench_dram_hbm(BENCH_NBYTES, LINK_SECONDS)),
        ("compute", bench_key(facts, COMPUTE), compute, _compute_rates),
    ]
    for path in paths:
        disk = partial(_disk, bench, path, BENCH_NBYTES, DISK_SECONDS)
        jobs.append((f"disk {path}", bench_key(facts, path), DISK_SECONDS, disk))
    for number, (title, key, seconds, act) in enumerate(jobs, 1):
        say(f"measuring {number} of {len(jobs)}: {title} (about {seconds:g} s)")
        result = act()
        _remember(key, result)
        say(f"  {in_words(result)}")


def measure_unknown(facts: dict[str, Any], paths: tuple[str, ...]) -> list[str]:
    """Measure the disks that a choice depends on and nobody has measured, once for a machine; return a line for each.

    That takes about two seconds for each.
    """
    from tiers import bench

    lines = []
    for path in paths:
        if bench_key(facts, path) not in read_cache():
            result = _disk(bench, path, UNMEASURED_NBYTES, UNMEASURED_SECONDS)
            _remember(bench_key(facts, path), result)
            lines.append(f"measured disk {path}: {in_words(result)}")
    return lines


def _disk(bench: Any, path: str, nbytes: int, seconds: float) -> Any:
    try:
        return bench.bench_nvme([path], nbytes, seconds)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}", hint="another --nvme-path") from error


def _remember(key: str, result: Any) -> None:
    cache = read_cache()
    cache[key] = {"time": time.time(), "result": result}
    target = cache_path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json.dumps(cache, indent=2))
    except OSError:
        say(f"note: {target} cannot be written: this is measured again next time")


UNITS = dict.fromkeys(("products", "bf16", "fp16"), "TFLOPS") | dict.fromkeys(HOST, "s per block")
UNITS |= {
    "adam": "billion parameters/s",
    "adam_beside": "billion parameters/s beside the link",
    "host_chunk": "s per chunk of an update",
    "host_transfer": "s per transfer of a chunk",
}
"""Units of measured rates and times; all others are in GB/s."""


def in_words(result: Any) -> str:
    """Return the rates of a measurement in words; counts, paths and the rates of raw copies are left out."""
    if not isinstance(result, dict):
        return str(result)
    rates = {name: value for name, value in result.items() if isinstance(value, float) and "_ratio" not in name}
    shown = [(name, value) for name, value in rates.items() if not name.startswith("raw_")] or list(rates.items())
    return ", ".join(f"{name} {value:.3g} {UNITS.get(name, 'GB/s')}" for name, value in shown) or "nothing"


def _compute_rates() -> dict[str, float]:
    import torch

    from zerocli.plan.time.host_times import measure_host
    from zerocli.plan.time.rates import measure_rates

    if not torch.cuda.is_available():
        return measure_rates(torch.device("cpu"))  # the host is what computes
    device = torch.device("cuda")
    rates: dict[str, float] = {}
    host = measure_host(device, lambda: rates.update(measure_rates(device)))
    return rates | host


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
    return machine.cache_folder() / "bench.json"


def read_cache() -> dict[str, Any]:
    """Return the cached measurements; empty if the file is missing or unreadable."""
    try:
        cache = json.loads(read_regular(cache_path(), MAX_CONFIG_NBYTES))
    except (OSError, ValueError, UserError):
        return {}
    return cache if isinstance(cache, dict) else {}
