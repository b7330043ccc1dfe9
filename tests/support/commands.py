"""The command line as a process of its own, and the metrics that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SMALL = ["--steps", "4", "--batch", "2", "--seq", "32", "--set", "model.layers=2", "--set", "model.hidden=32"]


def run(folder: Path, *arguments: str, module: str = "zerocli", **environ: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | environ
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
