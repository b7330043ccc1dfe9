"""A damaged checkpoint is never loaded: the damage is named, and no wrong number gets through. Nothing is unpickled."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from runs import losses, train
from test_checkpoint import engine_of, everything
from test_checkpoint import train as steps

from zerocli.checkpoint import Damaged, Folder, Saver, load, resume
from zerocli.checkpoint import manifest as manifests
from zerocli.files import DirectFile

NUM_CORRUPTIONS = 240


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 2, an engine to load it into, and what it must then hold."""
    folder = tmp_path_factory.mktemp("saved")
    model, engine = engine_of({"stage": 3, "precision": "bf16"})
    steps(engine, model, range(1, 3))
    saver = Saver(engine, folder, asynchronous=False)
    saver.save(2)
    saver.close()
    assert saver.failure is None
    return Folder(folder).of(2), everything(engine)


def flip(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    data[at] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"bit of byte {at}"


def cut(path: Path, draw: random.Random) -> str:
    length = draw.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"cut to {length}"


def grow(path: Path, draw: random.Random) -> str:
    with path.open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 5000)))
    return "grown"


def scramble(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    length = draw.randint(1, 600)
    data[at : at + length] = draw.randbytes(len(data[at : at + length]))
    path.write_bytes(data)
    return f"{length} bytes at {at}"


def empty(path: Path, draw: random.Random) -> str:
    path.write_bytes(b"")
    return "emptied"


def remove(path: Path, draw: random.Random) -> str:
    path.unlink()
    return "removed"


def test_no_corruption_is_ever_loaded(saved, tmp_path):
    """Padding between pieces is the one place where a byte may change unseen: it is part of no number."""
    path, expected = saved
    _, engine = engine_of({"stage": 3, "precision": "bf16"}, seed=3)
    load(engine, path)
    assert everything(engine) == expected
    draw = random.Random(7)
    acts = [flip, flip, flip, flip, cut, scramble, scramble, grow, empty, remove]
    refused = 0
    for number in range(NUM_CORRUPTIONS):
        copy = tmp_path / "step-00000002"
        shutil.copytree(path, copy)
        target = copy / draw.choice(["manifest.json", "rank-00000.bin"])
        before = target.read_bytes()
        what = acts[number % len(acts)](target, draw)
        try:
            load(engine, copy)
        except Damaged as error:
            refused += 1
            assert re.search(r"manifest|rank-\d{5}\.bin|format", str(error)), (what, error)
        else:
            same = target.exists() and target.read_bytes() == before
            assert same or target.name == "rank-00000.bin", what
            assert everything(engine) == expected, what
        shutil.rmtree(copy)
    assert refused >= 0.8 * NUM_CORRUPTIONS
    load(engine, path)  # a refused load leaves nothing behind that a good one does not replace
    assert everything(engine) == expected


def rewrite(path: Path, change) -> None:
    """Change what the manifest says and give it a checksum that holds."""
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    change(manifest)
    text = json.dumps(manifest, separators=(",", ":")).encode()
    digest = manifests.hashlib.sha256(text).hexdigest().encode()
    (path / "manifest.json").write_bytes(manifests._HEAD + digest + manifests._MIDDLE + text + manifests._TAIL)


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (str(Path.cwd() / "exploded"),))


def _newer(path: Path) -> None:
    rewrite(path, lambda m: m.update(version=2))


def _climbs(path: Path) -> None:
    shutil.copy(path / "rank-00000.bin", path.parent / "outside.bin")
    rewrite(path, lambda m: m["files"][0].__setitem__(0, "../outside.bin"))


def _absolute(path: Path) -> None:
    rewrite(path, lambda m: m["files"][0].__setitem__(0, str(path / "rank-00000.bin")))


def _linked_file(path: Path) -> None:
    (path / "rank-00000.bin").rename(path.parent / "outside.bin")
    (path / "rank-00000.bin").symlink_to(path.parent / "outside.bin")


def _linked_manifest(path: Path) -> None:
    (path / "manifest.json").rename(path.parent / "outside.json")
    (path / "manifest.json").symlink_to(path.parent / "outside.json")


def _linked_folder(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def _pickled_manifest(path: Path) -> None:
    (path / "manifest.json").write_bytes(pickle.dumps(Bomb()))


def _pickled_shard(path: Path) -> None:
    (path / "rank-00000.bin").write_bytes(pickle.dumps(Bomb()).ljust((path / "rank-00000.bin").stat().st_size, b"."))


def _torch_saved_shard(path: Path) -> None:
    size = (path / "rank-00000.bin").stat().st_size
    torch.save({"bomb": Bomb()}, path / "rank-00000.bin")
    os.truncate(path / "rank-00000.bin", size)


def _dcp_metadata_alone(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / ".metadata").write_bytes(pickle.dumps(Bomb()))


def _fifo(path: Path) -> None:
    (path / "rank-00000.bin").unlink()
    os.mkfifo(path / "rank-00000.bin")


def _outside_its_file(path: Path) -> None:
    rewrite(path, lambda m: next(iter(m["tensors"].values()))["pieces"][0].__setitem__(3, 1 << 40))


def _a_piece_less(path: Path) -> None:
    rewrite(path, lambda m: next(iter(m["tensors"].values()))["pieces"].pop())


def _not_numbers(path: Path) -> None:
    rewrite(path, lambda m: m.update(step="two"))


def _deep(path: Path) -> None:
    (path / "manifest.json").write_text('{"sha256":"' + "[" * 100000)


HOSTILE = {
    _newer: "format version 2; this zerocli reads version 1",
    _climbs: "names a file '../outside.bin'",
    _absolute: "names a file",
    _linked_file: "rank-00000.bin is a link",
    _linked_manifest: "manifest.json is a link",
    _linked_folder: "it is a link",
    _pickled_manifest: "its manifest is not one",
    _pickled_shard: "rank-00000.bin is damaged",
    _torch_saved_shard: "rank-00000.bin is damaged",
    _dcp_metadata_alone: "manifest.json is missing",
    _fifo: "rank-00000.bin is not a regular file",
    _outside_its_file: "lies outside of rank-00000.bin",
    _a_piece_less: "do not make it up",
    _not_numbers: "malformed",
    _deep: "its manifest is not one",
}


@pytest.mark.parametrize("act", HOSTILE, ids=lambda act: act.__name__.strip("_"))
def test_hostile_checkpoints_are_refused_and_run_no_code(saved, tmp_path, monkeypatch, act):
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "checkpoints" / "step-00000002"
    shutil.copytree(saved[0], copy)
    act(copy)
    _, engine = engine_of({"stage": 3, "precision": "bf16"}, seed=3)
    before = everything(engine)
    said: list[str] = []
    with pytest.raises(Damaged, match="none of the 1 checkpoints"):
        resume(engine, copy.parent, said.append)
    assert HOSTILE[act] in said[0], said
    assert not Path("exploded").exists()
    if "rank-00000.bin is damaged" not in HOSTILE[act]:
        assert everything(engine) == before


def test_nothing_that_loads_a_checkpoint_can_unpickle(monkeypatch, saved):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    _, engine = engine_of({"stage": 3, "precision": "bf16"}, seed=3)
    load(engine, saved[0])
    assert everything(engine) == saved[1]


# -- a full disk ---------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    model, engine = engine_of({"stage": 2})
    said: list[str] = []
    saver = Saver(engine, tmp_path, say=said.append, asynchronous=True)
    saver.save(1)
    saver.wait()
    expected = everything(engine)
    write = DirectFile.write

    def full(self, memory, at):
        write(self, memory[:4096], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DirectFile, "write", full)
    steps(engine, model, range(1, 3))
    saver.save(3)
    steps(engine, model, range(3, 5))  # training goes on
    saver.wait()
    assert saver.failure is not None and "the disk is full" in saver.failure
    assert "step 3 was not written: the disk is full" in said[-1] and "that of step 1 stays" in said[-1]
    assert os.listdir(tmp_path) == ["step-00000001"]
    monkeypatch.undo()
    saver.save(5)  # and the next save finds room again
    saver.close()
    assert saver.failure is None and resume(engine, tmp_path).step == 5
    load(engine, Folder(tmp_path).of(1))
    assert everything(engine) == expected


def test_a_run_on_a_full_disk_goes_on_and_ends_with_what_it_could_not_save(tmp_path):
    """A limit on the size of files stands for the full disk."""
    whole = train(tmp_path / "whole")
    assert whole.codes == [0, 0]
    ended = train(tmp_path / "run", "checkpoint.every=3", file_nbytes=20000)
    assert ended.codes == [1, 1]
    assert "step 3 was not written" in ended.said[0] and "step 6 was not written" in ended.said[0]
    assert "there is none before it" in ended.said[0] and "Traceback" not in ended.said[0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not list((tmp_path / "run/checkpoints").iterdir())
