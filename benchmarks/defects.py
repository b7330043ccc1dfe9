"""Defects put into the code one at a time: which test finds each? The measure of what a change to the tests costs.

    python benchmarks/defects.py              # every defect against the suite, until the first failure: hours
    python benchmarks/defects.py --near       # against the tests that are meant to find it: about a minute each
    python benchmarks/defects.py --only 3,17 tests/engine tests/laws

defects.txt has a block for each defect: what it is, the tests that are meant to find it, and in the form of a diff the
text that occurs once in the three packages and what replaces it. The tree is copied for each: the checkout stays as is.
Exit code 1 if a defect was not found or its text is gone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("zerocli", "offload", "tiers")


class Defect(NamedTuple):
    what: str
    near: list[str]
    """The tests that are meant to find it."""
    old: str
    new: str


def read_defects(path: Path) -> list[Defect]:
    """Return the defects of a file; lines that begin with # are headings."""
    found = []
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("#"))
    for block in filter(None, (block.strip("\n") for block in text.split("\n\n"))):
        title, *lines = block.split("\n")
        what, near = title.split(" | ")
        old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        found.append(Defect(what, near.split(), old, new))
    return found


def place_of(defect: Defect, root: Path) -> Path | None:
    """Return the file that has the defect's text; None unless it occurs exactly once."""
    counts = {path: path.read_text().count(defect.old) for each in PACKAGES for path in (root / each).rglob("*.py")}
    found = [path for path, count in counts.items() if count]
    return found[0] if len(found) == 1 and counts[found[0]] == 1 else None


def copy_tree(root: Path, folder: Path) -> None:
    """Copy what git would: the tracked files, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def try_defect(defect: Defect, root: Path, arguments: list[str], seconds: float) -> str:
    """Return the first test that fails with the defect, "nothing" if none does, or why it was not tried."""
    with tempfile.TemporaryDirectory(prefix="zerocli-defect-", ignore_cleanup_errors=True) as name:
        copy_tree(root, Path(name))
        path = place_of(defect, Path(name))
        if path is None:
            return "its text is gone"
        path.write_text(path.read_text().replace(defect.old, defect.new))
        command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-p", "no:cacheprovider", *arguments]
        environ = os.environ | {"PYTHONPATH": name}
        try:
            done = subprocess.run(command, cwd=name, env=environ, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"no end in {seconds:.0f} s"
        if done.returncode == 0:
            return "nothing"
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return found[1] if found else f"exit code {done.returncode}: {done.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="paths and options for pytest; default: the suite")
    parser.add_argument("--near", action="store_true", help="run the tests that are meant to find each defect")
    parser.add_argument("--only", default="", help="numbers of defects, separated by commas")
    parser.add_argument("--list", action="store_true", help="print the defects and where they are")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to copy (default: this one)")
    parser.add_argument("--seconds", type=float, default=3600.0, help="limit for one defect")
    chosen = parser.parse_args()
    defects = read_defects(Path(__file__).with_suffix(".txt"))
    numbers = [int(each) for each in chosen.only.split(",")] if chosen.only else range(len(defects))
    missed = 0
    for number in numbers:
        defect, began = defects[number], time.monotonic()
        if chosen.list:
            path = place_of(defect, chosen.tree)
            result = str(path.relative_to(chosen.tree)) if path else "its text is gone"
            missed += path is None
        else:
            arguments = [*(defect.near if chosen.near else ()), *chosen.tests]
            result = try_defect(defect, chosen.tree, arguments, chosen.seconds)
            missed += "::" not in result and not result.startswith("no end")
        seconds = "" if chosen.list else f" | {time.monotonic() - began:.0f} s"
        print(f"{number} | {defect.what} | {result}{seconds}", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} found", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
