"""Law: a name with a leading underscore belongs to its file; no other file of ours uses it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("zerocli", "offload", "tiers")
TORCH = {"_buffers", "_parameters", "_version", "_cdata", "_schema", "_orig_mod", "_wrapped_by_lr_sched"}
TORCH |= {"_modules", "_base", "_is_view", "_use_count"}
TORCH |= {"_indices", "_values", "_metadata", "_non_persistent_buffers_set"}
TORCH |= {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
TORCH |= {"_call_impl", "_forward_hooks", "_forward_pre_hooks"}
"""Private names of torch's modules, tensors, storages, operators and schedulers that have no public counterpart."""
HOOKS = {"_reset_parameters", "_init_weights", "_is_stateful", "_no_split_modules"}
HOOKS |= {"_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"}
"""Names by which other people's modules say how their parameters are made and stored, and what they are."""
PYTHON = {"_make", "_preload_modules", "_inheriting"}
"""Of named tuples, and of the processes of multiprocessing."""
REFLECTION = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def defined(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the names that a file defines: functions, classes, fields, and what is assigned on self."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def foreign(nodes: list[ast.AST]) -> set[str]:
    """Return the names by which a file knows modules and objects of other projects."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in LAYERS and not node.level:
            found |= {alias.asname or alias.name for alias in node.names}
    return found - set(LAYERS)


def root(node: ast.expr) -> str:
    """Return the name that a chain of attributes begins with; "" where it begins with something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_own(node: ast.expr) -> bool:
    calls_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return calls_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def uses(nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, str]]:
    """Yield (object, name) of all attributes that a file uses, also by getattr and its like."""
    for node in nodes:
        if isinstance(node, ast.Attribute):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFLECTION:
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield node.args[0], node.args[1].value


def intrusions(source: str) -> list[str]:
    """Return the private names of other files of ours that a source uses, as it writes them."""
    nodes = list(ast.walk(ast.parse(source)))
    allowed, others = {*defined(nodes), *TORCH, *HOOKS, *PYTHON}, foreign(nodes)
    found = [
        f"{ast.unparse(value)}.{name}"
        for value, name in uses(nodes)
        if is_private(name) and name not in allowed and not is_own(value) and root(value) not in others
    ]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LAYERS:
            found += [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_no_file_uses_the_private_names_of_another(layer):
    found = {str(path.relative_to(ROOT)): intrusions(path.read_text()) for path in (ROOT / layer).rglob("*.py")}
    assert found and not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(tier):\n    return tier._arenas", ["tier._arenas"]),
        ("def f(engine):\n    return engine.tiers._open[0]", ["engine.tiers._open"]),
        ("def f(tier):\n    return getattr(tier, '_files', ())", ["tier._files"]),
        ("from offload import store\nstore._hidden()", ["store._hidden"]),
        ("from offload.store import _hidden", ["offload.store._hidden"]),
        ("import tiers.base\ntiers.base._drain(1)", ["tiers.base._drain"]),
        ("import torch\ntorch._C._x(torch.ones(1)._version)", []),
        ("class A:\n    def __init__(self, b):\n        self._x = b._x", []),
        ("class A(B):\n    def f(self):\n        return self._x + super()._y()", []),
    ],
)
def test_the_check_would_notice(source, expected):
    assert intrusions(source) == expected
