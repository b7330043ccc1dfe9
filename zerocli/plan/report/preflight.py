"""The preflight of a run: its plan compared with the memory of this machine. Needs torch only to trace a model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.placement import ACTIVATIONS, HBM
from zerocli import machine
from zerocli.config import AUTO, Config, hub, quantized
from zerocli.config.file import read_values
from zerocli.console import quoted
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout.categories import STATES, model_states
from zerocli.layout.sizes import count_of, format_bytes
from zerocli.machine import Gpu
from zerocli.plan.memory.runtime import constant
from zerocli.plan.models.resolve import run_model
from zerocli.plan.rows import Plan
from zerocli.plan.search import candidates as search
from zerocli.plan.search.recompute import plan_decided, room_here
from zerocli.plan.setup import Setup, setup_of
from zerocli.plan.time.hardware import USABLE

ACCURACY = 0.05
"""Share by which a plan may exceed what a run takes (docs/accuracy.md): a run within it is not refused."""
AT_MOST = ", at most"
"""In the formula of rows that a run allocates on demand: they are no reason to refuse it."""
COMPILED_SHARE = 0.5
"""Share of eager blocks' activations, which plans are of, that compiled blocks are taken to keep at least."""
WORDS = {"hbm": "GPU memory", "dram": "host memory", "nvme": "disk space"}


@dataclass(frozen=True)
class Room:
    """What a run needs of one tier of this machine (hbm: per GPU; dram and nvme: in all), and what there is."""

    tier: str
    needed: int
    available: int

    @property
    def fits(self) -> bool:
        return self.needed * (1 - ACCURACY) <= self.available

    def __str__(self) -> str:
        each = " per GPU" if self.tier == HBM else ""
        return f"{WORDS[self.tier]}: {format_bytes(self.needed)} needed{each}, {format_bytes(self.available)} available"


@dataclass(frozen=True)
class Preflight:
    """The plan of a run on this machine, tier by tier; `plan` is None for a model of other code than ours."""

    setup: Setup
    plan: Plan | None
    rooms: tuple[Room, ...]

    @property
    def fits(self) -> bool:
        return all(room.fits for room in self.rooms)

    def as_dict(self) -> dict[str, Any]:
        """Return the keys that the verdict adds to a JSON document."""
        tiers = {room.tier: {"needed": room.needed, "available": room.available} for room in self.rooms}
        return {"fits": self.fits, "tiers": tiers}

    def lines(self) -> list[str]:
        """Return the verdict as text: one line for the result, one for each tier."""
        ranks = count_of(self.setup.local_ranks, "rank")
        part = "" if self.plan is not None else "; model states alone (the model is only counted)"
        head = f"{'fits' if self.fits else 'does not fit'} this machine ({ranks}{part})"
        return [head, *(f"  {room}" for room in self.rooms)]


def preflight(config: Config, gpus: Sequence[Gpu], ranks_per_node: int = 0, numel: int = 0) -> Preflight:
    """Return the verdict on a training config with its ranks set, for nodes like this machine.

    `numel` is the number of parameters of a factory's model: then only model states are compared. `ranks_per_node` of 0
    means all ranks, or with GPUs one per GPU.
    """
    setup, there = _here(config, gpus, ranks_per_node)
    if config.model.external:
        return Preflight(setup, None, _compare(setup, _states(setup, numel), there))
    plan = plan_decided(run_model(config, setup), setup, _room(config, setup, there))
    return Preflight(plan.setup, plan, _compare(setup, _certain(plan, config), there))


def _here(config: Config, gpus: Sequence[Gpu], ranks_per_node: int) -> tuple[Setup, dict[str, int]]:
    """Return the setup of a run on nodes like this machine, and what is there on each tier."""
    ranks = max(1, config.parallel.ranks)
    device = "cuda" if gpus else "cpu"
    if not ranks_per_node:
        several = gpus and ranks > len(gpus) and ranks % len(gpus) == 0 and os.environ.get("ZEROCLI_SHARE_GPU") != "1"
        ranks_per_node = len(gpus) if several else ranks
    setup = setup_of(config, device=device, ranks=ranks, ranks_per_node=ranks_per_node)
    return setup, _available(config, setup, gpus)


def plan_config(config: Config, device: str) -> Plan | None:
    """Return the plan of a training config on one node of such devices; None for a foreign model."""
    if config.model.external:
        return None
    ranks = max(1, config.parallel.ranks)
    setup = setup_of(config, device=device, ranks=ranks, ranks_per_node=ranks)
    room = room_here(device, ranks, config.train.gpu_memory) if setup.recompute == AUTO else 0
    return plan_decided(run_model(config, setup), setup, room)


def refuse(config: Config, gpus: Sequence[Gpu], ranks_per_node: int = 0, host: bool = True) -> None:
    """Raise UserError with exit code 3 if the plan says that a run cannot fit this machine.

    Of an external model only what its config.json says is known before it is built. Without `host`, host memory is not
    compared.
    """
    if config.model.external:
        _refuse_inputs(config, gpus, ranks_per_node, host)
        return
    try:
        found = preflight(config, gpus, ranks_per_node)
    except UserError as error:
        if error.exit_code == DOES_NOT_FIT:
            raise
        return  # the run says it in its own words, or knows better
    over = [room for room in found.rooms if not room.fits and (host or room.tier != "dram")]
    if over:
        moment = f" (peak at: {found.plan.moment})" if found.plan and found.plan.moment else ""
        facts = "; ".join(map(str, over)) + moment
        ranks = count_of(found.setup.local_ranks, "rank")
        raise UserError(
            f"does not fit this machine with {ranks}: {facts}",
            hint=smallest_change(config, found.setup, gpus),
            exit_code=DOES_NOT_FIT,
        )


def _refuse_inputs(config: Config, gpus: Sequence[Gpu], ranks_per_node: int, host: bool) -> None:
    """Raise UserError if the inputs of a folder's blocks alone, which any policy keeps on the device, do not fit."""
    if not config.model.folder:
        return
    setup, there = _here(config, gpus, ranks_per_node)
    values, _, _ = read_values(hub.config_path(config.model.folder))
    quantized.refuse(config.model.folder, values)
    width = hub.size_of(values, "hidden_size", "n_embd", "d_model") * setup.width
    each = setup.seq * width * hub.size_of(values, "num_hidden_layers", "n_layer", "num_layers")
    if ACTIVATIONS in setup.offload.shares or not each:
        return
    rooms = _compare(setup, {HBM: each * setup.batch, "dram": 0}, there)
    over = [room for room in rooms if not room.fits and (host or room.tier != "dram")]
    if over:
        fits = over[0].available // (each * (setup.local_ranks if over[0].tier == "dram" else 1))
        raise UserError(
            f"does not fit this machine: {over[0]} for the inputs of its blocks alone",
            hint=f"--batch {fits} at most, or a smaller --seq" if fits else "a smaller --seq",
            exit_code=DOES_NOT_FIT,
        )


def refuse_disks(config: Config, auto: frozenset[str] = frozenset()) -> None:
    """Raise UserError for folders that the nvme tier may use and cannot; `auto` are the keys that `--auto` chooses."""
    placement = config.offload.placement
    places = {placement.policy, *(share.tier for shares in placement.shares.values() for share in shares)}
    if "nvme" in places or "offload.placement" in auto:
        # Without a folder `--auto` chooses no disk, and a placement takes the working directory.
        refuse_folders(config.offload.nvme_path or ((os.getcwd(),) if "nvme" in places else ()))


def refuse_folders(paths: Sequence[str]) -> None:
    """Raise UserError if a folder of `--nvme-path` is missing, is a file or cannot be written; all of them at once."""
    facts, hints = [], []
    for path in paths:
        fact, hint = "", "--nvme-path with a folder that can be written"
        if os.path.isdir(path):
            try:
                tempfile.TemporaryFile(dir=path).close()
            except OSError as error:
                fact = f"no file can be written there ({error.strerror})"
        elif os.path.exists(path):
            fact = "is a file, not a folder"
        else:
            fact, hint = "there is no such folder", f"mkdir -p {quoted(path)}, if its name is right"
        if fact:
            facts.append(f"--nvme-path {path}: {fact}")
            hints.append(hint)
    if facts:
        raise UserError(*facts, hint="\n".join(dict.fromkeys(hints)))


def smallest_change(config: Config, setup: Setup, gpus: Sequence[Gpu]) -> str:
    """Return arguments with which the run fits this machine; if there are none, the command that shows others."""
    other = f"zerocli fit {quoted(config.model.source or config.name)} --hardware h100, for another machine"
    if config.model.external:
        return other
    there = _available(config, setup, gpus)
    model, disks = run_model(config, setup), config.offload.nvme_path
    for words, changed in search.changes(model, setup):
        if changed.ranks != setup.ranks or ("nvme" in str(changed.offload) and not disks):
            continue
        try:
            plan = plan_decided(model, changed, _room(config, changed, there))
        except UserError:
            continue
        if all(room.fits for room in _compare(changed, _certain(plan, config), there)):
            return words
    return other


# -- what is needed, and what is there ---------------------------------------------------------------------------------


def _certain(plan: Plan, config: Config) -> dict[str, int]:
    """Return the bytes that a run takes for certain: without saved checkpoints and buffers made on demand.

    Blocks that may be compiled may keep less than the plan says.
    """
    compiled = plan.setup.device == "cuda" and config.model.compile is not False
    found = dict.fromkeys(WORDS, 0)
    for row in plan.rows:
        if row.tier in found and row is not plan.saved and AT_MOST not in row.formula:
            share = COMPILED_SHARE if compiled and (row.category, row.tier) == ("activations", HBM) else 1
            found[row.tier] += int(row.nbytes * share)
    return found


def _states(setup: Setup, numel: int) -> dict[str, int]:
    """Return the model states of a count, with those that are divided between tiers left out."""
    widths = (setup.width, setup.grad_width, setup.state_width)
    held = model_states(-(-numel // setup.tp), setup.stage, setup.shards, *widths)
    needed = dict.fromkeys(WORDS, 0)
    placement = setup.placement()
    for kind, category in STATES.items():
        shares = placement.of(kind)
        if len(shares) == 1 and shares[0].tier in needed:
            needed[shares[0].tier] += held[category] * (1 if shares[0].tier == HBM else setup.local_ranks)
    return needed


def _compare(setup: Setup, needed: Mapping[str, int], there: Mapping[str, int]) -> tuple[Room, ...]:
    """Return the comparison by tier; without a GPU, a rank's device memory is host memory."""
    needed = dict(needed)
    if setup.device == "cpu":
        needed["dram"] += needed.pop(HBM) * setup.local_ranks
    return tuple(Room(tier, nbytes, there[tier]) for tier, nbytes in needed.items() if nbytes and tier in there)


def _available(config: Config, setup: Setup, gpus: Sequence[Gpu]) -> dict[str, int]:
    """Return what this machine has: hbm per rank, free host memory and the free space under `offload.nvme_path`."""
    there = {"dram": machine.memory().available}
    if gpus:
        there[HBM] = int(min(gpu.nbytes for gpu in gpus) * USABLE) // -(-setup.local_ranks // len(gpus))
        if cap := config.train.gpu_memory:  # a limit of torch's allocator, which these two are not part of
            beside = constant("context", setup.runtime) + constant("nccl", setup.runtime) * (setup.ranks > 1)
            there[HBM] = min(there[HBM], cap + beside)
    if config.offload.nvme_path:
        disks = {machine.file_system(path): machine.disk(path)[1] for path in config.offload.nvme_path}
        there["nvme"] = sum(disks.values())
    return there


def _room(config: Config, setup: Setup, there: Mapping[str, int]) -> int:
    """Return the memory by which `auto` decides, as `room_here` counts it."""
    room = there[HBM] if HBM in there else there["dram"] // setup.local_ranks
    return min(room, config.train.gpu_memory) if config.train.gpu_memory else room
