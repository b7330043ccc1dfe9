"""Law: the layers run zerocli -> offload -> tiers, never back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {"tiers": {"offload", "zerocli"}, "offload": {"zerocli"}}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_layer_imports_one_above_it(package):
    for path in (ROOT / package).rglob("*.py"):
        assert not imports(path) & FORBIDDEN[package], path


def test_the_check_would_notice(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from zerocli.engine import Engine\n")
    assert imports(bad) & FORBIDDEN["tiers"]
