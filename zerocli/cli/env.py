"""`zerocli env`: this machine, its memory tiers and its limits; with `--bench`, the tiers' bandwidths."""

from __future__ import annotations

from typing import Any

import click

from zerocli.console import show_json
from zerocli.errors import OK
from zerocli.plan.report.preflight import refuse_folders
from zerocli.plan.time import bench


@click.command()
@click.option("--bench", "measure", is_flag=True, help="Measure the tiers' bandwidths and remember them.")
@click.option("--nvme-path", multiple=True, metavar="DIR", help="Folder on an NVMe disk; repeat for several disks.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(measure: bool, nvme_path: tuple[str, ...], as_json: bool) -> int:
    """Show this machine: cores, memory and its limits, GPUs, disks, versions, measured bandwidths."""
    refuse_folders(nvme_path)
    facts = bench.gather(nvme_path)
    if measure:
        bench.measure(facts, nvme_path)
    facts["bench"] = bench.remembered(facts, nvme_path)
    if as_json:
        show_json(facts, indent=2)
    else:
        click.echo(render(facts))
    return OK


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
        ("backends", ", ".join(facts["backends"]) or "none"),
    ]
    if not facts["gpus"]:
        rows.insert(2, ("GPU (hbm)", "none: the CPU computes, and host memory is reported as hbm"))
    for name, entry in facts["bench"].items():
        rows.append((f"measured {name}", f"{bench.in_words(entry['result'])} ({_age(entry['age'])})"))
    if not facts["bench"]:
        rows.append(("measured", "nothing yet: zerocli env --bench --nvme-path DIR"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now" if seconds < 60 else "a minute ago"


def _gib(nbytes: int | None) -> str:
    if nbytes is None:
        return "none"
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
