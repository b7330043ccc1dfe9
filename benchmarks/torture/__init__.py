"""The parts of benchmarks/torture.py: random runs, faults in them, and what must hold afterwards."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = [ROOT / "tests" / room for room in ("checkpoint", "tiers", "support", "")]
for folder in (*TESTS, ROOT):  # the ranks, damage and toy models of the tests are used here too
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
