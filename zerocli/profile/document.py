"""The document of a profile: all ranks' records combined, the plan's prediction, and the step's seconds by cause.

Device rows are those of the rank with the highest peak; rows of host memory and disks are the sum over all ranks of the
node that uses the most, as in a plan.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerocli.config import Config, to_dict
from zerocli.errors import UserError
from zerocli.layout.categories import CATEGORIES
from zerocli.plan.blocks.inputs import run_shape
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.resolve import run_model
from zerocli.plan.rows import Plan
from zerocli.plan.setup import setup_of
from zerocli.plan.time import bench
from zerocli.plan.time.compute import model_flops
from zerocli.plan.time.hardware import this_machine
from zerocli.plan.time.seconds import estimate
from zerocli.profile.finding import finding
from zerocli.profile.ledger import TIERS, UNATTRIBUTED
from zerocli.profile.peak_rates import peak_tflops
from zerocli.profile.spread import spread

SCHEMA = 1
STATES = ("parameters", "gradients", "optimizer_states")
"""Categories that are predicted for a model of which only the parameters are known."""
NO_TIERS = ("hbm", "system", "node", "time")
"""Keys of a rank's record that are not tiers other than the device."""
CAUSES = ("collectives", "transfers", "optimizer", "data")


def assemble(
    config: Config, everyone: Sequence[dict[str, Any]], lines: Sequence[Mapping[str, Any]], facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the document; `lines` are a run's metrics, `facts` what its observer knows besides the records."""
    notes = list(facts.pop("notes", []))
    notes += [f"adapted before step {line['step']}: {line['adapted']}" for line in lines if line.get("adapted")]
    record = join(everyone)
    tiers = [tier for tier in record if tier != "system"]
    plan, problem = predict(config, facts)
    if problem:
        notes.append(problem)
    expected = expect(config, plan, facts)
    if plan is not None and facts["device"] == "cpu":  # there dram is what the tiers have; gloo's memory is no tier's
        kept = tuple(row for row in plan.rows if (row.tier, row.category) != ("dram", "runtime"))
        plan = dataclasses.replace(plan, rows=kept)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": "profile",
        "config": config.name,
        "settings": to_dict(config),
        **{name: facts[name] for name in ("device", "gpu", "precision", "parameters", "ranks", "tp", "followed")},
        "rows": rows(record, tiers, plan),
        "peak": {
            tier: {
                "predicted": plan.needed(tier) if plan is not None and plan.whole else None,
                "measured": record[tier]["measured"],
                "moment": record[tier].get("moment", ""),
                "holders": [
                    {"name": name, "category": category, "bytes": nbytes}
                    for name, category, nbytes in record[tier]["holders"]
                ],
            }
            for tier in tiers
        },
        "steps": [lines[0]["step"], lines[-1]["step"]],
        "step": seconds(config, lines, facts) | {"predicted": expected},
        "system": record["system"],
        "boundaries": facts.get("boundaries", []),
        "spread": spread(lines),
        "losses": [line["loss"] if math.isfinite(line["loss"]) else None for line in lines],  # JSON has no NaN
        "notes": notes,
        "everyone": [of_rank(rank, each) for rank, each in enumerate(everyone)],
    }
    document["finding"] = finding(document, config, facts, plan, predict)
    return document | {name: facts[name] for name in ("capacity", "units", "timeline") if name in facts}


def of_rank(rank: int, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return one rank's peaks and seconds; seconds are None where only memory was recorded."""
    timed = record.get("time") or dict.fromkeys(("seconds", "compute", "wait"))
    peaks = {tier: record[tier]["measured"] for tier in TIERS}
    return {"rank": rank, "node": record["node"], **peaks, "rss_peak": record["system"]["rss_peak"], **timed}


def join(everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one record of the tiers, combined from all ranks' records."""
    record: dict[str, Any] = {"hbm": max(everyone, key=lambda rank: rank["hbm"]["measured"])["hbm"]}
    nodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for rank in everyone:
        nodes[rank["node"]].append(rank)
    for tier in dict.fromkeys((*TIERS[1:], *(name for rank in everyone for name in rank if name not in NO_TIERS))):
        used = [[rank[tier] for rank in node if tier in rank] for node in nodes.values()]
        ranks = max(used, key=lambda node: sum(rank["measured"] for rank in node))
        total: Counter[str] = Counter()
        for rank in ranks:
            total.update(rank["rows"])
        held: Counter[tuple[str, str]] = Counter()
        for rank in ranks:
            for name, category, nbytes in rank["holders"]:
                held[name, category] += nbytes
        record[tier] = {
            "rows": dict(total),
            "measured": sum(rank["measured"] for rank in ranks),
            "holders": [(name, category, n) for (name, category), n in held.most_common(10)],
        }
    keys = everyone[0]["system"]
    record["system"] = {key: max(rank["system"][key] for rank in everyone) for key in keys}
    return record


def predict(config: Config, facts: Mapping[str, Any]) -> tuple[Plan | None, str]:
    """Return the plan of the run, or None and why there is none."""
    changes: dict[str, object] = {
        "ranks": facts["ranks"],
        "ranks_per_node": facts["ranks_per_node"],
        "precision": facts["precision"],
        "device": facts["device"],
        "recompute": facts["recompute"],
        "checkpoints": 0,  # a profile records the tiers, not the run folder
    }
    if facts["device"] == "cuda":
        changes["update"] = "cpu" if facts["update_on_cpu"] else "both" if facts.get("cpu_share") else "stream"
    try:
        setup = setup_of(config, **changes)
        counted = config.model.external
        model = Counted(facts["parameters"], facts.get("frozen", 0)) if counted else run_model(config, setup)
        plan = model.plan(setup)
    except UserError as error:
        return None, f"nothing is predicted: {error}"
    return plan, "" if plan.whole else "of a model of other code than zerocli's own, only model states are predicted"


def expect(config: Config, plan: Plan | None, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the estimated seconds of a step and of its phases on this machine; None without a plan or a GPU."""
    if plan is None or config.model.external or facts["device"] != "cuda":
        return None
    paths = config.offload.nvme_path
    known = bench.gather(paths)
    hardware = this_machine(known, bench.remembered(known, paths))
    if hardware is None:
        return None
    computed = run_model(config, plan.setup).computed(plan.setup, hardware.host)
    assert computed is not None  # it is a formula or a trace
    timed = estimate(plan, computed, hardware)
    return {"seconds": timed.seconds, "phases": timed.phases, "bound": timed.bound, "rates": hardware.source}


def config_shape(config: Config) -> Shape | None:
    """Return the shape of a config's model; None if other code than ours builds it."""
    return None if config.model.external else run_shape(config)


def rows(record: Mapping[str, Any], tiers: Iterable[str], plan: Plan | None) -> list[dict[str, Any]]:
    """Return the rows, predicted and measured; for each tier in use they and `unattributed` add up to its peak."""
    found = []
    for tier in tiers:
        measured = record[tier]["rows"]
        for category in CATEGORIES:
            foreseen = plan is not None and (plan.whole or category in STATES)
            predicted = plan.of(category, tier) if plan is not None and foreseen else None
            if measured.get(category) or predicted:
                row = {"category": category, "tier": tier, "predicted": predicted}
                found.append(row | {"measured": measured.get(category, 0)})
        rest = record[tier]["measured"] - sum(measured.get(category, 0) for category in CATEGORIES)
        if rest or record[tier]["measured"]:
            found.append({"category": UNATTRIBUTED, "tier": tier, "predicted": None, "measured": rest})
    return found


def seconds(config: Config, lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean seconds per step by cause, over the undisturbed timed steps (else all but the first)."""
    timed = set(facts.get("timed") or [line["step"] for line in lines[1:] or lines])  # a set: there may be millions
    chosen = [line for line in lines if line["step"] in timed]
    if not chosen:
        return {"seconds": None, "compute": None, "wait": None}
    total = _mean(line["seconds"] for line in chosen)
    waits = {cause: _mean(line["wait"].get(cause, 0.0) for line in chosen) for cause in CAUSES}
    if "waits" in facts:  # from the same clock as `compute`: together they are all of its time
        waits = {cause: facts["waits"].get(cause, 0.0) for cause in CAUSES}
    wait = sum(waits.values())
    compute = facts.get("compute", max(0.0, total - wait))
    tokens = _mean(line["tokens"] for line in chosen)
    step: dict[str, Any] = {
        "seconds": total,
        "compute": compute,
        "wait": wait,
        "waits": waits,
        "steps": len(chosen),
        "tokens_per_second": tokens / total,
        "overlap": facts.get("overlap"),
        "phases": facts.get("phases", {}),
        "links": facts.get("links", []),
    }
    return step | utilisation(config, facts, tokens, total)


def utilisation(config: Config, facts: Mapping[str, Any], tokens: float, total: float) -> dict[str, Any]:
    """Return the model's operations per second and rank, and their share of the GPU's peak, None if unknown."""
    shape = config_shape(config)
    if shape is None:
        return {"tflops": None, "utilisation": None, "best_tflops": None}
    rate = model_flops(shape, config.train.seq, round(tokens)) / total / facts["ranks"] / 1e12
    best = peak_tflops(facts["gpu"], facts["precision"]) if facts["gpu"] else None
    return {"tflops": rate, "utilisation": rate / best if best else None, "best_tflops": best}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
