"""A profile as a text report for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zerocli.layout.categories import CATEGORIES
from zerocli.layout.sizes import count_of, format_bytes, format_count
from zerocli.profile.ledger import TIERS, UNATTRIBUTED

MEASURED_BY = dict.fromkeys(("host to device", "device to host"), ": zerocli env --bench") | dict.fromkeys(
    ("disk read", "disk write"), ": zerocli env --bench --nvme-path DIR"
)
"""The command that measures a link's peak rate; nothing measures links between ranks."""
WIDTH = 28
"""Characters of a run's name in a column head; the name of a default run folder fits."""
NAMES = (*CATEGORIES, UNATTRIBUTED)
TIER_NAMES = {"hbm": "hbm (device, per rank)", "dram": "dram (host, per node)", "nvme": "nvme (disk, per node)"}


def render(document: Mapping[str, Any]) -> str:
    """Return the whole report."""
    return "\n".join(
        [
            title(document),
            *([f"finding: {document['finding']}"] if document.get("finding") else []),
            "",
            *memory(document),
            "",
            *_peaks(document),
            "",
            *_seconds(document["step"]),
            *_spread(document.get("spread")),
            *(f"note: {note}" for note in document["notes"]),
        ]
    )


def title(document: Mapping[str, Any]) -> str:
    settings, numel = document["settings"], document["parameters"]
    zero, placement = settings["zero"]["stage"], settings["offload"]["placement"]
    offload = f", offload {placement}" if placement else ""
    tp = f" (tp {document['tp']})" if document["tp"] > 1 else ""
    where = document["gpu"] or document["device"]
    return (
        f"{document['config']}: {format_count(numel) if numel else 'unknown'} parameters, stage {zero}{offload}, "
        f"{document['ranks']} {'rank' if document['ranks'] == 1 else 'ranks'}{tp} on {where}, {document['precision']}"
    )


def tiers_of(*documents: Mapping[str, Any]) -> list[str]:
    """Return the tiers of some profiles: the three that each has, then those of other packages."""
    return list(dict.fromkeys((*TIERS, *(tier for document in documents for tier in document["peak"]))))


def _heading(tier: str) -> str:
    return TIER_NAMES.get(tier, f"{tier} (per node)")


def memory(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the report's part about memory."""
    yield f"{'memory':<24}{'predicted':>12}{'measured':>12}{'error':>9}"
    for tier, rows in memory_rows(document):
        yield _heading(tier)
        for name, predicted, measured, off in rows:
            shown = [format_bytes(n) if n is not None else "-" for n in (predicted, measured)]
            yield f"{'  ' + name.replace('_', ' '):<24}{shown[0]:>12}{shown[1]:>12}{off or '-':>9}"


def memory_rows(document: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, Any, Any, str]]]]:
    """Yield each tier that has rows: (name, bytes predicted, measured, error) of its categories, and of the peak.

    The error is empty for a peak that is not measured as a whole.
    """
    for tier in tiers_of(document):
        rows = [
            (row["category"], row["predicted"], seen(document, row)) for row in document["rows"] if row["tier"] == tier
        ]
        if rows:
            predicted, measured = (document["peak"][tier][name] for name in ("predicted", "measured"))
            off = error(predicted, measured) if whole(document, tier) else ""
            yield tier, [*((*row, error(*row[1:])) for row in rows), ("peak", predicted, measured, off)]


UNSEEN = ("activations", "logits")
"""Categories that are measured only if memory is followed."""


def seen(document: Mapping[str, Any], row: Mapping[str, Any]) -> int | None:
    """Return a row's measured bytes; None if it was not measured, which is not the same as 0 bytes."""
    looked = document.get("followed", True) or row["tier"] != "hbm" or row["category"] not in UNSEEN
    return row["measured"] if looked or row["measured"] else None


def whole(document: Mapping[str, Any], tier: str) -> bool:
    """Return whether a tier's measured peak is complete: without following, only a GPU's allocator counts it all."""
    return tier != "hbm" or document.get("followed", True) or document["gpu"] is not None


def error(predicted: int | None, measured: int | None) -> str:
    """Return the prediction's error relative to the measurement; a dash if that is undefined."""
    if predicted is None or not measured:
        return "-"
    share = (predicted - measured) / measured
    return _percent(share) if share < 10 else ">+999%"


def _percent(share: float) -> str:
    return f"{share:+.1%}".replace("-0.0%", "+0.0%")


def _peaks(document: Mapping[str, Any]) -> Iterator[str]:
    for tier in tiers_of(document):
        peak = document["peak"][tier]
        if not peak["measured"]:
            continue
        moment = f" in {peak['moment']}" if peak["moment"] else ""
        rows = [row for row in document["rows"] if (row["category"], row["tier"]) == (UNATTRIBUTED, tier)]
        share = sum(row["measured"] for row in rows) / peak["measured"]
        yield f"peak of {tier}: {format_bytes(peak['measured'])}{moment}; {share:.1%} unattributed"
        for holder in peak["holders"]:
            yield f"  {format_bytes(holder['bytes']):>11}  {holder['name']}"
    if (system := document["system"]) is not None:
        yield (
            f"OS view, largest rank: {format_bytes(system['rss_peak'])} of host memory at most, "
            f"{format_bytes(system['pinned'])} pinned, {format_bytes(system['nvme'])} on disk"
        )


def _seconds(step: Mapping[str, Any]) -> Iterator[str]:
    if step["seconds"] is None:
        yield "no step was timed"
        return
    total = step["seconds"]
    yield f"{'step':<24}{total:>10.4f} s   mean of {step['steps']}, rank 0"
    if expected := step.get("predicted"):
        phases = ", ".join(f"{name} {seconds:.4f}" for name, seconds in expected["phases"].items())
        yield f"{'  predicted':<24}{expected['seconds']:>10.4f} s {expected['seconds'] / total - 1:>+6.1%}   {phases}"
        found = ", ".join(f"{name} {seconds:.4f}" for name, seconds in step.get("phases", {}).items() if seconds)
        yield f"{'  by phase, measured':<24}{found}"
    yield f"{'  compute':<24}{step['compute']:>10.4f} s {step['compute'] / total:>6.1%}"
    for cause, seconds in step["waits"].items():
        yield f"{'  wait for ' + cause:<24}{seconds:>10.4f} s {seconds / total:>6.1%}"
    yield f"{'tokens/s':<24}{step['tokens_per_second']:>10,.0f}"
    if step["tflops"] is not None:
        known, best = step["utilisation"], step["best_tflops"]
        share = f"{known:.1%} of {best:g}" if known and best else "utilisation unknown for this device"
        yield f"{'model TFLOPS per rank':<24}{step['tflops']:>10.3g}   {share}"
    if step["overlap"] is not None:
        yield f"{'overlap':<24}{step['overlap']:>10.1%}   of transfers and collectives hidden behind compute"
    for link in step["links"]:
        best = f"best {link['best']:.3g}" if link["best"] else f"not measured{MEASURED_BY.get(link['lane'], '')}"
        moved = "at least; " if link.get("at_least") else ""
        moved += f"{format_bytes(link['bytes'])} per step in {link['seconds']:.4f} s"
        yield f"{'  ' + link['lane']:<24}{link['achieved']:>10.3g} GB/s   {moved}; {best}"


def _spread(spread: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield how far the ranks' own times are apart, and the ranks that were slowest most often."""
    if not spread:
        return
    shown = ", ".join(f"{spread[name]:.4f} s {name}" for name in ("fastest", "median", "slowest"))
    count = count_of(spread["intervals"], "interval")
    yield f"{'ranks, without waiting':<24}{shown} (mean of {count}; all ranks wait for the slowest)"
    for each in spread["ranks"]:
        name = f"  rank {each['rank']}" + (f" on {each['node']}" if each["node"] else "")
        how = f"{each['over']:.0%} over the median, most of it in {each['cause']}"
        yield f"{name:<24}slowest in {each['intervals']} of {spread['intervals']}, {how}"


def compare(one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]) -> str:
    """Return two profiles side by side."""
    heads = [name if len(name) <= WIDTH else f"…{name[1 - WIDTH :]}" for name in names]
    lines = [f"{'measured':<28}{heads[0]:>{WIDTH + 2}}{heads[1]:>{WIDTH + 2}}{'change':>10}"]
    for tier, rows, peaks in changed_rows(one, other):
        if any(peaks):
            lines.append(_heading(tier))
            lines += [_change(f"  {name.replace('_', ' ')}", before, after) for name, before, after in rows]
            lines.append(_change("  peak", *peaks, comparable=whole(one, tier) == whole(other, tier)))
    for name, what in (("step seconds", "seconds"), ("  compute", "compute"), ("  wait", "wait")):
        lines.append(_change(name, one["step"][what], other["step"][what], seconds=True))
    for which, document in zip(names, (one, other), strict=True):
        lines += [f"note: {which}: {note}" for note in document["notes"]]
    return "\n".join(lines)


def changed_rows(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[tuple[str, list[tuple[str, int | None, int | None]], tuple[int, int]]]:
    """Yield each tier: (category, bytes in one, in the other) of the categories that either has, and their peaks."""
    found = [{(row["tier"], row["category"]): seen(run, row) for row in run["rows"]} for run in (one, other)]
    first, second = (0 if any(category != UNATTRIBUTED for _, category in each) else None for each in found)
    for tier in tiers_of(one, other):
        keys = [(tier, name) for name in NAMES if (tier, name) in found[0] or (tier, name) in found[1]]
        peaks = [run["peak"].get(tier, {"measured": 0})["measured"] for run in (one, other)]
        rows = [(key[1], found[0].get(key, first), found[1].get(key, second)) for key in keys]
        yield tier, rows, (peaks[0], peaks[1])


def _change(
    name: str, before: float | None, after: float | None, seconds: bool = False, comparable: bool = True
) -> str:
    def show(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f} s" if seconds else format_bytes(value)

    change = "-"
    if comparable and before and after is not None:
        change = _percent((after - before) / before)
    return f"{name:<28}{show(before):>{WIDTH + 2}}{show(after):>{WIDTH + 2}}{change:>10}"


def predicted(plan: Any) -> dict[str, Any]:
    """Return what a plan says under the keys of a profile, with nothing measured; of None that nothing is known."""
    step = dict.fromkeys(("seconds", "compute", "wait"))
    if plan is None:
        return {"rows": [], "peak": {}, "step": step}
    keys = dict.fromkeys((row.category, row.tier) for row in plan.rows)
    rows = [{"category": c, "tier": t, "predicted": plan.of(c, t), "measured": None} for c, t in keys]
    peak = {tier: {"predicted": plan.needed(tier), "measured": None} for tier in plan.tiers}
    return {"rows": [row for row in rows if row["predicted"]], "peak": peak, "step": step}
