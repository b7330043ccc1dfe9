"""Read a finished run's files back as a profile. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerocli.console import quoted
from zerocli.errors import ConfigError, UserError, quote
from zerocli.profile import form
from zerocli.profile.document import SCHEMA, config_shape, seconds
from zerocli.profile.form import ANOTHER
from zerocli.profile.ledger import TIERS
from zerocli.profile.spread import spread
from zerocli.regular_files import MAX_CONFIG_NBYTES, MAX_LINE_NBYTES, MAX_PROFILE_NBYTES, lines_of

FILE = "profile.json"
KEPT_LINES = 10_000
"""Minimum number of metrics lines to keep when there are more."""


def read(folder: str) -> dict[str, Any]:
    """Return a run's profile, with `warnings` about partial lines; UserError if there is none."""
    run = Path(folder)
    try:
        names = set(os.listdir(run))
    except FileNotFoundError:
        raise UserError(
            f"{folder} is not a run: there is no such folder", hint="zerocli profile CONFIG, or runs/<name>"
        ) from None
    except OSError as error:
        raise UserError(f"{folder} is not a run: {error.strerror}", hint="zerocli profile runs/<name>") from error
    if not names:
        raise UserError(f"{folder} is empty: no run was ever here", hint="zerocli profile CONFIG --run-dir DIR")
    if not {"metrics.jsonl", "config.json"} <= names:
        missing = [name for name in ("config.json", "metrics.jsonl") if name not in names]
        raise UserError(
            f"{folder} is not a run folder: it has no {' and no '.join(missing)}", hint="zerocli profile runs/<name>"
        )
    settings = form.read_table(run / "config.json", MAX_CONFIG_NBYTES)
    written, warnings = read_metrics(run / "metrics.jsonl")
    if not written:
        raise UserError(f"{folder} has not finished a step: metrics.jsonl has no line", hint="zerocli profile CONFIG")
    if FILE in names:
        hint = f"rm {quoted(run / FILE)}, and the run's metrics are shown instead"
        document = form.read_table(run / FILE, MAX_PROFILE_NBYTES, hint)
        _check(run / FILE, document, hint)
        document["notes"] += _stale(document, written[-1]["step"])
    else:
        by_step = {line["step"]: line for line in written}  # for a repeated step the later line counts
        document = _from_metrics(run, settings, [by_step[step] for step in sorted(by_step)])
    return document | {"warnings": warnings}


def read_file(path: str) -> dict[str, Any]:
    """Return the profile in a file that `zerocli profile --json` wrote; UserError if it is none."""
    hint = "zerocli profile RUN --json > FILE writes one"
    if not Path(path).exists():
        raise UserError(f"{path}: there is no such file or folder", hint=hint)
    document = form.read_table(Path(path), MAX_PROFILE_NBYTES, hint)
    if "runs" in document:
        raise UserError(f"{path} holds two profiles, and one is compared", hint=hint)
    _check(Path(path), document, hint)
    return document | {"warnings": []}


def _check(path: Path, document: dict[str, Any], hint: str) -> None:
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise UserError(
            f"{path} is of a newer version: schema {schema}, and this program reads up to {SCHEMA}",
            hint="pip install -U zerocli",
        )
    wrong = f"schema is {quote(schema)}" if schema != SCHEMA or schema is True else form.fault(document, form.DOCUMENT)
    if not wrong and "timeline" in document:
        wrong = form.timeline_fault(document["timeline"])
    if wrong:
        raise UserError(f"{path} is not what zerocli writes: {wrong}", hint=hint)


def _stale(document: dict[str, Any], newest: int) -> list[str]:
    """Return a note if the run was resumed after this profile was written, and ended without writing another."""
    last = document["steps"][1] if "steps" in document else newest
    if last >= newest:
        return []
    return [f"this run went on to step {newest} and ended there without writing a profile: this one is of step {last}"]


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a run's lines in the order they were written, and warnings about partial lines.

    Of more than 20,000 lines only the first and the newest are kept, so memory is bounded for files of any size. Only
    the last line can be partial, if the run was killed while writing it.
    """
    found: list[dict[str, Any]] = []
    for number, text in enumerate(_lines(path), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            wrong = form.fault(line, form.LINE)
        except (ValueError, RecursionError):
            wrong = "it holds no table"
        if not wrong:
            found.append(line)
            if len(found) > 2 * KEPT_LINES:
                del found[1 : KEPT_LINES + 1]
        elif not text.endswith(b"\n") and len(text) < MAX_LINE_NBYTES:
            return found, [f"metrics.jsonl: its last line, {number}, is incomplete and was ignored"]
        else:
            raise UserError(f"{path}, line {number}: not what zerocli writes: {wrong}", hint=ANOTHER)
    return found, []


def _lines(path: Path) -> Iterator[bytes]:
    try:
        yield from lines_of(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", hint=ANOTHER) from error


def _from_metrics(run: Path, settings: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a profile from a run's metrics alone (peaks and seconds), for a run that ended before it wrote one."""
    peak = {tier: int(max(line["peak"].get(tier, 0) for line in lines)) for tier in TIERS}
    from zerocli.config import from_dict, to_dict

    try:
        config = from_dict(settings)
    except ConfigError as error:
        raise UserError(*(f"{run / 'config.json'}: {line}" for line in error.lines), hint=ANOTHER) from error
    shape = config_shape(config)
    ranks = max(1, config.parallel.ranks)
    facts = {"ranks": ranks, "gpu": None, "precision": config.train.precision}
    return {
        "schema": SCHEMA,
        "config": config.name,
        "settings": to_dict(config),
        "device": "an unknown device",
        "gpu": None,
        "precision": config.train.precision,
        "parameters": shape.numel if shape else None,
        "ranks": ranks,
        "tp": config.parallel.tp,
        "followed": False,
        "rows": [
            {"category": "unattributed", "tier": tier, "predicted": None, "measured": peak[tier]}
            for tier in TIERS
            if peak[tier]
        ],
        "peak": {tier: {"predicted": None, "measured": peak[tier], "moment": "", "holders": []} for tier in TIERS},
        "steps": [lines[0]["step"], lines[-1]["step"]],
        "step": seconds(config, lines, facts),
        "spread": spread(lines),
        "system": None,
        "notes": ["this run ended before it recorded its memory: peaks and seconds are those of its metrics"],
    }
