"""The soak: two ranks train for long with saves and states on disk; what they hold must not grow after a warm-up."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

from torture import leftovers
from torture.cases import NO_FAULT
from torture.processes import Place, _read, forked
from torture.setups import Setup

SETUP = Setup(
    2,
    (
        *("zero.stage=3", "offload.placement=params=cpu,optimizer=nvme", "train.precision=bf16", "train.batch=2"),
        *("train.seq=16", "model.layers=4", "model.hidden=64", "model.heads=2", "checkpoint.every=20"),
        *("checkpoint.keep=2", "train.log_every=100000", "train.watchdog=120"),
    ),
    steps=1 << 30,
)
WARM_UP = 0.2
"""Part of the time that is not looked at."""
SAMPLE_SECONDS = 2.0
ALLOWED = {"resident MiB": 8.0, "descriptors": 0.0, "threads": 0.0, "files": 0.0, "swap MiB": 0.0}
"""By how much the last quarter's lowest may be above the first's: of memory, what an allocator's pools move by."""


def keep_few_lines() -> None:
    """Have a rank keep some hundred lines of metrics in memory: it takes hours to come to the usual 20,000."""
    from zerocli.profile.lines import History

    History.KEPT = 200


def sample(pids: list[int], place: Path) -> dict[str, float]:
    """Return what the ranks hold now, all together."""
    found = dict.fromkeys(ALLOWED, 0.0)
    for pid in pids:
        status = _read(Path(f"/proc/{pid}/status"))
        for line in status.splitlines():
            name, _, value = line.partition(":")
            if name == "VmRSS":
                found["resident MiB"] += int(value.split()[0]) / 1024
            elif name == "Threads":
                found["threads"] += int(value)
        swap = {}
        for fd in _listed(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if ".zerocli-swap-" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    about = os.stat(f"/proc/{pid}/fd/{fd}")
                    swap[about.st_ino] = about.st_blocks * 512
        found["descriptors"] += len(_listed(f"/proc/{pid}/fd"))
        found["swap MiB"] += sum(swap.values()) / 2**20
    found["files"] = sum(len(files) for _, _, files in os.walk(place))
    return found


def _listed(path: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(path)
    return []


def soak(root: Path, minutes: float, as_json: bool) -> int:
    """Train for so many minutes; print first, last and slope of what is held; return 1 if it grew."""
    place = Place(root / "soak")
    limit = 60 * minutes
    setup = SETUP.having(f"checkpoint.time_limit={limit + 20:.0f}")
    samples: list[tuple[float, dict[str, float]]] = []
    over = threading.Event()
    ended = []

    def train() -> None:
        ended.append(forked(setup, place, NO_FAULT, seconds=limit + 300, prepare=keep_few_lines))
        over.set()

    thread = threading.Thread(target=train)
    thread.start()
    began = time.monotonic()
    while not over.wait(SAMPLE_SECONDS):
        pids = leftovers.ranks_of(place.notes)
        if len(pids) == setup.world and (place.run / "metrics.jsonl").exists():
            samples.append((time.monotonic() - began, sample(pids, place.path)))
    thread.join()
    steps = _read(place.run / "metrics.jsonl").count("\n")
    saves = ended[0].said[0].count("saved in")
    rows = growth([each for each in samples if each[0] > limit * WARM_UP and each[0] < limit - 5])
    grew = [name for name, row in rows.items() if row["last"] > row["first"] + ALLOWED[name]]
    problems = [f"{name} grew" for name in grew]
    problems += [f"it ended with {ended[0].codes}: {ended[0].text[-3000:]}"] if set(ended[0].codes) != {75} else []
    problems += leftovers.files(place.path, setup.world, 2, finished=True) + ended[0].left
    if as_json:
        print(
            json.dumps(
                {"schema": 1, "minutes": minutes, "steps": steps, "saves": saves, "held": rows, "problems": problems}
            )
        )
    else:
        print(f"{steps} steps, {saves} saves, {len(samples)} samples in {minutes:g} minutes on {setup.world} ranks")
        print(f"{'both ranks together':<20} {'first':>10} {'last':>10} {'per hour':>10}")
        for name, row in rows.items():
            print(f"{name:<20} {row['first']:>10.1f} {row['last']:>10.1f} {row['slope']:>+10.2f}")
        print("\n".join(problems) or "nothing grew, nothing is left")
    sys.stdout.flush()
    return 1 if problems else 0


def growth(samples: list[tuple[float, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the lowest value of the first and last quarter, and the slope an hour over all.

    The lowest: what a save holds while it is under way comes and goes, and what leaks stays.
    """
    rows = {}
    quarter = max(1, len(samples) // 4)
    for name in ALLOWED:
        values = [held[name] for _, held in samples]
        slope = statistics.linear_regression([t for t, _ in samples], values).slope * 3600 if len(values) > 1 else 0.0
        first, last = min(values[:quarter], default=0.0), min(values[-quarter:], default=0.0)
        rows[name] = {"first": first, "last": last, "slope": slope}
    return rows
