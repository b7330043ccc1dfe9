"""`--auto` on this machine: what it has, the choice as flags, and the command that repeats it. Needs no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from offload.placement import Placement
from zerocli import machine
from zerocli.config import AUTO, Config
from zerocli.config.schema import SHARD_STATES, get
from zerocli.console import printable, quoted
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout.sizes import format_bytes, format_seconds
from zerocli.plan.models.model import Model
from zerocli.plan.search.auto import HOST_MARGIN, Choice, choose
from zerocli.plan.search.candidates import Candidate
from zerocli.plan.search.recompute import MARGIN
from zerocli.plan.setup import Setup
from zerocli.plan.time import bench
from zerocli.plan.time.compute import FP32_PRODUCTS, PRODUCTS
from zerocli.plan.time.hardware import PRESETS, RATES, Hardware, disk_rate, rates_source, this_machine

STAGES = (0, 1, 2, 3)
LEFT_FREE = f"{MARGIN:.0%} of the device and {HOST_MARGIN:.0%} of the rest"
ROOMS = ("gpu_memory", "host_memory", "nvme_space")
_UNSAVED = {"checkpoint.every": "0", "checkpoint.time_limit": "0", "checkpoint.best": "false"}
"""Keys of a run that saves nothing."""
_CPU = {"products": 0.05, "memory": 10.0, "adam": 0.2}
"""Rates of a CPU rank that `zerocli env --bench` has not measured: TFLOPS, GB/s, billions of parameters per second."""


def hardware_here(paths: tuple[str, ...], setup: Setup, room: int) -> Hardware:
    """Return this machine: `room` bytes on the device of each rank, free host memory, free space of the nvme folders
    `paths`, and the rates that `zerocli env --bench` has measured; the others are a preset's.
    """
    facts = bench.gather(paths)
    measured = bench.remembered(facts, paths)
    disks = {machine.file_system(path): entry["free"] for path, entry in facts["disks"].items()} if paths else {}
    host = facts["memory"]["available"]
    if setup.device == "cuda":
        found = this_machine(facts, measured) or PRESETS["h100"]  # a GPU that the driver does not list
    else:
        rates = {**_CPU, **measured.get(bench.COMPUTE, {}).get("result", {})}
        products = rates.get(setup.precision, rates["products"]) / setup.local_ranks
        peak = products / FP32_PRODUCTS if setup.width == 4 else products
        copied = rates["memory"] / 2 / setup.local_ranks
        disk = disk_rate(measured)
        found = Hardware(
            *("cpu", room, peak, rates["memory"] / setup.local_ranks, copied),
            **{"network": 1.0, "pcie": copied, "gpus": setup.local_ranks, "disk": disk or 1.0, "adam": rates["adam"]},
            products=products * PRODUCTS,
            source=rates_source(measured, "a typical CPU"),
        )
        host = room * setup.local_ranks  # host memory is the device's
    return dataclasses.replace(found, gpu_memory=room, host_memory=host, nvme_space=sum(disks.values()))


def may_compile(config: Config, setup: Setup, free: frozenset[str]) -> int:
    """Return the steps of a run whose blocks `--auto` may compile; 0 if it may not."""
    asked = "model.compile" in free and config.model.compile == AUTO and setup.device == "cuda"
    return config.train.steps if asked else 0


def named_keys(free: frozenset[str], global_batch: int, steps: int) -> frozenset[str]:
    """Return those of the free keys that a choice decides: no batch without a global one, and `steps` as above."""
    open_ones = {"train.batch": global_batch, "model.compile": steps}
    return frozenset(key for key in free if open_ones.get(key, True))


def choose_setup(
    model: Model, setup: Setup, hardware: Hardware, free: frozenset[str], global_batch: int = 0, steps: int = 0
) -> Choice:
    """Return the choice of what is free; the rest of the setup stays as it is.

    `global_batch` is the number of sequences per step of all ranks: with it, the micro-batch may be chosen too, from
    each rank's part, its halves and 1. `steps` are those of `may_compile`.
    """
    if steps:
        setup = dataclasses.replace(setup, compiled=False)
    stages = STAGES if "zero.stage" in free else (setup.stage,)
    if "zero.stage" in free and setup.dp == 1:
        stages = (3,)  # one rank partitions nothing: the stages differ only in what may be offloaded
    if "activations.policy" in free:
        setup = dataclasses.replace(setup, recompute=AUTO)
    batches = [setup.batch]
    if "train.batch" in free and global_batch and model.resizable:  # a trace is of one batch
        each = global_batch // setup.dp
        batches = sorted({1, *(each >> times for times in range(each.bit_length()) if each % (1 << times) == 0)})
    groups = [(setup.shard_ranks, setup.shard_states)]
    node = setup.ranks_per_node // setup.tp
    if "parallel.shard_ranks" in free and setup.ranks > setup.ranks_per_node and node > 1 and setup.dp % node == 0:
        # With groups of a node, gathers stay inside it.
        groups = sorted({(0, setup.shard_states), *groups, *((node, states) for states in SHARD_STATES)})
    offload = None if "offload.placement" in free else setup.offload
    if offload is None:
        setup = dataclasses.replace(setup, offload=Placement())  # the config's own must not decide what is tried
    return choose(model, setup, hardware, stages, offload, batches, steps, groups=groups)


def with_choice(config: Config, chosen: Candidate, steps: int = 0) -> Config:
    """Return the config with the keys of a choice; `steps` are those of `may_compile`."""
    setup = chosen.setup
    keys = {"zero.stage": setup.stage, "offload.placement": setup.offload, "offload.update": setup.update}
    keys |= {"parallel.shard_ranks": setup.shard_ranks, "parallel.shard_states": setup.shard_states}
    keys |= {"train.batch": setup.batch, "train.accumulate": setup.accumulate}
    keys["activations.policy"] = setup.recomputed.policy
    return config.with_values(keys | ({"model.compile": setup.compiled} if steps else {}))


def with_keys_of(config: Config, other: Config, free: frozenset[str]) -> Config:
    """Return the config with the keys that a choice of the `free` ones decides as another config has them."""
    keys = {*free, "offload.update", *(["train.accumulate"] if "train.batch" in free else [])}
    return config.with_values({key: get(other, key) for key in keys})


def flags(chosen: Candidate, free: frozenset[str] = frozenset()) -> str:
    """Return the flags that give the choice by hand."""
    setup = chosen.setup
    words = [f"--stage {setup.stage}"]
    if setup.offload:
        words.append(f"--offload {setup.offload}")
    if setup.shard_ranks and "parallel.shard_ranks" in free:
        words.append(f"--shard-ranks {setup.shard_ranks}")
        words += [f"--set parallel.shard_states={setup.shard_states}"] if setup.copies > 1 else []
    if "train.batch" in free:
        words.append(f"--batch {setup.batch}")
    words += ["--set offload.update=cpu"] if setup.update == "cpu" else []
    words += [f"--set model.compile={str(setup.compiled).lower()}"] if "model.compile" in free else []
    return " ".join([*words, f"--set activations.policy={setup.recomputed.policy}"])


def keywords(chosen: Candidate) -> str:
    """Return the keywords of `zerocli.shard` that give the choice by hand."""
    setup = chosen.setup
    offload = f'offload="{setup.offload}", ' if setup.offload else ""
    update = 'update="cpu", ' if setup.update == "cpu" else ""
    return f'stage={setup.stage}, {offload}{update}recompute="{setup.recomputed.policy}"'


def describe(choice: Choice, hardware: Hardware, written: Callable[[Candidate], str]) -> list[str]:
    """Return the choice in lines: `written` as by hand, the reason, the runner-up, and what it was chosen from."""
    best, second = choice.best, choice.runner_up
    assert best is not None
    lines = [f"auto: {written(best)}", f"  {_reason(best)}; the fastest of {choice.number} that were weighed"]
    if second is not None:
        lines.append(f"  next: {written(second)}: {_reason(second)}")
    disk = f", disk {format_bytes(hardware.nvme_space)}" if hardware.nvme_space else ""
    return [
        *lines,
        f"  chosen for {format_bytes(hardware.gpu_memory)} per device, host memory {format_bytes(hardware.host_memory)}"
        f"{disk}; {LEFT_FREE} stay free; rates: {printable(hardware.source)}",
    ]


def _reason(candidate: Candidate) -> str:
    used = ", ".join(
        f"{format_bytes(candidate.plan.needed(tier))} {tier}"
        for tier in candidate.available
        if candidate.plan.needed(tier)
    )
    timed = candidate.estimate
    return f"about {format_seconds(timed.seconds)} per step, bound by {timed.bound}; {used}" if timed else used


def replay(source: str, setup: Setup, hardware: Hardware, free: frozenset[str]) -> list[str]:
    """Return the `zerocli fit` command that repeats a choice of the `free` keys from what it was made from.

    `source` is the run's config, which holds the choice: the command resets what the choice changed. It is empty for
    ranks without a GPU, which `fit` does not plan.
    """
    if setup.device != "cuda":
        return []
    words = ["zerocli", "fit", source, "--auto", "--ranks", str(setup.ranks)]
    words += ["--ranks-per-node", str(setup.ranks_per_node), "--tp", str(setup.tp)]
    words += [] if "parallel.shard_ranks" in free else ["--shard-ranks", str(setup.shard_ranks)]
    words += [] if "train.batch" in free else ["--batch", str(setup.batch)]
    words += ["--seq", str(setup.seq), "--precision", setup.precision]
    words += [word for room in ROOMS for word in (f"--{room.replace('_', '-')}", f"{getattr(hardware, room)}B")]
    sets = {f"hardware.{rate}": f"{getattr(hardware, rate):.6g}" for rate in RATES}
    sets |= _UNSAVED if not setup.checkpoints else {}
    sets["model.compile"] = AUTO if "model.compile" in free else str(setup.compiled).lower()
    sets["offload.update"] = setup.update
    if "activations.policy" not in free:
        sets["activations.policy"] = AUTO if setup.recompute == AUTO else setup.recomputed.policy
    words += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    if "zero.stage" not in free:
        words += ["--stage", str(setup.stage)]
    if "offload.placement" not in free:
        words += ["--offload", str(setup.offload)]
    return words


def unfit(choice: Choice, written: Callable[[Candidate], str]) -> str:
    """Return why nothing fits, with the nearest choice as it is `written` by hand; "" if something does."""
    nearest = choice.nearest
    if choice.best is not None or nearest is None:
        return ""
    over = ", ".join(f"{format_bytes(nbytes)} more {tier}" for tier, nbytes in nearest.over.items())
    lacks = f"needs {over}" if over else f"leaves less free than {LEFT_FREE}"
    return f"no stage, placement or recomputation fits this machine; nearest: {written(nearest)}, which {lacks}"


class NothingFits(UserError):
    """No choice fits, with exit code 3; `nearest` is the one that exceeds the machine least."""

    def __init__(self, fact: str, hint: str, nearest: Candidate):
        super().__init__(fact, hint=hint, exit_code=DOES_NOT_FIT)
        self.nearest = nearest


def refuse(choice: Choice, source: str) -> None:
    """Raise NothingFits if nothing fits."""
    if fact := unfit(choice, flags):
        assert choice.nearest is not None
        hint = f"zerocli fit {quoted(source)} --hardware h100,h200,b200, for other machines"
        raise NothingFits(fact, hint, choice.nearest)


def as_dict(choice: Choice, hardware: Hardware, command: list[str], free: frozenset[str]) -> dict[str, Any]:
    """Return the choice and what it was made from, as JSON-able values."""
    best = choice.best
    assert best is not None
    return {
        "schema": 1,
        "flags": flags(best, free),
        "seconds": best.estimate.seconds if best.estimate else None,
        "needed": {tier: best.plan.needed(tier) for tier in best.available},
        "hardware": dataclasses.asdict(hardware),
        "replay": " ".join(map(quoted, command)) or None,
    }
