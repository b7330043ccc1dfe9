"""Machines: memory and bandwidths of a node. Presets are data-sheet or measured figures, for estimates."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zerocli.errors import UserError, closest

GIB, TIB = 2**30, 2**40
USABLE = 0.985
"""Share of a GPU's memory that a process can allocate; the driver keeps the rest."""
SUSTAINED = 1.07
"""Rate of a training step's products relative to one large product repeated for a second, which heats the GPU most."""
COPIED = 0.855
"""Share of the data sheet's memory bandwidth that a copy reaches (H200: 4.1 of 4.8 TB/s)."""


@dataclass(frozen=True)
class HostTimes:
    """Seconds in which the host launches one block, eagerly; by default of the median machine with an H200."""

    block: float = 1.9e-3
    """Its forward and backward."""
    whole: float = 2.2e-3
    """What recomputing all of it adds: a second forward, and torch's bookkeeping."""
    selective: float = 3.8e-3
    """What recomputing all but products and attention adds: each operation is looked at twice."""
    moved: float = 0.6e-3
    """What offloaded parameters add to each of the block's two uses."""
    reduced: float = 0.35e-3
    """What offloaded gradients add to its backward."""
    kept: float = 0.4e-3
    """What an offloaded activation checkpoint adds to its recomputation."""
    streamed: float = 0.5e-3
    """What its update adds where something that this needs is offloaded, beside what its chunks take."""
    chunk: float = 0.2e-3
    """What each chunk of such an update adds, beside its transfers."""
    transfer: float = 0.06e-3
    """What each transfer of a chunk adds: states come and go, gradients come, parameters go or come and go."""

    @property
    def pace(self) -> float:
        """How long this host takes for other work, relative to the one where that was measured."""
        return self.block / HostTimes().block


@dataclass(frozen=True)
class Hardware:
    """A node. Rates are in GB/s (1e9 bytes) per GPU unless stated otherwise."""

    name: str
    gpu_memory: int
    """Usable bytes of one GPU's memory."""
    tflops: float
    """Dense half-precision matrix rate of the data sheet."""
    hbm: float
    """Memory bandwidth."""
    links: float
    """To the other GPUs of the node, in one direction."""
    network: float = 25.0
    """To other nodes."""
    pcie: float = 22.0
    """To host memory, in one direction."""
    both_ways: float = 0.84
    """Share of twice the link's rate reached when both directions are busy (measured on an H200: 92 of 110 GB/s)."""
    gpus: int = 8
    host_memory: int = 1 * TIB
    nvme_space: int = 14 * TIB
    disk: float = 12.0
    """Of the node's disks together, reading or writing."""
    adam: float = 4.0
    """Billions of parameters per second that the node's CPUs update."""
    adam_beside: float = 0.0
    """The same while links to GPUs are busy, which use the same memory; 0: not measured, 0.8 of it."""
    products: float = 0.0
    """TFLOPS that a large product in bf16 reached on this machine; 0: not measured."""
    host_block: float = HostTimes.block
    host_whole: float = HostTimes.whole
    host_selective: float = HostTimes.selective
    host_moved: float = HostTimes.moved
    host_reduced: float = HostTimes.reduced
    host_kept: float = HostTimes.kept
    host_streamed: float = HostTimes.streamed
    host_chunk: float = HostTimes.chunk
    host_transfer: float = HostTimes.transfer
    """See `HostTimes`."""
    bf16: bool = True
    """Whether the GPU computes in bf16; NVIDIA's do from compute capability 8.0 on."""
    source: str = "preset"
    known: bool = True
    """False for a GPU that is in no preset: its rates are those of another."""

    @property
    def room(self) -> dict[str, int]:
        """The bytes of each tier: of one GPU, and of the node's host memory and disks."""
        return {"hbm": self.gpu_memory, "dram": self.host_memory, "nvme": self.nvme_space}

    def leaving(self, **shares: float) -> Hardware:
        """Return the machine without these shares of its memory."""
        left: dict[str, Any] = {name: int(getattr(self, name) * (1 - share)) for name, share in shares.items()}
        return dataclasses.replace(self, **left)

    @property
    def host(self) -> HostTimes:
        return HostTimes(*(getattr(self, name) for name in HOST))


# Dense half-precision TFLOPS, memory bandwidth and links as the vendors publish them; figures with sparsity are halved,
# links are of one direction. Only the H200 was measured. PCIe rates are what pinned copies reach, about 12, 22 and 50
# GB/s of generations 3, 4 and 5; host memory and disks are those of a usual node.
_V100 = Hardware(
    *("v100-32", int(31.7 * GIB), 125, 900, 150, 12, 12), host_memory=768 * GIB, nvme_space=7 * TIB, disk=6, bf16=False
)
PRESETS: Mapping[str, Hardware] = {
    each.name: each
    for each in (
        Hardware("a100-40", int(39.4 * GIB), 312, 1555, 300),
        Hardware("a100-80", int(79.2 * GIB), 312, 2039, 300),
        Hardware(
            "h100", int(79.2 * GIB), 989, 3350, 450, network=50, pcie=50, host_memory=2 * TIB, nvme_space=28 * TIB
        ),
        Hardware("h200", int(139.7 * GIB), 989, 4800, 450, 50, 50, host_memory=2 * TIB, nvme_space=28 * TIB),
        Hardware("b200", int(178.0 * GIB), 2250, 8000, 900, 50, 55, host_memory=2 * TIB, nvme_space=28 * TIB),
        Hardware("mi300x", int(189.0 * GIB), 1307, 5300, 448, 50, 50, host_memory=2 * TIB, nvme_space=28 * TIB),
        Hardware("l40s", int(44.3 * GIB), 362, 864, 22, nvme_space=7 * TIB, disk=6),
        Hardware("rtx4090", int(23.5 * GIB), 165, 1008, 20, 3, 22, host_memory=256 * GIB, nvme_space=4 * TIB, disk=6),
        dataclasses.replace(_V100, name="v100-16", gpu_memory=int(15.6 * GIB)),
        _V100,
        Hardware(
            "t4", int(14.7 * GIB), 65, 320, 12, 6, 12, gpus=4, host_memory=192 * GIB, nvme_space=TIB, disk=3, bf16=False
        ),
        Hardware(
            "p100", int(15.6 * GIB), 21, 732, 80, 12, 12, host_memory=512 * GIB, nvme_space=4 * TIB, disk=3, bf16=False
        ),
    )
}
"""By name. `gpu_memory` is what a process can allocate: the driver reserves some of each GPU's memory."""

ALIASES = {"a100": "a100-80", "v100": "v100-32", "4090": "rtx4090"}

_GPU_NAMES = {name: name for name in ("b200", "h200", "h100", "mi300x", "l40s")}
_GPU_NAMES |= {"a100.*80": "a100-80", "a100": "a100-40", "4090": "rtx4090", "v100.*16": "v100-16", "v100": "v100-32"}
_GPU_NAMES |= {r"\bp100\b": "p100", r"\bt4\b": "t4"}
"""Pattern in the driver's name of a GPU -> preset; the first that is found counts."""
_WITHOUT_BF16 = re.compile(r"\b(gtx|titan|tesla [kmpt]\d+|[kmp]\d0|rtx 20\d\d|quadro (rtx|gv|gp|[kmp]))")
"""Names of GPUs before compute capability 8.0 that are in no preset."""


HOST = tuple(f"host_{each.name}" for each in dataclasses.fields(HostTimes))
RATES = ("tflops", "products", "hbm", "links", "network", "pcie", "both_ways", "disk", "adam", "adam_beside") + HOST
"""The fields that are rates, or times of the host; `--set hardware.NAME` overrides each."""


def preset(name: str) -> Hardware:
    """Return the preset of this name in upper or lower case, or raise UserError that lists the presets."""
    found = name.strip().lower()
    found = ALIASES.get(found, found)
    if found not in PRESETS:
        meant = closest(found, [*PRESETS, *ALIASES])
        question = f"; did you mean {meant}?" if meant else ""
        raise UserError(f"--hardware {name.strip()}: there are {', '.join(PRESETS)}{question}")
    return PRESETS[found]


def this_machine(facts: Mapping[str, Any], measured: Mapping[str, Any]) -> Hardware | None:
    """Return this machine, if it has GPUs: its sizes, and its rates where `zerocli env --bench` measured them.

    `facts` and `measured` are what `zerocli.plan.time.bench` gathers and caches.
    """
    gpus = facts["gpus"]
    if not gpus:
        return None
    lowered = gpus[0]["name"].lower()
    found = next((name for pattern, name in _GPU_NAMES.items() if re.search(pattern, lowered)), "")
    known = found or "h100"
    changes: dict[str, Any] = {
        "name": gpus[0]["name"],
        "gpus": len(gpus),
        "gpu_memory": int(gpus[0]["memory"] * USABLE),
        "host_memory": facts["memory"]["available"],
        "nvme_space": max((disk["free"] for disk in facts["disks"].values()), default=0),
        "source": rates_source(measured, known),
        "known": bool(found),
        "bf16": PRESETS[known].bf16 and not _WITHOUT_BF16.search(lowered),
    }
    for name, entry in measured.items():
        result = entry.get("result", {}) if isinstance(entry, dict) else {}
        if name == "dram_hbm" and _rate(result.get("up")):
            changes["pcie"] = min(result["up"], result.get("down", result["up"]))
            if _rate(result.get("both")):
                changes["both_ways"] = min(1.0, max(0.5, result["both"] / (2 * changes["pcie"])))
        elif name == "compute" and all(_rate(result.get(each)) for each in ("products", "memory", "adam")):
            changes |= {"products": result["products"] * SUSTAINED, "adam": result["adam"]}
            changes["hbm"] = result["memory"] / COPIED
            changes |= {each: result[each] for each in (*HOST, "adam_beside") if _rate(result.get(each))}
    if disk := disk_rate(measured):
        changes["disk"] = disk
    return dataclasses.replace(PRESETS[known], **changes)


def rates_source(measured: Mapping[str, Any], others: str) -> str:
    """Return which rates of this machine are measured, and whose the others are, in words."""
    names = {"dram_hbm": "link", "compute": "compute"}
    read = [name for name, entry in measured.items() if isinstance(entry, dict) and entry.get("result")]
    found = dict.fromkeys(names.get(name, "disk") for name in read)
    if not found:
        return f"this machine, rates of {others}"
    return f"this machine, measured: {', '.join(found)}; other rates of {others}"


def disk_rate(measured: Mapping[str, Any]) -> float:
    """Return the measured rate of a disk that reads and writes concurrently, as a step does; 0 if nobody measured."""
    rate = 0.0
    for name, entry in measured.items():
        result = entry.get("result", {}) if isinstance(entry, dict) else {}
        if name not in ("dram_hbm", "compute") and _rate(result.get("read")) and _rate(result.get("write")):
            rate = result["both"] if _rate(result.get("both")) else min(result["read"], result["write"])
    return rate


def _rate(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
