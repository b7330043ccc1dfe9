"""Finished runs: what they recorded, read back as a profile. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerocli.errors import UserError
from zerocli.profile.document import SCHEMA, seconds
from zerocli.profile.ledger import TIERS

FILE = "profile.json"
WANTED = {"rows": list, "peak": dict, "step": dict, "settings": dict, "config": str, "notes": list, "system": dict}

LINE = {"step", "loss", "tokens", "seconds", "peak", "wait"}
"""What a line of metrics has at least."""


def read(folder: str) -> dict[str, Any]:
    """Return a run's profile; `warnings` in it say what was found torn. UserError says why there is none."""
    run = Path(folder)
    if not run.is_dir():
        raise UserError(f"{folder} is no run: there is no such folder", hint="zerocli profile CONFIG, or runs/<name>")
    if not any(run.iterdir()):
        raise UserError(f"{folder} is empty: no run was ever here", hint="zerocli profile CONFIG --run-dir DIR")
    if not (run / "metrics.jsonl").is_file() or not (run / "config.json").is_file():
        missing = [name for name in ("config.json", "metrics.jsonl") if not (run / name).is_file()]
        raise UserError(
            f"{folder} is no run folder: it has no {' and no '.join(missing)}", hint="zerocli profile runs/<name>"
        )
    settings = _json(run / "config.json")
    lines, warnings = read_metrics(run / "metrics.jsonl")
    if not lines:
        raise UserError(f"{folder} has not finished a step: metrics.jsonl has no line", hint="zerocli profile CONFIG")
    document = _json(run / FILE) if (run / FILE).is_file() else None
    if document is None:
        document = _from_metrics(settings, lines)
    _check(run, document)
    return document | {"warnings": warnings}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint="another run") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not what zerocli writes: it holds no table", hint="another run")
    return value


def _check(run: Path, document: dict[str, Any]) -> None:
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise UserError(
            f"{run / FILE} is of a newer version: schema {schema}, and this program reads up to {SCHEMA}",
            hint="pip install -U zerocli",
        )
    wrong = [name for name, kind in WANTED.items() if not isinstance(document.get(name), kind)]
    if schema != SCHEMA or wrong:
        raise UserError(f"{run / FILE} is not what zerocli writes: {', '.join(wrong) or 'schema'}", hint="another run")


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a run's lines by step, the later line of a step counting, and what was found torn.

    A line is whole or absent; only the last can be torn, by a run that was killed while it wrote.
    """
    found: dict[int, dict[str, Any]] = {}
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not line.keys() >= LINE:
                raise ValueError("not a line of metrics")
            found[int(line["step"])] = line
        except (ValueError, TypeError) as error:
            if number == len(texts):
                return _in_order(found), [f"metrics.jsonl: its last line, {number}, is torn; read up to it"]
            raise UserError(f"{path}, line {number}: not what zerocli writes", hint="another run") from error
    return _in_order(found), []


def _in_order(found: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    return [found[step] for step in sorted(found)]


def _from_metrics(settings: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a run's metrics alone say, its peaks and seconds: it ended before its books were closed."""
    peak = {tier: int(max(line.get("peak", {}).get(tier, 0) for line in lines)) for tier in TIERS}
    from zerocli.config import from_dict

    config = from_dict(settings)
    ranks = max(1, config.parallel.ranks)
    facts = {"ranks": ranks, "gpu": None, "precision": config.train.precision}
    return {
        "schema": SCHEMA,
        "config": config.name,
        "settings": settings,
        "device": "unknown device",
        "gpu": None,
        "precision": config.train.precision,
        "parameters": 0,
        "ranks": ranks,
        "tp": config.parallel.tp,
        "followed": False,
        "rows": [
            {"category": "unattributed", "tier": tier, "predicted": None, "measured": peak[tier]}
            for tier in TIERS
            if peak[tier]
        ],
        "peak": {tier: {"predicted": None, "measured": peak[tier], "moment": "", "holders": []} for tier in TIERS},
        "step": seconds(config, lines, facts),
        "system": {"rss": 0, "rss_peak": 0, "pinned": 0, "nvme": 0},
        "notes": ["this run ended before it recorded its memory: peaks and seconds are those of its metrics"],
    }
