"""The verdict of `zerocli fit` as text: tables of at most 80 columns, numbers right-aligned."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import click

from zerocli.layout.sizes import count_of, format_bytes, format_count, format_seconds
from zerocli.plan.models.model import Model
from zerocli.plan.report.verdict import Verdict, policy_of
from zerocli.plan.rows import TIERS, WORDS
from zerocli.plan.search import automatic
from zerocli.plan.search.candidates import Candidate
from zerocli.plan.search.largest import Largest
from zerocli.plan.search.recompute import MARGIN
from zerocli.plan.time.hardware import Hardware
from zerocli.plan.time.traffic import traffic

COLUMNS = 80
UNKNOWN = "capacity unknown"
"""Shown for a tier of another package."""
HOST_BOUND = "launching takes longer than computing; it varies by up to a third, and a larger --batch hides it"
GIB = 2**30
LONGEST = 1e9
"""Numbers from this one on are shown with three digits and an exponent."""
WHAT = {"batch": "largest batch per rank and micro-step", "seq": "longest sequence, in tokens"}
NOTHING = {
    "model": "nothing of this shape fits",
    "batch": "not even the smallest batch fits",
    "seq": "not even the shortest sequence fits",
}
"""Said if `--max` finds nothing, by its kind."""

Paint = Callable[..., str]


def render(verdict: Verdict, explain: bool, colour: bool, command: str = "") -> str:
    """Return the verdict as text, with colour if the terminal supports it; `command` trains what fits."""
    paint = _painter(colour)
    lines = [*wrap(f"{verdict.name}: {verdict.model.summary}"), *wrap(_terms(verdict))]
    lines += [line for note in verdict.notes for line in wrap(note, "  ")]
    lines += ["", *_candidates(verdict, paint), *wrap(_legend(verdict)), ""]
    lines += _fits(verdict, verdict.best, paint) if verdict.best is not None else _does_not_fit(verdict, paint)
    if verdict.groups:
        lines += ["", *_groups(verdict, paint), ""]
    if command and verdict.best is not None:
        lines += ["to train it:", *command_lines(command)]
    if verdict.largest is not None:
        lines += ["", *_max(verdict.largest)]
    if explain:
        lines += ["", *_explain(verdict.nearest, verdict)]
    return "\n".join(lines)


def render_machines(verdicts: Sequence[tuple[Hardware, Verdict | str]], notes: Sequence[str], colour: bool) -> str:
    """Return one table row for each kind of machine, with its best candidate or the one nearest to fitting."""
    paint = _painter(colour)
    judged = [verdict for _, verdict in verdicts if isinstance(verdict, Verdict)]
    budget = next((each.budget for each in judged if each.budget), None)
    head = ["hardware", "ranks", "GPU GiB", "used", "step", "tokens/s"]
    kind = next((each.largest.kind for each in judged if each.largest), "")
    head += [f"max {kind}"] if kind else []
    beside = budget is not None and not kind  # with both, the table would be wider than 80 columns
    if budget and beside:
        head += ["days", *(["cost"] if budget.price else [])]
    rows, styles = [[*head, "verdict"]], [""]
    chosen: list[str] = []
    for hardware, verdict in verdicts:
        if isinstance(verdict, str):
            rows.append([hardware.name, *["-"] * (len(head) - 1), "refused"])
            chosen += wrap(f"{hardware.name}: {verdict}", "  ")
            styles.append("red")
            continue
        each = verdict.nearest
        timed = each.estimate
        times = ["-", "-"] if timed is None else [format_seconds(timed.seconds), f"{timed.tokens_per_second:,.0f}"]
        cells = [hardware.name, str(each.setup.ranks), _gib(each.plan.needed("hbm")), _percent(each), *times]
        if verdict.largest is not None:
            most = verdict.largest.value
            cells.append((format_count(most) if kind == "model" else f"{most:,}") if most else "-")
        taken = budget.of(each) if budget else None
        if taken and beside:
            cells += [_whole(taken["days"]), *([_whole(taken["cost"])] if taken["cost"] else [])]
        cells += ["-"] * (len(head) - len(cells))
        rows.append([*cells, "fits" if verdict.fits else _over(each)])
        after = ""
        if taken and budget and not beside:
            after = f"; {format_count(budget.tokens)} tokens in {_whole(taken['days'])} days"
            after += f", cost {_whole(taken['cost'])}" if taken["cost"] else ""
        nearest = "" if verdict.fits else "nearest is "
        arguments = _arguments(each, verdict)
        if len(f"  {hardware.name}: {nearest}{arguments}") <= COLUMNS:
            chosen += wrap(f"{hardware.name}: {nearest}{arguments} ({each.setup.precision}){after}", "  ")
        else:  # to paste
            chosen += wrap(f"{hardware.name} ({each.setup.precision}){after}:{nearest and ' nearest is'}", "  ")
            chosen += command_lines(arguments, "    ")
        styles.append("green" if verdict.fits else "red")
    lines = wrap(f"{judged[0].name}: {judged[0].model.summary}") if judged else []
    lines += [*(line for note in notes for line in wrap(note, "  ")), ""] if judged else []
    return "\n".join([*lines, *table(rows, styles, paint, words=(0, len(head))), "", *chosen])


def wrap(text: str, indent: str = "") -> list[str]:
    """Return the text in lines of at most 80 columns; words stay whole."""
    later = indent + "  "
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=len(text) > 10 * COLUMNS,
    ) or [""]


def command_lines(arguments: str, indent: str = "  ") -> list[str]:
    """Return arguments to paste in lines of at most 80 columns, each but the last with a `\\` at its end.

    They are broken before a flag, and before a value that is too long beside its flag.
    """
    lines: list[str] = []
    whole = re.split(r" (?=--)", arguments)
    short = COLUMNS - len(indent + " \\")
    for part in (word for each in whole for word in ([each] if len(each) <= short else each.split(" "))):
        if lines and len(lines[-1]) + len(part) + len(" " + " \\") <= COLUMNS:
            lines[-1] += f" {part}"
        else:
            lines.append(indent + part)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def table(rows: list[list[str]], styles: Sequence[str], paint: Paint, words: Sequence[int]) -> list[str]:
    """Return aligned rows of at most 80 columns: cells of the columns `words` are left-aligned and wrapped.

    Headings stay whole; where two spaces between columns do not do, there is one.
    """
    full = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for gap, least in ((2, 10), (1, 10), (1, 0)):  # narrower cells only where wider ones do not do
        widths = list(full)
        for at in sorted(words, key=lambda at: -full[at]):
            room = COLUMNS - sum(widths) - gap * (len(widths) - 1)
            widths[at] = max(min(full[at], least), len(rows[0][at]), widths[at] + min(0, room))
        if sum(widths) + gap * (len(widths) - 1) <= COLUMNS:
            break
    lines = []
    for row, style in zip(rows, styles, strict=True):
        cells = [_split(cell, widths[at]) if at in words else [cell] for at, cell in enumerate(row)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            sized = enumerate(zip(parts, widths, strict=True))
            aligned = (part.ljust(width) if at in words else part.rjust(width) for at, (part, width) in sized)
            text = (" " * gap).join(aligned).rstrip()
            lines.append(paint(text, fg=style.split()[0], bold="bold" in style) if style else text)
    return lines


def _split(text: str, width: int) -> list[str]:
    """Return a cell's lines: broken after a space, comma or sign where one is, else anywhere."""
    lines = [""]
    for part in re.findall(r"[^ ,=+]*[ ,=+]*", text):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def _painter(colour: bool) -> Paint:
    def paint(text: str, **style: Any) -> str:
        return click.style(text, **style) if colour else text

    return paint


# -- parts of the verdict ----------------------------------------------------------------------------------------------


def _terms(verdict: Verdict) -> str:
    setup, hardware = verdict.candidates[0].setup, verdict.hardware
    tokens = (
        f", batch {setup.batch} x seq {setup.seq}, {policy_of(verdict.candidates[0])}" if verdict.model.whole else ""
    )
    tp = f", tp {setup.tp}" if setup.tp > 1 else ""
    if setup.group < setup.dp and not _several_groups(verdict):
        states = "states" if setup.copies == 1 else "states over all ranks, parameters"
        tp += f", {states} within groups of {setup.group}"
    room = f"{format_bytes(hardware.gpu_memory)} per GPU"
    nvme = format_bytes(hardware.nvme_space) if hardware.nvme_space else "no"
    room += f", {format_bytes(hardware.host_memory)} and {nvme} nvme per node"
    return f"{count_of(setup.ranks, 'rank')}, {setup.local_ranks} per node{tp}, {setup.precision}{tokens}; {room}"


def _several_groups(verdict: Verdict) -> bool:
    return len({_group(each) for each in verdict.candidates}) > 1


def _group(candidate: Candidate) -> str:
    """Return the size of groups, and that states are partitioned over all ranks if they are not within groups."""
    return f"{candidate.setup.group}" + (", states all" if candidate.setup.copies > 1 else "")


def _candidates(verdict: Verdict, paint: Paint) -> list[str]:
    chosen = any(each.plan.activations for each in verdict.candidates)
    budget, grouped = verdict.budget, _several_groups(verdict)
    head = ["stage", "offload", *(["groups of"] if grouped else []), *(["recomp."] if chosen else [])]
    head += ["GPU GiB", "used", "host", "nvme", "step"]
    head += ["days"] if budget else []
    rows, styles = [[*head, "verdict"]], [""]
    for each in verdict.candidates:
        again = [_group(each)] if grouped else []
        again += [_recomputed(each, verdict.model)] if chosen else []
        gpu, host, nvme = (_gib(each.plan.needed(tier)) for tier in TIERS)
        timed = each.estimate
        cells = [str(each.setup.stage), str(each.setup.offload) or "-", *again, gpu, _percent(each), host, nvme]
        cells.append("-" if timed is None else format_seconds(timed.seconds))
        if budget:
            taken = budget.of(each)
            cells.append(_whole(taken["days"]) if taken else "-")
        best = "fastest" if timed is not None else "first"
        word = best if each is verdict.best else "fits" if each.fits else _over(each)
        word += "".join(f", {tier} {UNKNOWN}" for tier in each.unknown if each.fits)
        rows.append([*cells, word])
        styles.append(("green" if each.fits else "red") + " bold" * (each is verdict.best))
    return table(rows, styles, paint, words=(1, len(head)))


def _groups(verdict: Verdict, paint: Paint) -> list[str]:
    """Return a table of what each size of group costs, at the stage and placement of the best candidate."""
    rows, styles = [["groups of", "GPU GiB", "GB inside", "GB across", "step", "verdict"]], [""]
    for each in verdict.groups:
        moved, timed = traffic(each.plan), each.estimate
        cells = [_group(each), _gib(each.plan.needed("hbm"))]
        cells += [f"{nbytes / 1e9:.3g}" for nbytes in (moved.inside, moved.across)]
        cells.append("-" if timed is None else format_seconds(timed.seconds))
        rows.append([*cells, "fits" if each.fits else _over(each)])
        styles.append(("green" if each.fits else "red") + " bold" * (_group(each) == _group(verdict.nearest)))
    what = f"{_arguments(verdict.nearest)}, bytes of collectives per rank and step, inside a group and across groups:"
    return [*wrap(what), *table(rows, styles, paint, words=(5,))]


def _legend(verdict: Verdict) -> str:
    """Return what the columns of the candidates' table are."""
    words = "GiB: GPU of one GPU, host and nvme of a node"
    if any(each.estimate is not None for each in verdict.candidates):
        words += "; step: estimated"
    if any(each.plan.activations for each in verdict.candidates):
        words += "; recomp.: blocks recomputed, of all (sel: selectively)"
    return words


def arguments(verdict: Verdict) -> str:
    """Return the flags that give the best candidate; empty if none fits."""
    return _arguments(verdict.best, verdict) if verdict.best is not None else ""


def _fits(verdict: Verdict, best: Candidate, paint: Paint) -> list[str]:
    arguments = _arguments(best, verdict)
    short = len(f"fits: {arguments}") <= COLUMNS
    found = [f"fits: {arguments}"] if short else ["fits:", *command_lines(arguments)]
    lines = [paint(line, fg="green", bold=True) for line in found]
    lines += wrap(verdict.reason, "  ")
    if (timed := best.estimate) is not None:
        phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in timed.phases.items())
        rates = f"{timed.tokens_per_second:,.0f} tokens/s, MFU {timed.mfu:.0%}"
        if timed.parts["collectives"]:
            rates += f"; {timed.hidden:.0%} of {format_seconds(timed.parts['collectives'])} of collectives are hidden"
        lines += wrap(f"{phases}; {rates}", "  ")
        if timed.bound == "host":
            lines += wrap(HOST_BOUND, "  ")
    if verdict.budget is not None and (taken := verdict.budget.of(best)):
        cost = f", cost {_whole(taken['cost'])} at {verdict.budget.price:g} per GPU-hour" if taken["cost"] else ""
        text = f"{format_count(verdict.budget.tokens)} tokens: {_whole(taken['days'])} days, "
        text += f"{_whole(taken['gpu_hours'])} GPU-hours"
        lines += wrap(f"{text}{cost} (by the estimate)", "  ")
    for tier, nbytes in best.unknown.items():
        lines += wrap(f"{tier}: {format_bytes(nbytes)} needed per node, {UNKNOWN}; its time is not estimated", "  ")
    if best.plan.activations:
        lines += wrap(f"activations: {best.plan.activations}", "  ")
    if best.plan.moment:
        lines.append(f"  its GPU peak comes at: {best.plan.moment}")
    if best.plan.loading:
        over = best.plan.loading["init_from"] - verdict.hardware.host_memory
        more = f", {format_bytes(over)} more than there are" if over > 0 else ""
        lines += wrap(f"{best.plan.loading_words}{more}", "  ")
    return lines


def _does_not_fit(verdict: Verdict, paint: Paint) -> list[str]:
    nearest = verdict.nearest
    over = _amounts(nearest)
    moment = f" (peak at: {nearest.plan.moment})" if nearest.plan.moment else ""
    lines = [paint("does not fit", fg="red", bold=True) + "; the nearest:"]
    lines += command_lines(_arguments(nearest, verdict))
    lines += wrap(f"{over}{moment}", "  ")
    if verdict.largest is not None:
        return [*lines, NOTHING[verdict.largest.kind]]
    if verdict.change is not None:
        return [*lines, "the smallest change that fits:", *command_lines(verdict.change[0])]
    ranks = verdict.candidates[0].setup.ranks
    return [*lines, *wrap(f"no change of stage, placement, batch or ranks (from {ranks} on) was found that fits")]


def _arguments(candidate: Candidate, verdict: Verdict | None = None) -> str:
    """Return the flags of a candidate; with its `verdict`, all that give its numbers beside what was asked."""
    setup = candidate.setup
    if verdict is not None and verdict.chosen is not None:
        return automatic.flags(candidate, verdict.chosen)
    words = f"--stage {setup.stage}" + (f" --offload {setup.offload}" if setup.offload else "")
    if verdict is not None:  # a placement with budgets comes from the search of `--auto`
        first = verdict.candidates[0]
        if setup.update != first.setup.update:
            words += f" --set offload.update={setup.update}"
        if first.plan.activations and not candidate.plan.activations:
            words += f" --set activations.policy={setup.recomputed.policy}"
    return words


def _over(candidate: Candidate) -> str:
    return ", ".join(WORDS[tier] for tier in candidate.over) + " over"


def _whole(number: float) -> str:
    """Return a number without its fraction; one below 100, or that would widen its column, with three digits."""
    return f"{number:,.0f}" if 100 <= number < LONGEST else f"{number:.3g}"


def _gib(nbytes: int) -> str:
    if nbytes < 1000 * GIB:
        return f"{nbytes / GIB:.1f}" if nbytes else "-"
    return _whole(nbytes / GIB)


def _percent(candidate: Candidate) -> str:
    share = candidate.used.get("hbm", 0.0)
    return f"{share:.0%}" if share < 100 else ">9999%"


def _recomputed(candidate: Candidate, model: Model) -> str:
    """Return how many blocks are recomputed; `sel` are those recomputed selectively."""
    blocks, number = model.recomputed(candidate.setup), model.blocks
    if blocks is None:
        recompute = candidate.setup.recomputed
        return "all" if recompute.whole else "all sel" if recompute.selective else "none"
    if not blocks.selective:
        return f"{blocks.whole}/{number}"
    return f"{blocks.whole}/{number}+sel" if blocks.whole else f"sel {blocks.selective}/{number}"


def _explain(candidate: Candidate, verdict: Verdict) -> list[str]:
    lines = wrap(f"{_arguments(candidate, verdict)}: every row (GPU: per GPU; host and nvme: per node)")
    for text, formula in candidate.plan.table():
        if not formula:
            lines += wrap(text.strip(), "  ")
            continue
        first = f"{text}  "  # a formula is wrapped below itself
        below = " " * len(first)
        lines += textwrap.wrap(formula, COLUMNS, initial_indent=first, subsequent_indent=below, break_on_hyphens=False)
    if candidate.estimate is not None:
        parts = ", ".join(f"{name} {format_seconds(s)}" for name, s in candidate.estimate.parts.items() if s)
        seconds = format_seconds(candidate.estimate.seconds)
        lines += wrap(f"estimated step: {seconds}; alone each would take: {parts}", "  ")
    return lines


def _max(largest: Largest) -> list[str]:
    """Return the largest that fits, the next that does not, and the margin."""
    lines = []
    if largest.value and largest.kind != "model":
        lines.append(f"{WHAT[largest.kind]}: {largest.value:,}")
    elif (grown := largest.dimensions) is not None:
        size = f"{grown['layers']} x {grown['hidden']}"
        lines.append(f"largest of this shape: {format_count(largest.model.numel)} ({size})")
    if largest.next is not None and largest.value:
        following = f"{largest.kind} {largest.next_value:,}"
        if largest.kind == "model" and largest.next_model is not None:
            following = f"the same with {largest.next_model.blocks} blocks"
        lines += wrap(f"{following} does not fit: {_arguments(largest.next)}, {_amounts(largest.next)}")
    elif largest.end and largest.value:
        lines += wrap(f"not more: {largest.end}")
    if largest.kind == "model":
        lines.append(f"largest by model states alone: {format_count(largest.count)} parameters")
    if largest.model.whole:
        lines.append(f"margin: {MARGIN:.0%} of GPU and host memory stay free; sizes above are without them")
    return lines


def _amounts(candidate: Candidate) -> str:
    return ", ".join(f"{WORDS[tier]} over by {format_bytes(nbytes)}" for tier, nbytes in candidate.over.items())
