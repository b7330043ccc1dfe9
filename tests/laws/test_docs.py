"""docs: every example of python.md runs, in order, in one namespace; architecture.md names the rooms there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/python.md"


def test_every_python_example_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        # Empty lines before it, so that an error names the line of the page.
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), namespace)


def test_the_architecture_names_every_room():
    """Every package is a row of the table of rooms, and every row is a package."""
    text = (ROOT / "docs/architecture.md").read_text()
    listed = re.findall(r"^\| `(\w[\w/]*)/` \|", text, re.MULTILINE)
    packages = [each.parent for name in ("zerocli", "offload", "tiers") for each in (ROOT / name).rglob("__init__.py")]
    assert sorted(listed) == sorted(str(each.relative_to(ROOT)).removeprefix("zerocli/") for each in packages)
