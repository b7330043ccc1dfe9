"""What a profile finds, in one sentence: what holds most of the device's memory, what would save it, and the waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from zerocli.config import Config
from zerocli.config.placement import read_placement
from zerocli.layout.sizes import format_bytes
from zerocli.plan.rows import Plan
from zerocli.profile import table
from zerocli.profile.ledger import UNATTRIBUTED

MIN_WAIT_SHARE = 0.2
"""From this share of a step on, its waits are named."""

Predict = Callable[[Config, Mapping[str, Any]], tuple[Plan | None, str]]


def finding(
    document: Mapping[str, Any], config: Config, facts: Mapping[str, Any], plan: Plan | None, predict: Predict
) -> str:
    """Return the sentence; empty if neither memory nor seconds are known. `predict` plans a changed config."""
    parts = [_memory(document, config, facts, plan, predict), _waits(document["step"])]
    return "; ".join(part for part in parts if part)


def _memory(
    document: Mapping[str, Any], config: Config, facts: Mapping[str, Any], plan: Plan | None, predict: Predict
) -> str:
    kind = "measured" if table.whole(document, "hbm") else "predicted"
    held = {row["category"]: row[kind] or 0 for row in document["rows"] if row["tier"] == "hbm"}
    peak = document["peak"]["hbm"][kind]
    held.pop(UNATTRIBUTED, None)
    if not peak or not any(held.values()):
        return ""
    most = max(held, key=lambda category: held[category])
    fact = f"{100 * held[most] / peak:.0f} % of the device's peak of {format_bytes(peak)} are {most.replace('_', ' ')}"
    for words, changed, more in changes(config, facts, most):
        other, _ = predict(changed, {**facts, **more})
        saved = plan.needed("hbm") - other.needed("hbm") if plan is not None and plan.whole and other is not None else 0
        if saved > 0:
            return f"{fact}; {words} would save {format_bytes(saved)}"
    return fact


def changes(config: Config, facts: Mapping[str, Any], category: str) -> list[tuple[str, Config, dict[str, Any]]]:
    """Return what may make a category smaller, in order: in words, as a config, and as changed facts."""
    stage = config.zero.stage
    found: list[tuple[str, Config, dict[str, Any]]] = []

    def staged(number: int, placement: str = "") -> Config:
        placed = read_placement(placement) if placement else config.offload.placement
        return config.with_values({"zero.stage": number, "offload.placement": placed})

    needed = {"optimizer_states": 1, "gradients": 2, "parameters": 3}.get(category, 0)
    if stage < needed and facts["ranks"] > facts["tp"]:
        found.append((f"--stage {needed}", staged(needed), {}))
    if category == "activations" and config.activations.policy != "recompute":
        policy = {"activations.policy": "recompute"}
        words = "recomputation (--set activations.policy=recompute)"
        found.append((words, config.with_values(policy), {"recompute": True}))
    if category in ("activations", "logits") and config.train.batch % 2 == 0:
        train = config.train
        halved = {"train.batch": train.batch // 2}
        if not train.global_batch:  # else accumulation follows from it
            halved["train.accumulate"] = 2 * train.accumulate
        words = f"--batch {train.batch // 2} with twice the --accumulate"
        found.append((words, config.with_values(halved), {}))
    if facts["device"] == "cuda" and not config.offload.placement:
        kind = {"optimizer_states": "optimizer", "gradients": "grads", "parameters": "params"}.get(category, "")
        if kind:
            number = max(stage, needed)
            words = f"--offload {kind}=cpu" + (f" --stage {number}" if number != stage else "")
            found.append((words, staged(number, f"{kind}=cpu"), {}))
    return found


def _waits(step: Mapping[str, Any]) -> str:
    """Return the largest cause of waiting, if the waits are a good part of the step."""
    waits = {cause: seconds for cause, seconds in (step.get("waits") or {}).items() if seconds}
    if not waits or not step["seconds"] or sum(waits.values()) < MIN_WAIT_SHARE * step["seconds"]:
        return ""
    cause = max(waits, key=lambda name: waits[name])
    return f"{100 * waits[cause] / step['seconds']:.0f} % of a step's time is waiting for {cause}"
