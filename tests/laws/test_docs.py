"""docs: every example of python.md runs, in order, in one namespace; architecture.md lists the files there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/python.md"
STARTS = {"__init__.py", "__main__.py"}


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


def test_the_architecture_lists_every_file():
    """Each table of files has those of its folder; the engine's are grouped, and each is named there."""
    text = (ROOT / "docs/architecture.md").read_text()
    tables = re.findall(r"^### `([\w/]+)/`\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)
    listed = {folder: sorted(re.findall(r"^\| `(\w+\.py)` \|", table, re.MULTILINE)) for folder, table in tables}
    packages = [ROOT / name for name in ("zerocli", "offload", "tiers")]
    folders = [each.parent for package in packages for each in package.rglob("__init__.py")]
    there = {
        str(each.relative_to(ROOT)): sorted({file.name for file in each.glob("*.py")} - STARTS) for each in folders
    }
    engine = there.pop("zerocli/engine")
    assert listed == there
    assert [name for name in engine if f"`{name}`" not in text.partition("### The engine")[2]] == []


def test_links_lead_to_files_and_headings():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    broken = [f"{page.name}: {link}" for page in pages for link in _links(page) if not _leads(page, link)]
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
