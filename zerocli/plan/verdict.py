"""The verdict of `zerocli fit`: as a JSON document, and as a text table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from zerocli.layout.sizes import count_of, format_bytes, format_count
from zerocli.plan.hardware import Hardware
from zerocli.plan.rows import TIERS, WORDS
from zerocli.plan.search import Candidate, Model
from zerocli.plan.shape import Shape

UNKNOWN = "capacity unknown"
"""Shown for a tier of another package."""


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
    largest: tuple[Shape | None, int] | None = None
    """With `--max`: the largest shape, and the largest count by model states alone."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.best is not None

    @property
    def numel(self) -> int:
        return self.model if isinstance(self.model, int) else self.model.numel

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
        return f"{ground}: about {_seconds(timed.seconds)} per step, bound by {timed.bound}"


# -- for programs ------------------------------------------------------------------------------------------------------


def document(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as JSON-able values."""
    shape = verdict.model if isinstance(verdict.model, Shape) else None
    made: dict[str, Any] = {
        "schema": 1,
        "model": {
            "name": verdict.name,
            "parameters": verdict.numel,
            "active_parameters": shape.active_numel if shape else verdict.numel,
            "whole": not isinstance(verdict.model, int),
        },
        "hardware": dataclasses.asdict(verdict.hardware),
        "fits": verdict.fits,
        "best": None,
        "candidates": [_candidate(each, shape) for each in verdict.candidates],
        "change": None,
        "notes": list(verdict.notes),
    }
    if verdict.best is not None:
        index = verdict.candidates.index(verdict.best)
        setup = verdict.best.setup
        made["best"] = {"index": index, "stage": setup.stage, "offload": str(setup.offload), "reason": verdict.reason}
    if verdict.change is not None:
        made["change"] = {"arguments": verdict.change[0], **_candidate(verdict.change[1], shape)}
    if verdict.largest is not None:
        grown, count = verdict.largest
        made["max"] = {
            "parameters": grown.numel if grown else None,
            "model_states_parameters": count,
            "shape": {"layers": grown.layers, "hidden": grown.hidden, "heads": grown.heads} if grown else None,
        }
    return made


def _policy(candidate: Candidate) -> str:
    return "auto" if candidate.plan.activations else "recompute" if candidate.setup.recomputes else "keep"


def _candidate(candidate: Candidate, shape: Shape | None) -> dict[str, Any]:
    plan, setup, timed = candidate.plan, candidate.setup, candidate.estimate
    return {
        "stage": setup.stage,
        "offload": str(setup.offload),
        "ranks": setup.ranks,
        "tp": setup.tp,
        "ranks_per_node": setup.ranks_per_node,
        "batch": setup.batch,
        "seq": setup.seq,
        "precision": setup.precision,
        "policy": _policy(candidate),
        "recomputed": setup.num_recomputed(shape.layers) if shape else None,
        "activations": plan.activations or None,
        "fits": candidate.fits,
        "tiers": {name: {"needed": plan.needed(name), "available": has} for name, has in candidate.available.items()},
        "over": candidate.over,
        "peaks": plan.peaks,
        "moment": plan.moment,
        "rows": [row.as_dict() for row in plan.rows],
        "checkpoints": plan.saved.as_dict() if plan.saved else None,
        "step": None
        if timed is None
        else {"seconds": timed.seconds, "parts": timed.parts, "bound": timed.bound, "estimate": True},
    }


# -- for people --------------------------------------------------------------------------------------------------------


def render(verdict: Verdict, explain: bool, colour: bool) -> str:
    """Return the verdict as text, with colour if the terminal supports it."""

    def paint(text: str, **style: Any) -> str:
        return click.style(text, **style) if colour else text

    first = verdict.candidates[0].setup
    lines = [_title(verdict), _terms(verdict)]
    lines += [f"  {note}" for note in verdict.notes]
    lines += ["", *_table(verdict, paint), ""]
    shown = verdict.best or (verdict.candidates[0] if len(verdict.candidates) == 1 else None)
    if verdict.best is not None:
        setup = verdict.best.setup
        offload = f" --offload {setup.offload}" if setup.offload else ""
        lines.append(paint(f"fits: --stage {setup.stage}{offload}", fg="green", bold=True) + f" ({verdict.reason})")
        for tier, nbytes in verdict.best.unknown.items():
            lines.append(f"  {tier}: {format_bytes(nbytes)} needed per node, {UNKNOWN}; its time is not estimated")
        if verdict.best.plan.activations:
            lines.append(f"  activations: {verdict.best.plan.activations}")
        if verdict.best.plan.moment:
            lines.append(f"  its GPU peak comes at: {verdict.best.plan.moment}")
    else:
        lines.append(paint("does not fit", fg="red", bold=True) + f": {_nearest(verdict.candidates)}")
        if verdict.largest is not None:
            lines.append("nothing of this shape fits")
        elif verdict.change is not None:
            lines.append(f"the smallest change that fits: {verdict.change[0]}")
        else:
            lines.append(f"no change of stage, placement, batch or ranks (from {first.ranks} on) was found that fits")
    if verdict.largest is not None:
        lines += ["", *_max(verdict.largest)]
    if explain:
        lines += ["", *_explain(shown or min(verdict.candidates, key=_excess))]
    return "\n".join(lines)


def _title(verdict: Verdict) -> str:
    model = verdict.model
    count = f"{verdict.numel:,} parameters"
    if isinstance(model, int):
        return f"{verdict.name}: {count}; model states alone"
    if not isinstance(model, Shape):
        return f"{verdict.name}: {count} in {len(model.parts)} units; traced"
    active = f", {format_count(model.active_numel)} of them active" if model.experts else ""
    return f"{verdict.name}: {count}{active} ({model.family}, {model.layers} x {model.hidden})"


def _terms(verdict: Verdict) -> str:
    setup, hardware = verdict.candidates[0].setup, verdict.hardware
    tokens = (
        ""
        if isinstance(verdict.model, int)
        else f", batch {setup.batch} x seq {setup.seq}, {_policy(verdict.candidates[0])}"
    )
    tp = f", tp {setup.tp}" if setup.tp > 1 else ""
    room = f"{format_bytes(hardware.gpu_memory)} per GPU"
    room += f", {format_bytes(hardware.host_memory)} and {format_bytes(hardware.nvme_space)} nvme per node"
    return f"{count_of(setup.ranks, 'rank')}, {setup.local_ranks} per node{tp}, {setup.precision}{tokens}; {room}"


def _table(verdict: Verdict, paint: Callable[..., str]) -> list[str]:
    chosen = any(each.plan.activations for each in verdict.candidates)
    head = ["stage", "offload", "GPU", "host", "nvme", "step", "bound by", "verdict"]
    head[2:2] = ["recomputed"] if chosen else []
    rows = [head]
    for each in verdict.candidates:
        timed = each.estimate
        sizes = [format_bytes(each.plan.needed(tier)) if each.plan.needed(tier) else "-" for tier in TIERS]
        over = ", ".join(f"{WORDS[tier]} over by {format_bytes(nbytes)}" for tier, nbytes in each.over.items())
        best = "fastest" if timed is not None else "first"
        words = best if each is verdict.best else "fits" if each.fits else over
        time = ["-", "-"] if timed is None else [f"~{_seconds(timed.seconds)}", timed.bound]
        words += "".join(f", {tier} {UNKNOWN}" for tier in each.unknown if each.fits)
        again = [_recomputed(each, verdict.model)] if chosen else []
        rows.append([str(each.setup.stage), str(each.setup.offload) or "-", *again, *sizes, *time, words])
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    lines = []
    for number, row in enumerate(rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if number:
            each = verdict.candidates[number - 1]
            text = paint(text, fg="green" if each.fits else "red", bold=each is verdict.best)
        lines.append(text)
    return lines


def _recomputed(candidate: Candidate, model: Model) -> str:
    if not isinstance(model, Shape):
        return "all" if candidate.setup.recomputes else "none"
    return f"{candidate.setup.num_recomputed(model.layers)} of {model.layers}"


def _excess(candidate: Candidate) -> int:
    return sum(candidate.over.values())


def _nearest(candidates: list[Candidate]) -> str:
    nearest = min(candidates, key=_excess)
    over = ", ".join(f"{WORDS[tier]} by {format_bytes(nbytes)}" for tier, nbytes in nearest.over.items())
    offload = f" --offload {nearest.setup.offload}" if nearest.setup.offload else ""
    moment = f" (peak at: {nearest.plan.moment})" if nearest.plan.moment else ""
    return f"the nearest is --stage {nearest.setup.stage}{offload}, over on the {over}{moment}"


def _explain(candidate: Candidate) -> list[str]:
    plan, setup = candidate.plan, candidate.setup
    offload = f" --offload {setup.offload}" if setup.offload else ""
    lines = [f"--stage {setup.stage}{offload}: every row (GPU: per GPU; host and nvme: per node)"]
    lines += plan.lines()
    if candidate.estimate is not None:
        parts = ", ".join(f"{name} {_seconds(s)}" for name, s in candidate.estimate.parts.items() if s)
        lines.append(f"  estimated step: {_seconds(candidate.estimate.seconds)}; alone each would take: {parts}")
    return lines


def _max(largest: tuple[Shape | None, int]) -> list[str]:
    grown, count = largest
    lines = []
    if grown is not None:
        lines.append(f"largest of this shape: {format_count(grown.numel)} ({grown.layers} x {grown.hidden})")
    lines.append(f"largest by model states alone: {format_count(count)} parameters")
    return lines


def _seconds(seconds: float) -> str:
    for limit, unit, scale in ((1e-3, "us", 1e6), (1.0, "ms", 1e3), (600.0, "s", 1.0)):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds / 60:.3g} min"
