"""What the command line of `zerocli fit` asks: the model and its keys, the machine, and the setup to plan for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from zerocli import config as configs
from zerocli import machine
from zerocli.config import hub, with_dividing_batch
from zerocli.config.options import automatic_keys
from zerocli.console import printable
from zerocli.errors import UserError, quote
from zerocli.layout.sizes import count_of, parse_count, parse_memory
from zerocli.plan.blocks.inputs import Source
from zerocli.plan.memory.runtime import RUNTIME
from zerocli.plan.report.verdict import Budget
from zerocli.plan.search import largest
from zerocli.plan.setup import Setup, setup_of
from zerocli.plan.time.hardware import PRESETS, RATES, Hardware, preset, this_machine

DEFAULT_HARDWARE = "h100"
RANKS = 8
"""GPUs of a node, for the batch of a fine-tuning on several kinds of nodes."""
HIGHEST_PRICE = 1e12
"""Above it a price is a mistake, and the cost of a run could be beyond a float."""
LOWEST_RATE, HIGHEST_RATE = 1e-9, 1e9
"""Bounds of a rate that is given for the machine; beyond them the times of a step could be beyond a float."""


@dataclasses.dataclass(frozen=True)
class Question:
    """What the command line asks, apart from the machine."""

    source: Source
    given: Mapping[str, Any]
    runtime: dict[str, int]
    rates: dict[str, Any]
    largest: str
    """Of `--max`: model, batch or seq; empty without it."""
    trace: bool
    budget: Budget | None


def model_and_kind(model: str, kind: str | None) -> tuple[str, str]:
    """Return MODEL and what `--max` asks for; `fit --max llama3-8b` names a MODEL, as if the value were left out."""
    if kind is None or kind in largest.KINDS:
        return model, kind or ""
    if model:
        raise UserError(f"--max {printable(kind)}: there are {', '.join(largest.KINDS)}", hint="--max batch")
    return kind, "model"


def budget_of(given: Mapping[str, Any]) -> Budget | None:
    if given["tokens"] is None:
        if given["price"] is not None:
            raise UserError("--price is of a run's GPU-hours: how many tokens?", hint="--tokens 1T --price 2.5")
        return None
    if given["price"] is not None and given["price"] >= HIGHEST_PRICE:
        raise UserError(f"--price {given['price']:g}: a GPU-hour costs less than {HIGHEST_PRICE:g}", hint="--price 2.5")
    try:
        return Budget(parse_count(given["tokens"]), given["price"] or 0.0)
    except ValueError as error:
        raise UserError(f"--tokens {str(error).replace('parameter count', 'number of tokens')}") from error


def split_sets(sets: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, int], dict[str, Any]]:
    """Return (the sets of config keys, overrides of the runtime's constants, of the hardware's rates)."""
    runtime: dict[str, int] = {}
    rates: dict[str, Any] = {}
    kept = []
    for text in sets:
        key, _, value = text.partition("=")
        section, _, name = key.strip().partition(".")
        known = {"runtime": tuple(RUNTIME), "hardware": RATES}.get(section)
        if known is None:
            kept.append(text)
            continue
        if name not in known:
            raise UserError(f"--set {text}: there is no {section}.{name}; there are {', '.join(known)}")
        if section == "runtime":
            runtime[name] = parse_size(f"--set {key.strip()}", value, zero=True)
        else:
            rates[name] = _rate(f"--set {key.strip()}", value, zero=name in ("products", "adam_beside"))
    return tuple(kept), runtime, rates


def _rate(flag: str, text: str, zero: bool = False) -> float:
    """Return a rate in GB/s (tflops: TFLOPS; adam: billions of parameters per second); `zero`: 0 is not measured."""
    try:
        rate = float(text)
    except ValueError as error:
        raise UserError(f"{flag}={text}: not a number", hint=f"{flag}=4.5") from error
    if not LOWEST_RATE <= rate < HIGHEST_RATE and not (zero and rate == 0):
        raise UserError(
            f"{flag}={text}: a rate is above 0, in GB/s, from {LOWEST_RATE:g} to {HIGHEST_RATE:g}", hint=f"{flag}=4.5"
        )
    return rate


def flags_of(given: Mapping[str, Any]) -> dict[str, object]:
    """Return the config keys that flags set; ranks are checked with the machine."""
    flags = {"train.batch": given["batch"], "train.seq": given["seq"], "train.precision": given["precision"]}
    return {**flags, "offload.placement": given["offload"], "lora.rank": given["lora"], "lora.base": given["base"]}


def free_keys(given: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys that `--auto` chooses: those that the command line does not set."""
    others = {"zero.stage": given["stage"], "parallel.shard_ranks": given["shard_ranks"]}
    return automatic_keys(given["sets"], {**flags_of(given), **others})


def as_trained(model: str, sets: tuple[str, ...], given: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """Return the shape of a step that `train` gives to a folder of weights, as texts for `--set`, and a note on it."""
    from zerocli.run import recipe

    flags = flags_of(given)
    try:
        config = configs.load(model, sets, flags) if hub.stored(model) else None
    except UserError:  # `train` does not take it; its memory may be known all the same
        config = None
    if config is None or not recipe.is_fine_tuning(config):
        return (), []
    lengths = recipe.measure(config) if config.data.path else recipe.Lengths()
    several = "," in (given["hardware"] or "")
    ranks = given["ranks"] or config.parallel.ranks or (RANKS if several else choose_hardware(given)[0].gpus)
    plan = recipe.Plan(ranks, auto=bool(given["auto"]))
    if given["tp"]:
        config = recipe.with_values(config, [recipe.Default("parallel.tp", given["tp"], "")])
    known = configs.given_keys(model, sets, flags)
    made = recipe.shape(config, known, plan, lengths)
    saves = [recipe.Default("checkpoint.every", recipe.SAVE_SHARE, "")] if "checkpoint.every" not in known else []
    texts = tuple(each.text for each in (*made, *saves))
    if not made:
        return texts, []
    shown = ", ".join(f"{each.key.partition('.')[2]} {each.value} ({each.reason})" for each in made)
    data = "" if config.data.path else "; --set data.path=FILE takes it from your data"
    return texts, [f"as train does: {shown}{data}"]


# -- the machine -------------------------------------------------------------------------------------------------------


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
