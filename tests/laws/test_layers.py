"""Laws: layers run zerocli -> offload -> tiers, rooms of zerocli downwards, never back; no import goes in a circle."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("zerocli", "offload", "tiers")
"""From the top down: each may import those after it."""
ROOMS = (
    *("cli", "check", "run", "data", "profile", "checkpoint", "plan", "models", "engine", "ranks", "config", "layout"),
)
"""The same for the packages of zerocli. The modules beside them are below all, but for those that start the program."""
PLAN = ("report", "search", "models", "time", "memory", "blocks")
"""The same for the rooms of the plan; `memory` and `time` do not know each other."""
START = ("zerocli", "zerocli.__main__", "zerocli.entry")
TORCH_FREE = ("config", "layout")


def name_of(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path, at_import_only: bool = False) -> Iterator[str]:
    """Yield the modules that a file imports, anywhere, or only those that it imports when it is imported itself."""
    for node in import_statements(path):
        if at_import_only and node.col_offset:  # not a statement of the module itself
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else node.module for name in full)


def room_of(name: str) -> str | None:
    """Return the room of a module of zerocli; "" for those beside the rooms, None for whatever is not ours."""
    if not name.startswith("zerocli") or name in START:
        return None
    room = name.split(".")[1]
    return room if room in ROOMS else ""


def climbs(room: str, path: Path) -> list[str]:
    """Return what a file in a room imports from rooms above it."""
    above = ROOMS[: ROOMS.index(room)] if room else ROOMS
    return [name for name in imports(path) if room_of(name) in above]


@pytest.mark.parametrize("room", ["", *PLAN])
def test_no_room_of_the_plan_imports_one_above_it(room):
    """Modules beside the rooms (setup, rows, measure) are below all of them; the package itself offers names of all."""
    above = {*(PLAN[: PLAN.index(room)] if room else PLAN), *(("memory",) if room == "time" else ())}
    folder = ROOT / "zerocli" / "plan" / room
    files = [path for path in folder.glob("*.py") if room or path.name != "__init__.py"]
    assert files
    found = {path.name: [name for name in imports(path) if plan_room(name) in above] for path in files}
    assert not {name: climbed for name, climbed in found.items() if climbed}


def plan_room(name: str) -> str | None:
    parts = name.split(".")
    return parts[2] if parts[:2] == ["zerocli", "plan"] and len(parts) > 2 else None


@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_imports_one_above_it(layer):
    above = LAYERS[: LAYERS.index(layer)]
    for name, path in modules().items():
        if name.split(".")[0] == layer:
            assert not [other for other in imports(path) if other.split(".")[0] in above], path


@pytest.mark.parametrize("room", [*ROOMS, ""])
def test_no_room_imports_one_above_it(room):
    inside = [path for name, path in modules().items() if room_of(name) == room]
    assert inside
    assert not {name_of(path): found for path in inside if (found := climbs(room, path))}


def test_every_package_is_a_room():
    found = {path.parent.name for path in (ROOT / "zerocli").glob("*/__init__.py")}
    assert found == set(ROOMS)


def test_no_modules_import_in_a_circle():
    graph = {name: {other for other in imports(path, True) if other in modules()} for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name not in done:
            for other in graph[name]:
                visit(other, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("room", TORCH_FREE)
def test_some_rooms_import_no_torch(room):
    for name, path in modules().items():
        if room_of(name) == room:
            assert not [other for other in imports(path) if other.split(".")[0] == "torch"], path


def test_the_checks_would_notice(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from zerocli.engine.engine import Engine\n")
    assert climbs("layout", bad) == climbs("", bad) == ["zerocli.engine.engine"] and not climbs("plan", bad)
