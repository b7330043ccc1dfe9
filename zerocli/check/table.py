"""The output of a check: a table, printed as rows end, the verdict below it, and a JSON document. (No torch.)"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Any

from zerocli.check.rows import FACTOR, MIX, Checklist, Row

Result = Mapping[str, Any]
WIDTH = 80
BAD = ("differs", "error")
NOT_FINITE = "not finite"


def heading(name: str, checklist: Checklist, about: Result, tokens: str) -> list[str]:
    """Return the lines above the rows: what is compared, the table's head, and what rounding alone changes."""
    steps = checklist.steps
    ranks = about["ranks"]
    return [
        f"{name}: {about['parameters']:,} parameters, {about['precision']} ({about['precision_reason']})",
        *textwrap.wrap(
            f"{steps} step{'s' * (steps > 1)} of {tokens} on {ranks} rank{'s' * (ranks > 1)}, compared with "
            f"{about['reference']} in one process",
            WIDTH,
        ),
        *([f"note: {about['note']}"] if about["note"] else []),
        *([f"note: {about['skipped']} of them overflowed and were skipped"] if about["skipped"] else []),
        *_legend(checklist),
        "",
        _line(_width(checklist), "stage", "offload", "blocks", "loss", "grad norm", "params", "optimizer", "verdict"),
        _line(_width(checklist), "-", "rounding", "", *_cells(about["noise"]), ""),
    ]


def row_line(checklist: Checklist, row: Row, result: Result) -> str:
    """Return a row of the table; bad rows are explained below the table."""
    cells = _cells(result) if "loss" in result else [""] * 4
    said = str(result["verdict"])
    return _line(
        _width(checklist), str(row.stage), row.label, row.blocks, *cells, said.upper() if said in BAD else said
    )


def _legend(checklist: Checklist) -> list[str]:
    mixes = [row for row in checklist.rows if row.label == MIX]
    text = mixes[-1].offload.replace(",", ", ") if mixes else ""
    return textwrap.wrap(f"{MIX}: {text}", WIDTH, subsequent_indent="     ", break_on_hyphens=False) if mixes else []


def _width(checklist: Checklist) -> tuple[int, int]:
    labels = [len(row.label) for row in checklist.rows]
    return max(8, *labels), max(6, *(len(row.blocks) for row in checklist.rows))


def _line(width: tuple[int, int], stage: str, offload: str, blocks: str, *cells: str) -> str:
    *numbers, said = cells
    right = "".join(f"  {number:>9}" for number in numbers)
    return f"{stage:>5}  {offload:<{width[0]}}  {blocks:<{width[1]}}{right}  {said}".rstrip()


def _cells(numbers: Result) -> list[str]:
    values = [numbers["loss"], numbers["grad_norm"]]
    values += [each["relative"] if (each := numbers[key]) else 0.0 for key in ("parameters", "optimizer")]
    return [_number(value) for value in values]


def _number(value: float | None) -> str:
    return "nan" if value is None else "0" if value == 0 else f"{value:.1e}"


def closing(checklist: Checklist, about: Result, results: Mapping[int, Result]) -> list[str]:
    """Return the lines below the rows: each bad row explained, then the verdict and what was tolerated."""
    lines = [""]
    repeated: dict[str, list[Row]] = {}
    for index, row in enumerate(checklist.rows):
        for text in _explain(results[index]):
            repeated.setdefault(text, []).append(row)
    for text, rows in repeated.items():
        lines += textwrap.wrap(_which(rows), WIDTH, subsequent_indent="  ")
        for line in text.splitlines():
            lines += textwrap.wrap(line, WIDTH, initial_indent="    ", subsequent_indent="    ")
    if repeated:
        lines.append("")
    lines += textwrap.wrap(f"{verdict(checklist, results)}{_same_bits(checklist, results)}", WIDTH)
    rounding = f"Columns are relative differences, the largest of any step or tensor. Allowed are {FACTOR} times what "
    rounding += f"one rounding of every weight ({about['rounding']:.0e}) changes in the unsharded run (row `rounding`)"
    compiled = any(row.compiled for row in checklist.rows)
    lines += textwrap.wrap(f"{rounding}{', four times that where blocks are compiled' if compiled else ''}.", WIDTH)
    if any(result["verdict"] == "differs" for result in results.values()):
        causes = "A forward that reads its rank, keeps state between calls or draws random numbers of its own is a "
        lines += textwrap.wrap(f"{causes}usual cause.", WIDTH)
    return lines


def _explain(result: Result) -> list[str]:
    """Return the explanation of a row that is not equal."""
    if result["verdict"] in ("refused", "error"):
        return [f"{result['verdict']}: {result['message']}"]
    if result["verdict"] != "differs":
        return []
    first, lines = result["first"], []
    if first:
        what = "" if first["what"] == "parameter" else f" ({first['what']})"
        off = NOT_FINITE if first["relative"] is None else f"off by {first['relative']:.1e} of itself"
        largest = "" if first["absolute"] is None else f", an element by {first['absolute']:.1e}"
        lines.append(f"first to differ: {first['name']}{what}, {off}{largest} (allowed: {_number(first['allowed'])})")
    return ["\n".join([*lines, *([result["message"]] if result["message"] else [])])]


def _which(rows: list[Row]) -> str:
    named = "; ".join(str(row) for row in rows[:3])
    return f"{named}{f' and {len(rows) - 3} more' if len(rows) > 3 else ''}:"


def verdict(checklist: Checklist, results: Mapping[int, Result]) -> str:
    """Return the check's answer in a sentence or two."""
    counts = Counter(result["verdict"] for result in results.values())
    said = [f"{counts['equal'] + counts['identical']} of {len(checklist.rows)} equal the unsharded run"]
    said += [f"{counts['identical']} bit for bit"] if counts["identical"] else []
    words = {"differs": "{n} differ{s}", "error": "{n} failed", "refused": "{n} refused"}
    said += [words[kind].format(n=n, s="s" * (n == 1)) for kind in words if (n := counts[kind])]

    return f"{'ok' if ok(results) else 'FAILED'}: {', '.join(said)}."


def _same_bits(checklist: Checklist, results: Mapping[int, Result]) -> str:
    eager = [
        results[index] for index, row in enumerate(checklist.rows) if not row.compiled and "loss" in results[index]
    ]
    if len(eager) < 2 or len({result["digest"] for result in eager}) > 1:
        return ""
    return f" {len(eager)} have the same bits in every loss, norm and parameter."


def ok(results: Mapping[int, Result]) -> bool:
    """Return whether something was compared, no number was wrong and nothing failed; a refusal is not wrong."""
    verdicts = [result["verdict"] for result in results.values()]
    return not any(each in BAD for each in verdicts) and any(each != "refused" for each in verdicts)


def document(name: str, checklist: Checklist, about: Result, results: Mapping[int, Result]) -> dict[str, Any]:
    """Return the check as JSON-able values; a difference that is not finite is null."""
    rows = []
    for index, row in enumerate(checklist.rows):
        own = {"stage": row.stage, "offload": row.offload, "recompute": row.recompute, "compiled": row.compiled}
        blank = dict.fromkeys(("loss", "grad_norm", "parameters", "optimizer", "first"))
        rows.append(own | blank | {key: value for key, value in results[index].items() if key != "row"})
    return {"schema": 1, "model": name, "steps": checklist.steps, **about, "rows": rows, "ok": ok(results)}
