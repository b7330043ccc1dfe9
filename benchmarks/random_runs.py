"""The table of `accuracy.py --random`: predicted and measured bytes of every tier, and how far they are apart."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measured_bytes import measure
from random_cases import RandomCase, draw_cases

BELOW, ABOVE, MEDIAN = 1.0, 5.0, 1.0
TIERS = ("hbm", "dram", "nvme")
"""Tiers whose bounds decide; `tiers`, the mapped part of dram alone, is shown beside them."""


def run(
    count: int, seed: int, device: str, only: Sequence[int] | None, jobs: int, to_json: str | None,
    to_markdown: str | None, lora: bool = False,
) -> bool:  # fmt: skip
    """Measure random cases, `jobs` at a time, and print each in its turn; return whether all ran and bounds hold."""
    rows: list[dict[str, Any]] = []
    cases = [case for case in draw_cases(count, seed, device, lora) if not only or case.number in only]
    with ThreadPoolExecutor(jobs) as threads:
        for row in threads.map(lambda case: _measured(case, device), cases):
            rows.append(row)
            print(_line(row), flush=True)
            lines, sound = verdict(rows)
            if to_json:  # after each, so that a run that is ended leaves what it has measured
                about = {"device": device, "seed": seed, "rows": rows, "verdict": lines}
                Path(to_json).write_text(json.dumps(about, indent=1))
    lines, sound = verdict(rows)
    print("\n".join(lines))
    if to_markdown:
        Path(to_markdown).write_text(markdown(rows) + "\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    return sound


def _measured(case: RandomCase, device: str) -> dict[str, Any]:
    began = time.perf_counter()
    row: dict[str, Any] = {"number": case.number, "ranks": case.ranks, "sets": case.sets}
    try:
        row |= measure(case, device)
    except Exception as error:  # a case that fails is reported, not hidden
        row["failed"] = f"{type(error).__name__}: {error}"
    return row | {"seconds": time.perf_counter() - began}


def error_of(row: dict[str, Any], tier: str) -> float | None:
    """Return by how many per cent the plan of a tier is above the measured; None if both are nothing."""
    found = row.get(tier)
    if not found or not (found["predicted"] or found["measured"]):
        return None
    return (found["predicted"] / found["measured"] - 1) * 100 if found["measured"] else float("inf")


def _cell(row: dict[str, Any], tier: str) -> str:
    error = error_of(row, tier)
    if error is None:
        return f"{'-':>26}"
    found = row[tier]
    return f"{found['predicted'] / 2**20:8.2f} {found['measured'] / 2**20:8.2f} {error:+7.2f} %"


def _line(row: dict[str, Any]) -> str:
    name = f"{row['ranks']} ranks, {' '.join(row['sets'])}"
    if "failed" in row:
        last = row["failed"].strip().splitlines()[-1]
        return f"{row['number']:3}  FAILED ({row['seconds']:.1f} s) {name}\n     {last}"
    cells = " |".join(f" {tier} {_cell(row, tier)}" for tier in (*TIERS, "tiers"))
    return f"{row['number']:3} {cells}  ({row['seconds']:.1f} s) {name}"


def verdict(rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the closing lines and whether every case ran within the bounds on every tier."""
    failed = [row["number"] for row in rows if "failed" in row]
    lines = [f"{len(rows)} configurations, {len(failed)} failed{': ' + str(failed) if failed else ''}"]
    sound = not failed
    for tier in (*TIERS, "tiers"):
        errors = {row["number"]: error for row in rows if (error := error_of(row, tier)) is not None}
        if not errors:
            lines.append(f"{tier}: in no configuration")
            continue
        least, most = min(errors, key=errors.__getitem__), max(errors, key=errors.__getitem__)
        median = statistics.median(abs(error) for error in errors.values())
        lines.append(
            f"{tier}: {len(errors)} configurations; worst under {min(0.0, errors[least]):.2f} % (number {least}), "
            f"worst over {max(0.0, errors[most]):.2f} % (number {most}), median {median:.2f} %"
        )
        if tier in TIERS:
            sound = sound and errors[least] >= -BELOW and errors[most] <= ABOVE and median <= MEDIAN
    bounds = f"bounds on hbm, dram and nvme: {BELOW} % under, {ABOVE} % over, {MEDIAN} % in the median"
    return [*lines, f"{bounds}: {'held' if sound else 'BROKEN'}"], sound


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table: of each tier predicted and measured MiB, and the error in per cent."""
    lines = ["| | configuration | hbm, MiB | % | dram, MiB | % | nvme, MiB | % |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        name = f"{row['ranks']} ranks, {' '.join(word.partition('.')[2] for word in row['sets'])}"
        if "failed" in row:
            lines.append(f"| {row['number']} | {name} | failed | | | | | |")
            continue
        cells = []
        for tier in TIERS:
            error = error_of(row, tier)
            if error is None:
                cells.append("| ")
                continue
            found = row[tier]
            cells.append(f"{found['predicted'] / 2**20:.1f} / {found['measured'] / 2**20:.1f} | {error:+.2f}")
        lines.append(f"| {row['number']} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
