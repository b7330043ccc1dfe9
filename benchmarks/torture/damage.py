"""Damage to a run folder, one kind a function: what accidents, other programs and other users do to files.

Each changes a copy of a good run folder. The law for all of them: the resume loads the state that was saved at the step
it names, or an older one and says why, or fails clearly.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from test_corruption import HOSTILE, cut, empty, flip, grow, places, remove, rewrite, scramble

from torture import disks
from torture.faults import Fault

ANYTHING = [0, 1, 2, 7, -1, 2**31, 2**63, 10**30, 1.5, float("nan"), True, None, "", "x", [], {}, "int32", "../x"]


@dataclass
class Scene:
    """A copy of a run folder to damage, with what else an attacker may have at hand."""

    run: Path
    outside: Path
    """Not the run's: nothing here may change. Holds a checkpoint of another run, and a file."""
    fixtures: list[Path]
    """Good run folders, the first of which this one is a copy of."""
    draw: random.Random
    num_checkpoints: int

    @property
    def newest(self) -> Path:
        return self.step(-1)

    def step(self, number: int) -> Path:
        found = sorted((self.run / "checkpoints").iterdir())
        return found[number]

    def file(self) -> Path:
        """Return a file of the newest checkpoint."""
        return self.draw.choice(sorted(self.newest.iterdir()))

    def shard(self) -> Path:
        return self.draw.choice(sorted(self.newest.glob("rank-*.bin")))


Act = Callable[[Scene], AbstractContextManager[object] | None]


def simple(act: Callable[[Path, random.Random], str]) -> Act:
    """Return damage to a file of the newest checkpoint, and sometimes of the one before it too."""

    def damage(scene: Scene) -> None:
        act(scene.file(), scene.draw)
        if scene.draw.random() < 0.2:
            act(scene.draw.choice(sorted(scene.step(-2).iterdir())), scene.draw)

    return damage


def zero_a_range(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    length = draw.choice([1, 64, 512, 4096])
    data[at : at + length] = bytes(len(data[at : at + length]))
    path.write_bytes(data)
    return ""


def copy_a_range(path: Path, draw: random.Random) -> str:
    """As a disk does that writes a sector to the wrong place."""
    data = bytearray(path.read_bytes())
    length = min(len(data), draw.choice([8, 512, 4096]))
    a, b = (draw.randrange(len(data) - length + 1) for _ in range(2))
    data[a : a + length] = data[b : b + length]
    path.write_bytes(data)
    return ""


def swap_files(scene: Scene) -> None:
    """Two files of one checkpoint, or the same file of two steps."""
    first = scene.file()
    others = [path for path in scene.newest.iterdir() if path != first] + [scene.step(-2) / first.name]
    second = scene.draw.choice(sorted(others))
    aside = scene.run / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def file_of_another_run(scene: Scene) -> None:
    other = scene.draw.choice(scene.fixtures[1:])
    files = sorted((other / "checkpoints").glob("step-*/*"))
    shutil.copy(scene.draw.choice(files), scene.file())


def stale_file(scene: Scene) -> None:
    target = scene.file()
    shutil.copy(scene.step(scene.draw.randrange(scene.num_checkpoints - 1)) / target.name, target)


def stale_folder(scene: Scene) -> None:
    """An older checkpoint under a newer name, or in the newest one's place."""
    old = scene.step(scene.draw.randrange(scene.num_checkpoints - 1))
    number = int(scene.newest.name[5:]) + scene.draw.randint(0, 3)
    target = scene.run / f"checkpoints/step-{number:08d}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(old, target)


def checkpoint_of_another_model(scene: Scene) -> None:
    other = sorted((scene.draw.choice(scene.fixtures[1:]) / "checkpoints").iterdir())[-1]
    shutil.rmtree(scene.newest)
    shutil.copytree(other, scene.run / "checkpoints" / other.name)


def other_kind_of_file(scene: Scene) -> None:
    """A link, a pipe, a folder, a socket or a device in a file's place."""
    path = scene.file()
    kind = scene.draw.choice(["link", "dangling", "loop", "device", "pipe", "folder", "socket", "hard link"])
    copy = scene.outside / "copy"
    if kind in ("link", "hard link"):
        shutil.copy(path, copy)
    path.unlink()
    if kind == "link":
        path.symlink_to(copy)
    elif kind == "dangling":
        path.symlink_to(scene.outside / "nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to(scene.draw.choice(["/dev/zero", "/dev/full", "/dev/tty"]))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "hard link":
        os.link(copy, path)
    else:
        with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):  # its name must be short
            listener.bind(path.name)


def linked_checkpoint(scene: Scene) -> None:
    """A link to another run's checkpoint: under a new name, or in the place of one of ours."""
    target = next(iter((scene.outside / "checkpoints").iterdir()))
    name = scene.draw.choice(["step-00000009", "step-00000001", scene.newest.name, f"{scene.newest.name}.old.tmp"])
    path = scene.run / "checkpoints" / name
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(target)


def linked_folder_of_checkpoints(scene: Scene) -> None:
    """All of RUN/checkpoints is a link to another place that holds them."""
    folder = scene.run / "checkpoints"
    folder.rename(scene.run / "moved")
    folder.symlink_to("moved")


def odd_names(scene: Scene) -> None:
    folder, draw = scene.run / "checkpoints", scene.draw
    name = draw.choice(
        ["step-00000099", "step-99999999999", "step-00000003.tmp", "step-00000050.tmp", "step-00000004.old.tmp"]
        + ["step-\n0000005", "step-0000000x", ".nfs0001", "step-00000009.old.tmp", "step-٠٠٠٠٠٠٠٩"]
    )
    what = draw.choice(["empty", "file", "copy", "part", "link"])
    path = folder / name
    if what == "file":
        path.write_bytes(draw.randbytes(100))
    elif what == "copy":
        shutil.copytree(scene.newest, path)
    elif what == "link":
        path.symlink_to(scene.outside)
    else:
        path.mkdir()
        if what == "part":
            (path / "manifest.json.part").write_text("{")


# -- manifests whose checksum holds ------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any], random.Random], None]) -> Act:
    def damage(scene: Scene) -> None:
        rewrite(scene.newest, lambda manifest: change(manifest, scene.draw))

    return damage


def another_step(manifest: dict[str, Any], draw: random.Random) -> None:
    manifest["step"] += draw.choice([-1, 1, 5])


def another_count_of_steps(manifest: dict[str, Any], draw: random.Random) -> None:
    """The counters of another step in this one's manifest."""
    manifest["values"]["steps"] += draw.choice([-1, 1, 5])
    manifest["values"]["updates"] = min(manifest["values"]["updates"], manifest["values"]["steps"])


def pieces_of(manifest: dict[str, Any]) -> list[tuple[str, str, list[Any]]]:
    return [(name, t["dtype"], piece) for name, t in manifest["tensors"].items() for piece in t["pieces"]]


def swapped_pieces(manifest: dict[str, Any], draw: random.Random) -> None:
    """Two pieces of one size and type change places: files, positions and checksums go with them."""
    found = pieces_of(manifest)
    alike = [(a, b) for i, a in enumerate(found) for b in found[:i] if a[1] == b[1] and a[2][1] == b[2][1]]
    (_, _, first), (_, _, second) = draw.choice(alike)
    first[2:], second[2:] = second[2:], first[2:]


def swapped_tensors(manifest: dict[str, Any], draw: random.Random) -> None:
    """Two tensors of one shape change names."""
    tensors = manifest["tensors"]
    names = sorted(tensors)
    alike = [
        (a, b)
        for i, a in enumerate(names)
        for b in names[:i]
        if all(tensors[a][key] == tensors[b][key] for key in ("shape", "dtype"))
    ]
    first, second = draw.choice(alike)
    tensors[first], tensors[second] = tensors[second], tensors[first]


def moved_piece(manifest: dict[str, Any], draw: random.Random) -> None:
    _, _, piece = draw.choice(pieces_of(manifest))
    piece[3] = max(0, piece[3] + draw.choice([-4096, -4, 4, 8, 4096]))


def anything_anywhere(manifest: dict[str, Any], draw: random.Random) -> None:
    """One place is replaced, removed or repeated; not among the values, whose numbers nothing else tells."""
    found = [place for place in places(manifest) if place and place[0] != "values"]
    *above, last = draw.choice(found)
    node: Any = manifest
    for key in above:
        node = node[key]
    what = draw.choice(["replace", "remove", "repeat"])
    if what == "replace":
        node[last] = draw.choice(ANYTHING)
    elif what == "remove":
        del node[last]
    elif isinstance(node, list):
        node.append(node[last])


def malformed_values(manifest: dict[str, Any], draw: random.Random) -> None:
    """What cannot be a value is refused; a number for a number could be right, and is not tried here."""
    values = manifest["values"]
    name = draw.choice(["steps", "updates", "loss_scale", "optimizer", "precision", "reduce_order"])
    if draw.random() < 0.3:
        del values[name]
    else:
        values[name] = draw.choice([None, "x", [], {}, float("nan"), float("inf"), -1, 10**30])
        if name == "precision":  # a run in another precision starts with its own loss scale: not for a known name
            values[name] = None


def hostile(scene: Scene) -> None:
    """The hostile checkpoints of tests/checkpoint/test_corruption.py that fit any model."""
    fitting = [
        act for act in HOSTILE if act.__name__ not in ("_a_piece_twice", "_integers_for_floats", "_linked_folder")
    ]
    with contextlib.suppress(KeyError, ValueError):
        scene.draw.choice(fitting)(scene.newest)


# -- errors of the disk ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def patched(names: str, fault: Fault, folder: Path) -> Iterator[None]:
    """While the body runs, have these functions of `os` fail for files of a folder."""
    calls = disks.Calls(fault, lambda: None)
    before = {name: getattr(os, name) for name in names.split(",")}
    for name, act in before.items():
        setattr(os, name, disks.spoiled(name, act, calls, folder))
    try:
        yield
    finally:
        for name, act in before.items():
            setattr(os, name, act)


def unreadable(scene: Scene) -> AbstractContextManager[None]:
    """The newest checkpoint cannot be read: that is no damage, and an older one must not be taken for it."""
    only, numbers = scene.draw.choice(
        [("preadv", [errno.EIO, errno.ESTALE]), ("open", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ENFILE])]
    )
    number = scene.draw.choice(numbers)
    # From some call on, all fail: a first open of a file may be a mere look at its size.
    fault = Fault("", "error", "run", (0,), scene.draw.randint(1, 3), 0, only, number)
    return patched(only, fault, scene.newest)


def short_reads(scene: Scene) -> AbstractContextManager[None]:
    return patched("preadv", Fault("", "short", "run", (0,), 1, 0), scene.run)


def no_permission(scene: Scene) -> None:
    scene.file().chmod(0)


# -- other files of the run --------------------------------------------------------------------------------------------


def other_file(name: str) -> Act:
    def damage(scene: Scene) -> None:
        path = scene.run / name
        act = scene.draw.choice([flip, cut, grow, scramble, empty, remove, zero_a_range])
        act(path, scene.draw)

    return damage


def large_json(scene: Scene) -> None:
    """A sparse file of a terabyte, or JSON of great depth."""
    path = scene.run / scene.draw.choice(["config.json", "metrics.jsonl"])
    if path.name == "config.json" and scene.draw.random() < 0.5:
        path.write_text("[" * 200000)
    elif path.name == "metrics.jsonl":
        path.write_bytes(path.read_bytes() + b"[" * 200000)


KINDS: dict[str, tuple[int, Act]] = {
    "file: bit flipped": (14, simple(flip)),
    "file: cut": (6, simple(cut)),
    "file: grown": (4, simple(grow)),
    "file: scrambled": (6, simple(scramble)),
    "file: zeros": (5, simple(zero_a_range)),
    "file: range repeated": (5, simple(copy_a_range)),
    "file: emptied": (2, simple(empty)),
    "file: removed": (2, simple(remove)),
    "file: swapped": (5, swap_files),
    "file: of another run": (4, file_of_another_run),
    "file: of an older step": (4, stale_file),
    "file: link, pipe, folder": (6, other_kind_of_file),
    "file: permission": (1, no_permission),
    "file: hostile": (5, hostile),
    "folder: older step": (3, stale_folder),
    "folder: another model's": (2, checkpoint_of_another_model),
    "folder: link to another's": (4, linked_checkpoint),
    "folder: all a link": (1, linked_folder_of_checkpoints),
    "folder: odd names": (4, odd_names),
    "manifest: step": (1, edited(another_step)),
    "manifest: counters": (2, edited(another_count_of_steps)),
    "manifest: swapped pieces": (3, edited(swapped_pieces)),
    "manifest: swapped tensors": (2, edited(swapped_tensors)),
    "manifest: moved piece": (2, edited(moved_piece)),
    "manifest: anything": (8, edited(anything_anywhere)),
    "manifest: values": (3, edited(malformed_values)),
    "reading: error": (5, unreadable),
    "reading: short": (2, short_reads),
    "metrics.jsonl": (2, other_file("metrics.jsonl")),
    "config.json": (2, other_file("config.json")),
    "large json": (1, large_json),
}
NO_FALLBACK = ("reading: error", "file: permission")
"""Kinds after which no older checkpoint may be taken: the newest is whole, and cannot be read now."""


def tree(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Return all that lies in a folder, with the bytes of its files: equal trees were not written to."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        held: bytes | str = path.read_bytes() if stat.S_ISREG(mode) else ""
        found[str(path.relative_to(folder))] = (mode, held)
    return found


def same_json(path: Path) -> Any:
    """Return what a JSON file says; None where it is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None
