"""Profiled runs for tests: the trainer's own steps on real ranks, small enough for seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ranks import run_ranks

SMALL = ("model.layers=3", "model.hidden=32", "train.batch=2", "train.seq=32", "train.steps=6", "train.log_every=100")

CELLAR = ("cellar", "toy_tiers:Tardy")
"""A tier of another package, which every profiled run here may use; its own name is another."""


def profile(folder: Path, *sets: str, world: int = 2, plain: bool = False, resume: bool = False) -> dict[str, Any]:
    """Return the document of a run of `tiny`, made small; `plain` trains it without a profile."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("where the bytes lie and where the seconds go\n" * 200)
    data = f"data.path={folder / 'text.txt'}"
    run_ranks(world, _work, str(folder), (*SMALL, data, *sets), plain, resume)
    return json.loads((folder / "profile.json").read_text())


def _work(folder: str, sets: tuple[str, ...], plain: bool, resume: bool) -> None:
    from tiers.registry import register
    from zerocli import config as configs
    from zerocli.config.options import RunOptions
    from zerocli.profile.observer import Observer
    from zerocli.profile.profiler import Profiler
    from zerocli.run import trainer
    from zerocli.run.processes.watchdog import Watchdog

    register(*CELLAR)
    config = configs.load("tiny", sets=sets, flags={})
    observer = Observer() if plain else Profiler()
    trainer.train_rank(config, RunOptions(folder, resume=resume), observer, Watchdog(0))


def rows(document: dict[str, Any], tier: str) -> dict[str, int]:
    """The measured rows of a tier, by category."""
    return {row["category"]: row["measured"] for row in document["rows"] if row["tier"] == tier}


def after_forward(document: dict[str, Any]) -> dict[str, int]:
    """What stands when the second step's forward ends: everything that is kept for backward, and no temporary."""
    return [b["rows"] for b in document["boundaries"] if b["moment"] == "end of forward, step 2"][-1]
