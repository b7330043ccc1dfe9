"""Observers of a training run. The base class records, at the end, only what costs nothing to measure."""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerocli import machine
from zerocli.config import Config
from zerocli.config.options import RunOptions
from zerocli.console import say
from zerocli.engine.engine import Engine
from zerocli.layout.categories import CATEGORIES
from zerocli.profile import places
from zerocli.profile.document import assemble
from zerocli.profile.lines import Line, device_peak
from zerocli.profile.runs import FILE
from zerocli.ranks.exchange import gather_json
from zerocli.regular_files import write_text

_WHERE = {
    "cuda": "activations are not told apart, they are in `unattributed`",
    "cpu": "activations are not in these rows, nor in the peak",
}


class Observer:
    """Watches one rank of a run; all ranks call all of its methods."""

    reports = False
    """Whether it prints its own report instead of the closing summary."""
    written: dict[str, Any] | None = None
    """The profile that rank 0 wrote at the end, for the closing summary."""

    def build(self, make: Callable[[], Engine]) -> Engine:
        """Return the engine that `make` builds."""
        return make()

    def report(self, config: Config, options: RunOptions, engine: Engine, lines: list[Line]) -> None:
        """Write RUN/profile.json on rank 0, from what every rank has recorded. Collective.

        It logs instead of raising, unless the profile is the purpose of the run.
        """
        try:
            mine = self.local(engine)
        except Exception as error:  # the other ranks are about to enter the gather
            mine = {"failed": f"{type(error).__name__}: {error}"}
        everyone = gather_json(mine, engine.gather_control, engine.device)
        if engine.collectives.rank or engine.tensor_parallel.rank:
            return
        try:
            for rank, each in enumerate(everyone):
                if "failed" in each:
                    raise RuntimeError(f"rank {rank} could not record its memory: {each['failed']}")
            document = assemble(config, everyone, [line.as_dict() for line in lines], self.facts(config, engine))
            self.written = document | {"made": made(options)}
            self.publish(config, options, self.written)
        except Exception as error:
            if self.reports:
                raise
            say(f"note: {FILE} was not written: {type(error).__name__}: {error}")

    def local(self, engine: Engine) -> dict[str, Any]:
        """Return this rank's memory: what the engine holds, and the device's peak."""
        held = {name: nbytes for name, nbytes in engine.memory().items() if name in CATEGORIES}
        measured = max(device_peak(engine)["hbm"], sum(held.values()))
        return record(engine, {"rows": held, "measured": measured, "moment": "", "holders": []}, None)

    def facts(self, config: Config, engine: Engine) -> dict[str, Any]:
        """Return what else goes into the document."""
        return facts(engine) | {
            "followed": False,
            "notes": [f"recorded by train: {_WHERE[engine.device.type]} (zerocli profile follows them)"],
        }

    def publish(self, config: Config, options: RunOptions, document: dict[str, Any]) -> None:
        write_text(Path(options.run_dir) / FILE, json.dumps(document), sync=False)


def record(engine: Engine, hbm: dict[str, Any], process: int | None) -> dict[str, Any]:
    """Return this rank's memory on all tiers, that of its device being `hbm`; `process` as in `offloaded`."""
    return {"hbm": hbm, **offloaded(engine, process), "system": system(engine), "node": socket.gethostname()}


def offloaded(engine: Engine, process: int | None) -> dict[str, dict[str, Any]]:
    """Return rows and measured bytes of the tiers other than the device.

    With a GPU, host memory is the process's peak RSS, of which `process` bytes are the program's own (None: unknown).
    Without a GPU host memory is also reported as hbm, so dram is only what the tiers mapped.
    """
    rows, taken = places.tier_rows(engine), places.footprint(engine)
    found: dict[str, dict[str, Any]] = {}
    for tier, held in rows.items():
        row = {name: nbytes for name, nbytes in held.items() if nbytes}
        found[tier] = {"rows": row, "measured": taken[tier], "holders": places.holders(engine, tier)}
    if engine.device.type == "cuda":
        peak = places.rss()[1]
        if process is not None:
            found["dram"]["rows"]["runtime"] = process
        found["dram"]["measured"] = max(peak, sum(found["dram"]["rows"].values()))
    return found


def system(engine: Engine) -> dict[str, int]:
    """Return the operating system's figures for this process."""
    now, peak = places.rss()
    return {
        "rss": now,
        "rss_peak": peak,
        "pinned": places.pinned_nbytes(engine),
        "nvme": places.footprint(engine)["nvme"],
    }


def facts(engine: Engine) -> dict[str, Any]:
    """Return the facts about the engine and its machine that a profile needs."""
    cuda = engine.device.type == "cuda"
    return {
        "device": engine.device.type,
        "gpu": torch.cuda.get_device_name(engine.device) if cuda else None,
        "precision": engine.precision.name,
        "parameters": engine.numel,
        "frozen": sum(flat.layout.numel for flat in engine.flats() if not flat.trainable),
        "ranks": engine.collectives.world * engine.tensor_parallel.world,
        "ranks_per_node": engine.local_world,
        "tp": engine.tensor_parallel.world,
        "update_on_cpu": engine.updater.on_cpu,
        "cpu_share": round(engine.update.share, 2),
        "recompute": engine.settings.recompute,
        "capacity": capacity(engine),
    }


def capacity(engine: Engine) -> dict[str, int | None]:
    """Return the bytes of each tier: of the device, and of the node's host memory and disks; None if unknown.

    Without a GPU the device's memory is the rank's share of host memory.
    """
    there = machine.memory().allowed
    if engine.device.type == "cuda":
        hbm = torch.cuda.get_device_properties(engine.device).total_memory
    else:
        hbm = there // max(1, engine.local_world)
    disks = {os.stat(path).st_dev: machine.disk(path)[0] for path in engine.settings.nvme_path if os.path.exists(path)}
    return {"hbm": hbm, "dram": there, "nvme": sum(disks.values()) if disks else None}


def made(options: RunOptions) -> dict[str, Any]:
    """Return when, where and with what a profile was made."""
    versions = {name: machine.version(name) for name in ("zerocli", "torch")}
    cuda = torch.version.cuda
    return {
        "command": options.command,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "host": socket.gethostname(),
        "system": machine.system(),
        "cores": machine.cores(),
        "versions": versions | ({"CUDA": cuda} if cuda else {}) | {"Python": platform.python_version()},
    }
