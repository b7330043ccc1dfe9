"""The verdict of `zerocli fit`, and its JSON document; `text.py` has the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerocli.layout.sizes import format_seconds
from zerocli.plan.models.model import Model
from zerocli.plan.search.candidates import Candidate, nearest
from zerocli.plan.search.largest import Largest
from zerocli.plan.search.recompute import MARGIN
from zerocli.plan.time.hardware import Hardware
from zerocli.plan.time.traffic import traffic


@dataclass(frozen=True)
class Budget:
    """A training run of this many tokens, and the price of a GPU-hour (0: none is given)."""

    tokens: int
    price: float = 0.0

    def of(self, candidate: Candidate) -> dict[str, Any] | None:
        """Return the days, GPU-hours and cost of the run by a candidate's estimate; None if it has none."""
        if candidate.estimate is None:
            return None
        seconds = self.tokens / candidate.estimate.tokens_per_second
        hours = seconds / 3600 * candidate.setup.ranks
        cost = hours * self.price if self.price else None
        return {"tokens": self.tokens, "days": seconds / 86400, "gpu_hours": hours, "cost": cost}


@dataclass(frozen=True)
class Verdict:
    """The candidates that `fit` evaluated, and its choice."""

    model: Model
    name: str
    hardware: Hardware
    candidates: list[Candidate]
    best: Candidate | None
    change: tuple[str, Candidate] | None
    """The smallest change that fits, if no candidate does."""
    largest: Largest | None = None
    """With `--max`: the largest model, batch or sequence."""
    notes: tuple[str, ...] = ()
    budget: Budget | None = None
    """With `--tokens`: what a whole training run takes."""
    chosen: frozenset[str] | None = None
    """With `--auto`: the keys that it chose."""
    groups: tuple[Candidate, ...] = ()
    """With `--shard-ranks`: the best candidate, or the nearest, with every size of group."""

    @property
    def fits(self) -> bool:
        return self.best is not None

    @property
    def seconds(self) -> float:
        """Seconds per step of the best candidate; 0 if there is no estimate."""
        return self.best.estimate.seconds if self.best is not None and self.best.estimate is not None else 0.0

    @property
    def nearest(self) -> Candidate:
        """The best candidate, or the one that exceeds the machine least."""
        return self.best or nearest(self.candidates)

    @property
    def reason(self) -> str:
        """Why the best candidate was chosen."""
        if self.best is None:
            return ""
        number = sum(each.fits for each in self.candidates)
        timed = self.best.estimate
        if timed is None:
            return "the first that fits: it moves least"
        ground = "the only one that fits" if number == 1 else f"the fastest of {number} that fit"
        return f"{ground}: about {format_seconds(timed.seconds)} per step, bound by {timed.bound}"


OF_SETUP = ("stage", "ranks", "tp", "shard_states", "ranks_per_node", "batch", "seq", "precision", "update")
"""Fields of a setup that a candidate's document has under their names."""


# -- for programs ------------------------------------------------------------------------------------------------------


def document(verdict: Verdict) -> dict[str, Any]:
    model = verdict.model
    made = unplanned(verdict.name, verdict.model, verdict.hardware, verdict.notes)
    made["fits"] = verdict.fits
    made["candidates"] = [_candidate(each, model, verdict.budget) for each in verdict.candidates]
    if verdict.best is not None:
        index = verdict.candidates.index(verdict.best)
        setup = verdict.best.setup
        made["best"] = {"index": index, "stage": setup.stage, "offload": str(setup.offload), "reason": verdict.reason}
    if verdict.change is not None:
        made["change"] = {"arguments": verdict.change[0], **_candidate(verdict.change[1], model, verdict.budget)}
    if verdict.groups:
        made["groups"] = [_candidate(each, model, verdict.budget) for each in verdict.groups]
    if verdict.largest is not None:
        made["max"] = _max(verdict.largest, verdict.budget)
    return made


def unplanned(name: str, model: Model | None, hardware: Hardware, notes: Sequence[str]) -> dict[str, Any]:
    """Return the document without candidates; `model` is None if it is not known before it is built."""
    return {
        "schema": 1,
        "model": {
            "name": name,
            "parameters": model.numel if model else None,
            "trainable_parameters": model.trainable_numel if model else None,
            "active_parameters": model.active_numel if model else None,
            "whole": model is None or model.whole,
        },
        "hardware": dataclasses.asdict(hardware),
        "fits": False,
        "best": None,
        "candidates": [],
        "change": None,
        "notes": list(notes),
    }


def _max(largest: Largest, budget: Budget | None) -> dict[str, Any]:
    grown, over = largest.dimensions, None
    if largest.next is not None:
        following = _candidate(largest.next, largest.next_model or largest.model, budget)
        over = {"value": largest.next_value, **following}
    return {
        "kind": largest.kind,
        "value": largest.value or None,
        "parameters": largest.model.numel if grown else None,
        "model_states_parameters": largest.count,
        "shape": grown,
        "margin": MARGIN,
        "next": over,
        "end": largest.end or None,
    }


def policy_of(candidate: Candidate) -> str:
    """Return the policy that was asked for; mixtures count as their most expensive part."""
    if candidate.plan.activations:
        return "auto"
    recompute = candidate.setup.recomputed
    return "recompute" if recompute.whole else "selective" if recompute.selective else "keep"


def _candidate(candidate: Candidate, model: Model, budget: Budget | None) -> dict[str, Any]:
    plan, setup, timed, moved = candidate.plan, candidate.setup, candidate.estimate, traffic(candidate.plan)
    blocks = model.recomputed(setup)
    return {
        **{name: getattr(setup, name) for name in OF_SETUP},
        "offload": str(setup.offload),
        "shard_ranks": setup.group,
        "comm": {"inside": moved.inside, "across": moved.across},
        "policy": policy_of(candidate),
        "recomputed": None if blocks is None else blocks.whole,
        "selective": None if blocks is None else blocks.selective,
        "exact_policy": setup.recomputed.policy,
        "compile": setup.compiled,
        "fits": candidate.fits,
        "tiers": {name: {"needed": plan.needed(name), "available": has} for name, has in candidate.available.items()},
        "used": candidate.used,
        "over": candidate.over,
        **{name: value for name, value in plan.as_dict().items() if name != "needed"},
        "step": None if timed is None else dataclasses.asdict(timed) | {"estimate": True},
        "training": budget.of(candidate) if budget else None,
    }


def machines_document(verdicts: Sequence[tuple[Hardware, Verdict | str]]) -> list[dict[str, Any]]:
    """Return one entry for each kind of machine: its best candidate, or the one that is nearest to fitting."""
    found: list[dict[str, Any]] = []
    for hardware, verdict in verdicts:
        entry: dict[str, Any] = {"hardware": hardware.name, "fits": False, "reason": verdict, "candidate": None}
        if isinstance(verdict, Verdict):
            entry |= {"fits": verdict.fits, "reason": verdict.reason or "does not fit"}
            entry["candidate"] = _candidate(verdict.nearest, verdict.model, verdict.budget)
            if verdict.largest is not None:
                entry["max"] = _max(verdict.largest, verdict.budget)
        found.append(entry)
    return found
