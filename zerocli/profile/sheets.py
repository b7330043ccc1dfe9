"""The profile's page in HTML, without scripts: what was run, seconds, memory, ranks, units and two runs compared."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from zerocli.layout.sizes import format_bytes, format_count
from zerocli.profile import colours, table
from zerocli.profile.charts import Bar, bars, legend
from zerocli.profile.table import NAMES

Run = Mapping[str, Any]
STRAGGLER = 1.05
"""A rank that computes longer than this many times the median is a straggler: the others wait for it."""
MOST_RANKS = 16
"""Ranks that are drawn; of more, those that are largest, smallest or slowest."""


def grid(head: Sequence[str], rows: Iterable[Sequence[str]], kinds: Mapping[int, str] | None = None) -> str:
    """Return a table; cells are HTML already. `kinds` gives rows a class by their index."""
    kinds = kinds or {}
    body = "".join(
        f"<tr{f' class={kinds[index]}' if index in kinds else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for index, row in enumerate(rows)
    )
    top = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    return f'<div class="card"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def size(nbytes: float | None) -> str:
    return "–" if nbytes is None else format_bytes(nbytes)


def time(seconds: float | None) -> str:
    if not seconds:
        return "–" if seconds is None else "0 s"
    for unit, scale, digits in (("s", 1.0, 3), ("ms", 1e-3, 2)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.{digits}f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def change(before: float | None, after: float | None) -> str:
    """Return the relative change; a dash where it is undefined."""
    if not before or after is None or abs(after / before) > 1e6:
        return "–"
    return f"{(after - before) / before:+.1%}".replace("-0.0%", "+0.0%")


def chip(category: str) -> str:
    colour = colours.CATEGORIES.get(category, colours.OTHER)
    return f'<i class="chip" style="background:{colour}"></i>{html.escape(category.replace("_", " "))}'


# -- one run -----------------------------------------------------------------------------------------------------------


def about(run: Run) -> str:
    """Return what was run: the model, the command, when, where and with which versions."""
    made = run.get("made")
    rows = [("run", html.escape(table.title(run)))]
    if made:
        versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items() if version)
        rows += [
            ("command", f"<code>{html.escape(made['command'])}</code>" if made["command"] else "not recorded"),
            ("date", html.escape(made["date"])),
            ("machine", html.escape(f"{made['host']} ({made['system']}), {made['cores']} cores, {_device(run)}")),
            ("versions", html.escape(versions)),
        ]
    return f'<table class="about">{"".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in rows)}</table>'


def _device(run: Run) -> str:
    capacity = (run.get("capacity") or {}).get("hbm")
    if not run["gpu"]:
        return "no GPU: host memory is reported as hbm"
    return f"{run['gpu']}" + (f" with {size(capacity)}" if capacity else "")


def seconds(run: Run) -> str:
    """Return the step's seconds by cause, the rates of its links and its phases."""
    step = run["step"]
    if step["seconds"] is None:
        return '<p class="soft">no step was timed</p>'
    facts = [f"step {time(step['seconds'])}", f"{step['tokens_per_second']:,.0f} tokens/s"]
    if step["utilisation"] is not None and step["best_tflops"]:
        facts.append(f"{step['utilisation']:.1%} of {step['best_tflops']:g} TFLOPS")
    if step["overlap"] is not None:
        facts.append(f"{step['overlap']:.1%} of transfers and collectives hidden behind compute")
    if step.get("predicted"):
        facts.append(f"predicted {time(step['predicted']['seconds'])}")
    parts = _causes(step)
    made = bars([Bar("step", parts)], colours.CAUSES, time, title="seconds of a step")
    words = ", ".join(f"{html.escape(name)} {time(value)}" for name, value in parts.items())
    links = "".join(f'<div class="soft">{html.escape(_link(link))}</div>' for link in step["links"])
    names = legend(list(parts), colours.CAUSES)
    return f'<div class="card"><div>{" · ".join(facts)}</div>{made}{names}<div class="soft">{words}</div>{links}</div>'


def _link(link: Mapping[str, Any]) -> str:
    best = f"best {link['best']:.3g}" if link["best"] else "best not measured"
    least = "at least " if link.get("at_least") else ""
    moved = f"{size(link['bytes'])} per step in {time(link['seconds'])}"
    return f"{link['lane']}: {least}{link['achieved']:.3g} GB/s ({best}), {moved}"


def _causes(step: Mapping[str, Any]) -> dict[str, float]:
    return {"compute": step["compute"], **step["waits"]}


def memory(run: Run) -> str:
    """Return bars of each tier, predicted and measured, with the line of its capacity, and the same as a table."""
    drawn = []
    for tier in table.tiers_of(run):
        rows = [row for row in run["rows"] if row["tier"] == tier]
        if not rows:
            continue
        both = [
            Bar(f"{tier}, {kind}", _parts(rows, kind), size(run["peak"].get(tier, {}).get(kind)))
            for kind in ("predicted", "measured")
        ]
        capacity = (run.get("capacity") or {}).get(tier)
        shown = [bar for bar in both if bar.total]
        drawn.append(bars(shown, colours.CATEGORIES, size, capacity, f"memory of {tier}"))
    names = [name for name in NAMES if any(row["category"] == name for row in run["rows"])]
    card = f'<div class="card">{legend(names, colours.CATEGORIES)}{"".join(drawn)}</div>'
    return card + f'<div class="columns">{_memory_table(run)}{"".join(holders(run))}</div>'


def _parts(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    found = {row["category"]: row[kind] for row in rows if row[kind]}
    return {name: found[name] for name in (*NAMES, *found) if name in found}


def _memory_table(run: Run) -> str:
    rows: list[list[str]] = []
    kinds: dict[int, str] = {}
    for tier, mine in table.memory_rows(run):
        kinds[len(rows)] = "tier"
        rows.append([html.escape(tier), "", "", ""])
        rows += [[chip(name), size(predicted), size(measured), off or "–"] for name, predicted, measured, off in mine]
        moment = run["peak"][tier]["moment"]
        kinds[len(rows) - 1] = "peak"
        rows[-1][0] = f"peak ({html.escape(moment)})" if moment else "peak"
    return grid(["memory", "predicted", "measured", "error"], rows, kinds)


def holders(run: Run) -> Iterator[str]:
    """Yield a table of the largest holders of each tier."""
    for tier in table.tiers_of(run):
        peak = run["peak"].get(tier, {})
        rows = [
            [
                *(html.escape(each["name"]), chip(each["category"]), size(each["bytes"])),
                f"{each['bytes'] / peak['measured']:.1%}" if peak["measured"] > 0 else "–",
            ]
            for each in peak.get("holders", ())
        ]
        if rows:
            where = "" if tier == "hbm" else ", per node"
            yield grid([f"largest holders of {tier}{where}", "category", "bytes", "share"], rows)


# -- ranks and units ---------------------------------------------------------------------------------------------------


def stragglers(everyone: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return (rank, how much longer than the median it computes) of the slow ranks, the slowest first."""
    timed = [each for each in everyone if each["compute"]]
    if len(timed) < 2:
        return []
    usual = statistics.median(each["compute"] for each in timed)
    slow = [(each["rank"], each["compute"] / usual - 1) for each in timed if usual > 0]
    return sorted((each for each in slow if each[1] > STRAGGLER - 1), key=lambda each: -each[1])


def ranks(run: Run) -> str:
    """Return all ranks: bars of their seconds, a table of their peaks, the largest, the smallest and stragglers."""
    everyone = run.get("everyone") or []
    if not everyone:
        return '<p class="soft">this run recorded no ranks one by one</p>'
    slow = stragglers(everyone)
    marks = _marks(everyone, dict(slow))
    chosen = [each for each in everyone if len(everyone) <= MOST_RANKS or marks.get(each["rank"])]
    timed = [
        Bar(f"rank {each['rank']}", {"compute": each["compute"], "wait": each["wait"] or 0}, time(each["seconds"]))
        for each in chosen
        if each["compute"]
    ]
    drawn = bars(timed, colours.CAUSES, time, title="seconds of each rank") if timed else ""
    words = [
        f"rank {rank} computes {more:.0%} longer than the median, and the others wait for it" for rank, more in slow
    ]
    said = "; ".join(words) or ("no stragglers: all ranks compute within 5% of the median" if len(timed) > 1 else "")
    rows = [
        [
            str(each["rank"]),
            html.escape(each["node"]),
            *(size(each[tier]) for tier in ("hbm", "dram", "nvme", "rss_peak")),
            *(time(each[name]) for name in ("compute", "wait")),
            html.escape(", ".join(marks.get(each["rank"], []))),
        ]
        for each in everyone
    ]
    head = ["rank", "node", "hbm", "dram", "nvme", "OS view, peak", "compute", "wait", ""]
    names = legend(["compute", "wait"], colours.CAUSES) if timed else ""
    inner = grid(head, rows)
    if len(rows) > MOST_RANKS:
        inner = f"<details><summary>all {len(rows)} ranks</summary>{inner}</details>"
    return f'<div class="card"><div>{html.escape(said)}</div>{names}{drawn}</div>{inner}'


def _marks(everyone: Sequence[Mapping[str, Any]], slow: Mapping[int, float]) -> dict[int, list[str]]:
    """Return what is particular about a rank, by its number."""
    marks: dict[int, list[str]] = {rank: ["straggler"] for rank in slow}
    for key, words in (("hbm", "of hbm"), ("compute", "of compute")):
        known = [each for each in everyone if each[key]]
        if len({each[key] for each in known}) < 2:
            continue
        for which, pick in (("most", max), ("least", min)):
            found = pick(known, key=lambda each: each[key])
            marks.setdefault(found["rank"], []).append(f"{which} {words}")
    return marks


def units(run: Run) -> str:
    """Return one row per unit of rank 0."""
    found = run.get("units") or []
    if not found:
        return '<p class="soft">this run recorded no units: zerocli profile CONFIG records them</p>'
    tiers = [tier for tier in table.tiers_of(run) if any(each["held"].get(tier) for each in found)]
    rows = [
        [
            html.escape(each["unit"]),
            format_count(each["parameters"]),
            *(time(each[name]) for name in ("forward", "backward", "collectives", "transfers", "update")),
            size(each["moved"]),
            size(each["activations"]),
            *(size(each["held"].get(tier, 0)) for tier in tiers),
        ]
        for each in found
    ]
    head = ["unit", "parameters", "forward", "backward", "collectives", "transfers", "update", "moved", "activations"]
    inner = grid([*head, *(f"held on {tier}" for tier in tiers)], rows)
    note = "Per step of rank 0; collectives, transfers and updates run beside compute. Held: at the peak of hbm."
    return f'<p class="soft">{note}</p>{inner}'


# -- two runs ----------------------------------------------------------------------------------------------------------


def compare(one: Run, other: Run, names: tuple[str, str]) -> str:
    """Return two runs side by side: bars on one scale, and a table of what changed."""
    drawn = []
    for tier in table.tiers_of(one, other):
        both = [
            Bar(f"{tier}: {name}", _parts([row for row in run["rows"] if row["tier"] == tier], "measured"))
            for name, run in zip(names, (one, other), strict=True)
        ]
        if any(bar.total for bar in both):
            sizes = [(run.get("capacity") or {}).get(tier) for run in (one, other)]
            capacity = min((each for each in sizes if each), default=None)
            drawn.append(bars(both, colours.CATEGORIES, size, capacity, f"memory of {tier}"))
    steps = [
        Bar(f"step: {name}", _causes(run["step"]), time(run["step"]["seconds"]))
        for name, run in zip(names, (one, other), strict=True)
        if run["step"]["seconds"] is not None
    ]
    timed = bars(steps, colours.CAUSES, time, title="seconds of a step") if steps else ""
    used = [name for name in NAMES if any(row["category"] == name for run in (one, other) for row in run["rows"])]
    causes = list(dict.fromkeys(name for step in steps for name in step.parts))
    return (
        f'<div class="card">{legend(used, colours.CATEGORIES)}{"".join(drawn)}'
        f"{legend(causes, colours.CAUSES)}{timed}</div>{_compare_table(one, other, names)}"
    )


def _compare_table(one: Run, other: Run, names: tuple[str, str]) -> str:
    rows: list[list[str]] = []
    kinds: dict[int, str] = {}
    for tier, mine, peaks in table.changed_rows(one, other):
        if not mine:
            continue
        kinds[len(rows)] = "tier"
        rows.append([html.escape(tier), "", "", ""])
        rows += [[chip(name), size(before), size(after), change(before, after)] for name, before, after in mine]
        alike = table.whole(one, tier) == table.whole(other, tier)
        kinds[len(rows)] = "peak"
        rows.append(["peak", *map(size, peaks), change(*peaks) if alike else "–"])
    kinds[len(rows)] = "tier"
    rows.append(["seconds", "", "", ""])
    for name, label in (("seconds", "step"), ("compute", "compute"), ("wait", "wait")):
        before, after = one["step"][name], other["step"][name]
        rows.append([label, time(before), time(after), change(before, after)])
    rates = [run["step"].get("tokens_per_second") for run in (one, other)]
    rows.append(["tokens/s", *(f"{rate:,.0f}" if rate is not None else "–" for rate in rates), change(*rates)])
    return grid(["measured", *names, "change"], rows, kinds) + _settings(one, other, names)


def _settings(one: Run, other: Run, names: tuple[str, str]) -> str:
    """Return the config keys that differ between two runs."""

    def flat(run: Run) -> dict[str, Any]:
        return {
            f"{section}.{key}": value
            for section, keys in run["settings"].items()
            if isinstance(keys, Mapping)
            for key, value in keys.items()
        }

    both = [flat(run) for run in (one, other)]
    keys = [key for key in dict.fromkeys((*both[0], *both[1])) if both[0].get(key) != both[1].get(key)]
    rows = [[html.escape(key), *(html.escape(str(each.get(key, "–"))[:80]) for each in both)] for key in keys]
    return grid(["settings that differ", *names], rows) if rows else ""
