"""docs: every example of python.md runs; architecture.md names the rooms there are; named files and links exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/python.md"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *ROOT.glob("docs/*.md")]
CODE = ("zerocli", "offload", "tiers", "tests", "benchmarks", "examples")


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


def test_the_files_that_pages_name_exist():
    """Each by the end of its path, such as `units/gather.py`."""
    paths = [f"/{path.relative_to(ROOT)}" for name in CODE for path in (ROOT / name).rglob("*.py")]
    named = {(page.name, file) for page in PAGES for file in re.findall(r"`([\w/]+\.py)`", page.read_text())}
    assert named
    assert [(page, file) for page, file in sorted(named) if not any(each.endswith(f"/{file}") for each in paths)] == []


def test_links_lead_to_files_and_headings():
    broken = [f"{page.name}: {link}" for page in PAGES for link in _links(page) if not _leads(page, link)]
    assert broken == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def _links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if "://" not in link]


def _leads(page: Path, link: str) -> bool:
    name, _, heading = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not heading or heading in _headings(target))


def _headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
