"""What a run gains that leaves a disk which became slow, beside what a fresh choice with the true rates gains.

    python benchmarks/adapting.py --dir /mnt/nvme --delay 0.01

Two ranks on the CPU train a small GPT-2 with `--auto` and little memory, so that optimizer states are on the disk, and
each transfer of the disk keeps its caller waiting. Three runs: one that stays as it was chosen, one that adapts, and
one with what `--auto` chooses with the rates that the second has measured. Prints one JSON document: the median seconds
of each run's last steps, and which share of the gain of the third run the second reached.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from zerocli import config as configs  # noqa: E402
from zerocli.config.options import AUTOMATIC, RunOptions  # noqa: E402
from zerocli.engine.events import Events  # noqa: E402
from zerocli.plan.models.resolve import run_model  # noqa: E402
from zerocli.plan.search import automatic  # noqa: E402
from zerocli.plan.setup import setup_of  # noqa: E402
from zerocli.plan.time.hardware import Hardware  # noqa: E402
from zerocli.ranks.worker import free_port  # noqa: E402

RANKS = 2
SETS = ["model.layers=4", "model.hidden=128", "model.heads=4", "train.batch=16", "train.seq=16", "checkpoint.every=0"]
SETS += ["offload.staging=1MiB", "offload.read_ahead=1MiB", "train.gpu_memory=17500000B", "train.log_every=1000"]
FREE = frozenset(AUTOMATIC)


class SlowDisk(Events):
    """A disk whose transfers keep their caller waiting."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def transfer(self, block: Any, transfer: Any, writes: bool, began: float) -> None:
        if block.tier.name == "nvme":
            time.sleep(self._seconds)


def rank(number: int, port: int, folder: str, sets: list[str], auto: frozenset[str], delay: float) -> None:
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    import torch

    from zerocli.run import trainer

    torch.set_num_threads(1)
    sys.exit(trainer.work(configs.load("tiny", sets), RunOptions(folder, auto=auto, events=(SlowDisk(delay),))))


def run(folder: Path, sets: list[str], auto: frozenset[str], delay: float) -> tuple[float, list[float], list[str]]:
    """Train; return the median seconds of the last steps, the losses and the changes."""
    folder.mkdir()
    port = free_port()
    processes = [
        multiprocessing.get_context("spawn").Process(target=rank, args=(each, port, str(folder), sets, auto, delay))
        for each in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"{folder}: exit codes {[process.exitcode for process in processes]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = statistics.median(row["seconds"] for row in rows[-8:])
    return last, [row["loss"] for row in rows], [row["adapted"] for row in rows if "adapted" in row]


def fresh_choice(sets: list[str], measured: dict[str, Any]) -> list[str]:
    """Return the keys of what `--auto` chooses on a machine as a run has measured it."""
    config = configs.load("tiny", sets)
    setup = setup_of(config, device="cpu", precision="fp32", ranks=RANKS, ranks_per_node=RANKS)
    setup = dataclasses.replace(setup, checkpoints=0)
    best = automatic.choose_setup(run_model(config, setup), setup, Hardware(**measured), FREE).best
    assert best is not None
    chosen = best.setup
    keys = {
        "zero.stage": chosen.stage,
        "offload.placement": chosen.offload,
        "activations.policy": chosen.recomputed.policy,
    }
    return [f"{key}={value}" for key, value in keys.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="folder on the disk; by default a temporary one")
    parser.add_argument("--delay", type=float, default=0.01, help="seconds that each transfer waits")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as name:
        folder = Path(name)
        (folder / "swap").mkdir()
        sets = [*SETS, f"train.steps={given.steps}", f"offload.nvme_path={folder / 'swap'}"]
        stays, losses, _ = run(folder / "stays", [*sets, "train.adapt=false"], FREE, given.delay)
        adapts, same, changes = run(folder / "adapts", sets, FREE, given.delay)
        document = json.loads((folder / "adapts" / "auto.json").read_text())
        fresh = fresh_choice(sets, document["measured"]) if changes else []
        chosen, _, _ = run(folder / "fresh", [*sets, *fresh], frozenset(), given.delay) if fresh else (stays, [], [])
    gain = (stays - adapts) / (stays - chosen) if stays > chosen else None
    seconds = {"stays": stays, "adapts": adapts, "fresh": chosen}
    answer = {"schema": 1, "delay": given.delay, "seconds": seconds, "share_of_gain": gain, "equal": losses == same}
    print(json.dumps(answer | {"changes": document.get("changes", []), "fresh_choice": fresh}, indent=2))


if __name__ == "__main__":
    main()
