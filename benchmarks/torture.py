"""A fault campaign: random runs, a random fault in each, a resume, and the numbers of an undisturbed run beside it.

    python benchmarks/torture.py --minutes 20 --seed 7

A case is a training run of a random configuration in which one thing goes wrong: a rank, the launcher or everything is
killed, stopped or signalled, at an event, at any line or from outside; a disk is full, fails, is slow or stuck; a link
is cut; the newest checkpoint is damaged. It must end by itself, say why, and resume to the very numbers (every loss,
norm, tensor and counter) of the run that nothing happened to. In between, in-process cases damage saved checkpoints and
run folders, and fail transfers of the tiers. Nothing may be left: processes, files, shared memory, descriptors,
threads, pinned memory.

Prints a tally by kind of fault, and for each failure the command that runs that case alone. Exit code 1 if a case was
wrong, left something or hung. `--soak` trains two ranks with saves and states on disk and looks for growth instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

NUM_INSIDE = 25
"""In-process cases beside each run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="start no case after so long (10)")
    parser.add_argument("--seed", type=int, default=1, help="decides configurations and faults (1)")
    parser.add_argument("--runs", type=int, default=1 << 30, metavar="N", help="run at most N cases with processes")
    parser.add_argument("--inside", type=int, default=NUM_INSIDE, metavar="N", help="in-process cases a run (25)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at once (2)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kinds of faults whose name contains TEXT")
    parser.add_argument("--case", default="", metavar="SEED:run|inside:INDEX", help="one case again, as it was printed")
    parser.add_argument("--dir", type=Path, help="folder for the runs (a temporary one)")
    parser.add_argument("--keep", action="store_true", help="keep the folders of cases that failed")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--soak", action="store_true", help="train two ranks for --minutes and look for growth")
    given = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="zerocli-torture-", dir=given.dir))
    try:
        if given.soak:
            from torture.soak import soak

            return soak(root, given.minutes, given.json)
        return campaign(given, root)
    finally:
        if not given.keep:
            shutil.rmtree(root, ignore_errors=True)


def campaign(given: argparse.Namespace, root: Path) -> int:
    from torture import leftovers
    from torture.cases import Campaign
    from torture.inside import Inside
    from torture.tally import Tally

    tally, deadline, shared = Tally(), time.monotonic() + 60 * given.minutes, leftovers.shared_memory()
    began = time.monotonic()

    def tell(result) -> None:
        tally.add(result)
        if result.failed:
            print(result.report(), file=sys.stderr, flush=True)

    if given.case:
        seed, what, index, *only = given.case.split(":")
        runs = Campaign(int(seed), root, ":".join(only), given.keep)
        if what == "run":
            tell(runs.run(int(index)))
        else:
            with Inside(int(seed), root) as inside:
                inside.run(int(index), int(index) + 1, tell)
    else:
        runs = Campaign(given.seed, root, given.only, given.keep)
        numbers = iter(range(given.runs))
        lock, stopping = threading.Lock(), threading.Event()

        def work(job: int) -> None:
            with Inside(given.seed, root, str(job)) as inside:
                while time.monotonic() < deadline and not stopping.is_set():
                    with lock:
                        index = next(numbers, None)
                    if index is None:
                        return
                    tell(runs.run(index))
                    inside.run(index * given.inside, (index + 1) * given.inside, tell)
                    if index % 20 == 19:
                        progress(tally, began)

        threads = [threading.Thread(target=work, args=(job,)) for job in range(given.jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            print("interrupted: ending with the cases under way", file=sys.stderr, flush=True)
            stopping.set()
            for thread in threads:
                thread.join()
    new = sorted(leftovers.shared_memory() - shared)
    print(f"{time.monotonic() - began:.0f} s; new in /dev/shm: {', '.join(new) or 'nothing'}", file=sys.stderr)
    if given.json:
        print(json.dumps({"schema": 1, "seed": given.seed, **tally.as_dict(), "shared_memory": new}))
    else:
        print(tally.table())
        for result in tally.failures:
            print(f"again: python benchmarks/torture.py --case '{result.case}'")
    return 1 if tally.failed or new else 0


def progress(tally, began: float) -> None:
    total = tally.total
    print(
        f"{time.monotonic() - began:5.0f} s: {total['cases']} cases, {total['kills']} kills, {total['wrong']} wrong, "
        f"{total['leftovers']} leftovers, {total['hangs']} hangs",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
