"""`zerocli env`: this machine, its memory tiers and its limits; with `--bench`, what the tiers deliver."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import click

from zerocli import machine
from zerocli.errors import UserError
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular, write_text

BENCH_NBYTES = 1 << 30
BENCH_SECONDS = 5.0


@click.command()
@click.option("--bench", is_flag=True, help="Measure the tiers' bandwidths and remember them.")
@click.option("--nvme-path", multiple=True, metavar="DIR", help="Folder on an NVMe disk; repeat for several disks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(bench: bool, nvme_path: tuple[str, ...], as_json: bool) -> int:
    """Show this machine: cores, memory and its limits, GPUs, disks, versions, measured bandwidths."""
    facts = gather(nvme_path)
    if bench:
        measure(facts, nvme_path)
    facts["bench"] = remembered(facts, nvme_path)
    click.echo(json.dumps(facts, indent=2) if as_json else render(facts))
    return 0


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
    """Measure host memory and GPU, and the disks under `paths`, and remember the results."""
    try:
        from tiers import bench
    except ImportError as error:
        raise UserError(f"nothing to measure with: {error}", hint="zerocli env, without --bench") from error
    click.echo("measuring; this takes some seconds a tier", err=True)
    results = {bench_key(facts): bench.bench_dram_hbm(BENCH_NBYTES)}
    for path in paths:
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            results[bench_key(facts, path)] = bench.bench_nvme([str(folder)], BENCH_NBYTES, BENCH_SECONDS)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}", hint="another --nvme-path") from error
    cache = read_cache()
    for key, result in results.items():
        cache[key] = {"time": time.time(), "result": result}
    target = cache_path()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, json.dumps(cache, indent=2))


def remembered(facts: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the remembered measurements of this machine, with their age in seconds; of `paths`, or of all disks."""
    prefix = bench_key(facts)
    wanted = {prefix, *(bench_key(facts, path) for path in paths)}
    found = {}
    for key, entry in read_cache().items():
        if key in wanted or (not paths and key.startswith(f"{prefix} ")):
            name = key.removeprefix(prefix).strip() or "dram_hbm"
            found[name] = {"age": max(0.0, time.time() - entry["time"]), "result": entry["result"]}
    return found


def bench_key(facts: dict[str, Any], path: str = "") -> str:
    """Return what a measurement holds for: the host, its GPU and, for a disk, the folder."""
    gpu = facts["gpus"][0]["name"] if facts["gpus"] else "cpu"
    return f"{facts['host']}/{gpu}" + (f" {Path(path).absolute()}" if path else "")


def cache_path() -> Path:
    """Return where measurements are remembered."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerocli" / "bench.json"


def read_cache() -> dict[str, Any]:
    """Return the remembered measurements; none when the file is missing or unreadable: they can be taken again."""
    try:
        cache = json.loads(read_regular(cache_path(), MAX_CONFIG_NBYTES))
    except (OSError, ValueError, UserError):
        return {}
    return cache if isinstance(cache, dict) else {}


def render(facts: dict[str, Any]) -> str:
    """Return the facts as a table of two columns."""
    limits, memory = facts["limits"], facts["memory"]
    rows = [
        ("host", f"{facts['host']} ({facts['system']})"),
        ("cores", str(facts["cores"])),
        *((f"GPU {index} (hbm)", f"{gpu['name']}, {_gib(gpu['memory'])}") for index, gpu in enumerate(facts["gpus"])),
        ("memory (cpu)", f"{_gib(memory['available'])} available of {_gib(memory['total'])}"),
        ("  cgroup limit", _gib(limits["cgroup_memory"])),
        ("  memlock limit", f"{_gib(limits['memlock'])} may be pinned" if limits["memlock"] is not None else "none"),
        *(
            (f"disk {path}", f"{_gib(each['free'])} free of {_gib(each['total'])}")
            for path, each in facts["disks"].items()
        ),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)),
        ("backends", ", ".join(facts["backends"]) or "none: torch is not installed"),
    ]
    if not facts["gpus"]:
        rows.insert(2, ("GPU (hbm)", "none: the CPU computes, and host memory is reported as hbm"))
    for name, entry in facts["bench"].items():
        rows.append((f"measured {name}", f"{_flat(entry['result'])} ({_age(entry['age'])})"))
    if not facts["bench"]:
        rows.append(("measured", "nothing yet: zerocli env --bench --nvme-path DIR"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _flat(result: Any) -> str:
    if not isinstance(result, dict):
        return f"{result:.3g}" if isinstance(result, float) else str(result)
    return ", ".join(f"{name} {_flat(value)}" for name, value in result.items())


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now" if seconds < 60 else "a minute ago"


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "none"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
