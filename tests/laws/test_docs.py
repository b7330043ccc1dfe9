"""docs: every example of python.md runs; commands have the flags there are; named rooms, files and links exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from zerocli.cli.main import group

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


def test_every_command_is_one_that_its_program_takes():
    commands = [words for page in PAGES for words in _commands(page.read_text())]
    assert len(commands) > 100
    for words in commands:
        _parse(words)


def test_the_scripts_and_manifests_of_a_cluster_are_valid():
    """By the shell and by YAML; what runs them on a cluster is not here: tests/run/test_engines.py."""
    text = (ROOT / "docs/cluster.md").read_text()
    scripts, files = (re.findall(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.M) for kind in ("bash", "yaml"))
    assert len(scripts) == 2 and len(files) == 3
    yaml = pytest.importorskip("yaml")
    job, train_job, sky = map(yaml.safe_load, files)
    for script in (*scripts, sky["run"], sky["setup"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    for found in (container, train_job["spec"]["trainer"]):
        _parse([*found["command"], *found["args"]])


def _commands(page: str) -> list[list[str]]:
    """Return the words of each command of torchrun or zerocli in a page's blocks."""
    found = []
    for block in re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if command := re.match(r" *(?:srun |python -m )?((?:torchrun .*-m )?zerocli [a-z].*)", line):
                found.append(shlex.split(re.sub(r"\$\w+", "1", command[1]), comments=True))
    return found


def _parse(words: list[str]) -> None:
    """Parse a command as torchrun and zerocli do, which raise or exit at a flag or a value that they do not know."""
    program, *words = words
    if program == "torchrun":
        parser = get_args_parser()
        if "--shutdown-timeout" not in parser.format_help():  # the page says so
            parser.add_argument("--shutdown-timeout")
        asked = parser.parse_args(words)
        assert asked.module and asked.training_script == "zerocli", words
        words = asked.training_script_args
    command = group.get_command(click.Context(group), words[0])
    assert command is not None, words
    command.make_context(words[0], words[1:])


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
