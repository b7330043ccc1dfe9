"""The machine and the setup that `zerocli fit` plans for: from a preset or this machine, and from flags."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerocli import machine
from zerocli.config import with_dividing_batch
from zerocli.console import printable
from zerocli.errors import UserError, quote
from zerocli.layout.sizes import count_of, parse_memory
from zerocli.plan.blocks.inputs import Source
from zerocli.plan.setup import Setup, setup_of
from zerocli.plan.time.hardware import PRESETS, Hardware, preset, this_machine

DEFAULT_HARDWARE = "h100"


def choose_hardware(given: Mapping[str, Any]) -> tuple[Hardware, list[str]]:
    """Return the machine to plan for, and notes about assumptions."""
    notes = []
    if given["hardware"]:
        hardware = preset(given["hardware"])
    else:
        from zerocli.plan.time import bench

        here = None
        if gpus := machine.driver_gpus():
            facts = bench.gather(()) | {"gpus": [{"name": gpu.name, "memory": gpu.nbytes} for gpu in gpus]}
            here = this_machine(facts, bench.remembered(facts, ()))
        hardware = here or PRESETS[DEFAULT_HARDWARE]
        if not hardware.known:
            notes.append(
                f"{printable(hardware.name)} is in no preset: its memory is the driver's figure, and times use the "
                f"rates of an {DEFAULT_HARDWARE.upper()} (--set hardware.tflops=... and others change them)"
            )
        asked = [name for name in ("gpu_memory", "host_memory", "nvme_space") if given[name]]
        if here is None and len(asked) < 3:
            rest = "the rest of the node" if asked else "the node"
            notes.append(f"{rest} as of {hardware.name} (no GPU here; --hardware names another)")
    changes: dict[str, Any] = {
        name: parse_size(f"--{name.replace('_', '-')}", given[name], zero=name == "nvme_space")
        for name in ("gpu_memory", "host_memory", "nvme_space")
        if given[name] is not None
    }
    return dataclasses.replace(hardware, **changes), notes


def choose_setup(
    source: Source,
    given: Mapping[str, Any],
    hardware: Hardware,
    runtime: dict[str, int],
    free: frozenset[str] = frozenset(),
) -> tuple[Setup, list[str]]:
    """Return the setup from config and flags, and notes about assumptions; `free` are the keys of `--auto`."""
    notes = []
    for name in ("ranks", "ranks_per_node", "tp", "shard_ranks"):
        if (given[name] or 0) >= 2**63:
            raise UserError(f"--{name.replace('_', '-')} {quote(given[name])} is beyond 64 bits")
    ranks, tp = given["ranks"], given["tp"] if given["tp"] is not None else source.config.parallel.tp
    if ranks is None:
        ranks = source.config.parallel.ranks or math.lcm(hardware.gpus, max(tp, 1))
        notes.append(f"ranks {ranks} (one node of {hardware.name}; --ranks)")
    per_node = given["ranks_per_node"]
    if per_node is None:
        per_node = min(ranks, hardware.gpus) if ranks > 0 else 1
        if ranks > per_node and ranks % per_node:
            whole = [each for each in range(per_node, 0, -1) if ranks % each == 0 and each % max(tp, 1) == 0]
            per_node = math.gcd(ranks, per_node)
            if whole and per_node % tp:
                per_node = whole[0]
            notes.append(f"{per_node} of {count_of(hardware.gpus, 'GPU')} per node ({ranks} ranks; --ranks-per-node)")
    if ranks > per_node > 0 and ranks % per_node == 0 and 0 < tp <= ranks and per_node % tp:
        raise UserError(
            f"--tp {tp} would split layers between nodes of {count_of(per_node, 'rank')}",
            hint=f"--tp {math.gcd(tp, per_node)}, or --ranks-per-node {math.lcm(tp, per_node)}",
        )
    config = with_dividing_batch(source.config, ranks, tp) if "train.batch" in free else source.config
    shard_ranks = given["shard_ranks"] if given["shard_ranks"] is not None else config.parallel.shard_ranks
    about = {"ranks": ranks, "tp": tp, "shard_ranks": shard_ranks, "ranks_per_node": per_node}
    setup = setup_of(config, **about, runtime=runtime)
    if setup.precision == "bf16" and not hardware.bf16:
        sets = [text.partition("=")[0].strip() for text in given["sets"]]
        asked = given["precision"] is not None or "train.precision" in sets
        if asked and source.config.train.precision == "bf16":
            raise UserError(f"precision bf16: {hardware.name} does not compute in bf16", hint="--precision fp16")
        setup = dataclasses.replace(setup, precision="fp16")
        notes.append(f"precision fp16 ({hardware.name} has no bf16; train with --precision fp16)")
    return setup, notes


def parse_size(flag: str, text: str, zero: bool = False) -> int:
    try:
        nbytes = parse_memory(text.strip())
    except ValueError as error:
        raise UserError(f"{flag} {error}") from error
    if nbytes <= 0 and not zero:
        raise UserError(f"{flag} {text} is not above 0", hint=f"{flag} 80GiB")
    return nbytes
