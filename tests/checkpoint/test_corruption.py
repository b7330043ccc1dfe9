"""A damaged checkpoint is never loaded: the damage is named, and no wrong number gets through. Nothing is unpickled."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lengths import LONG
from ranks import run_ranks
from runs import losses, train
from saved_engines import engine_of, everything, rewrite, save_at
from saved_engines import train as steps

from zerocli.checkpoint import Damaged, Folder, Mismatch, Saver, load, resume
from zerocli.checkpoint import manifest as manifests
from zerocli.files import DirectFile
from zerocli.profile.lines import Line
from zerocli.regular_files import write_text
from zerocli.run.output.metrics import MetricsFile

NUM_CORRUPTIONS = 240 if LONG else 80


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


@pytest.fixture(scope="module")
def target():
    """An engine to load into."""
    return engine_of({"stage": 3, "precision": "bf16"}, seed=3)[1]


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


@pytest.mark.longer
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


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (str(Path.cwd() / "exploded"),))


def _newer(path: Path) -> None:
    rewrite(path, lambda m: m.update(version=3))


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


def _a_piece_twice(path: Path) -> None:
    """As many elements as there should be, some of them twice and others never."""

    def change(manifest):
        tensor = manifest["tensors"]["parameters/frozen"]
        [[offsets, sizes, *place]] = tensor["pieces"]
        assert (offsets, sizes) == ([0, 0], [5, 3])
        tensor["pieces"] = [[[0, 0], [2, 3], *place], [[0, 0], [2, 3], *place], [[4, 0], [1, 3], *place]]

    rewrite(path, change)


def _a_piece_too_large(path: Path) -> None:
    os.truncate(path / "rank-00000.bin", 1 << 40)  # sparse: it takes no room

    def change(manifest):
        manifest["files"][0][1] = 1 << 40
        manifest["tensors"]["random/0/cpu"]["shape"] = [1 << 39]
        manifest["tensors"]["random/0/cpu"]["pieces"] = [[[0], [1 << 39], 0, 0, "0" * 64]]

    rewrite(path, change)


def _another_step(path: Path) -> None:
    rewrite(path, lambda m: m.update(step=3))


def _a_random_state_of_another_size(path: Path) -> None:
    def change(manifest):
        state = manifest["tensors"]["random/0/cpu"]
        state["shape"] = state["pieces"][0][1] = [16]

    rewrite(path, change)


def _a_random_state_that_is_none(path: Path) -> None:
    def change(manifest):
        [_, [numel], _, at, _] = piece = manifest["tensors"]["random/0/cpu"]["pieces"][0]
        data = bytearray((path / "rank-00000.bin").read_bytes())
        data[at : at + numel] = b"\xff" * numel
        (path / "rank-00000.bin").write_bytes(data)
        digest = manifests.piece_hash(2, "random/0/cpu", torch.uint8, [0], [numel])
        digest.update(b"\xff" * numel)
        piece[4] = digest.hexdigest()

    rewrite(path, change)


def _integers_for_floats(path: Path) -> None:
    rewrite(path, lambda m: m["tensors"]["parameters/scalar"].update(dtype="int32"))


def _infinite(path: Path) -> None:
    rewrite(path, lambda m: m["values"].update(updates=float("inf")))


def _no_number(path: Path) -> None:
    rewrite(path, lambda m: m["values"]["loss_scale"].update(scale=float("nan")))


def _a_name_twice(path: Path) -> None:
    text = json.dumps(json.loads((path / "manifest.json").read_text())["manifest"])
    text = text[:-1] + ', "step": 2}'
    digest = manifests.hashlib.sha256(text.encode()).hexdigest().encode()
    data = manifests._HEAD + digest + manifests._MIDDLE + text.encode() + manifests._TAIL
    (path / "manifest.json").write_bytes(data)


def _a_manifest_of_many_gigabytes(path: Path) -> None:
    os.truncate(path / "manifest.json", 1 << 40)


def _first_rows(path: Path, *changes) -> None:
    """Change the first pieces of a matrix."""

    def change(manifest):
        for piece, act in zip(manifest["tensors"]["parameters/frozen"]["pieces"], changes, strict=True):
            act(piece)

    rewrite(path, change)


def _dimensions_that_are_moved(path: Path) -> None:
    _first_rows(path, lambda piece: piece[1].insert(0, piece[0].pop()))


def _a_negative_offset(path: Path) -> None:
    _first_rows(path, lambda piece: piece[0].__setitem__(0, -1))


def _an_offset_that_overflows(path: Path) -> None:
    _first_rows(path, lambda piece: piece[0].__setitem__(0, (1 << 63) - 1))


def _an_offset_beyond_64_bits(path: Path) -> None:
    _first_rows(path, lambda piece: piece[0].__setitem__(0, 1 << 64))


def _an_offset_that_is_true(path: Path) -> None:
    _first_rows(path, lambda piece: piece[0].__setitem__(0, True))


HOSTILE = {
    _dimensions_that_are_moved: "has other dimensions",
    _a_negative_offset: "not a natural number",
    _an_offset_that_overflows: "is outside its shape",
    _an_offset_beyond_64_bits: "malformed (OverflowError",
    _an_offset_that_is_true: "not a natural number",
    _a_piece_twice: "do not cover it exactly",
    _a_piece_too_large: "more than any has",
    _another_step: "its manifest is of step 3",
    _a_random_state_of_another_size: "is not a random state",
    _a_random_state_that_is_none: "its random state is invalid",
    _integers_for_floats: "parameters/scalar is torch.int32 in the checkpoint",
    _infinite: "is not a number",
    _no_number: "is not a number",
    _a_name_twice: "a name is there twice",
    _a_manifest_of_many_gigabytes: "its manifest has 1099511627776 bytes",
    _newer: "format version 3; this zerocli reads versions up to 2",
    _climbs: "names a file '../outside.bin'",
    _absolute: "names a file",
    _linked_file: "rank-00000.bin is a link",
    _linked_manifest: "manifest.json is a link",
    _linked_folder: "it is a link",
    _pickled_manifest: "its manifest is invalid",
    _pickled_shard: "rank-00000.bin is damaged",
    _torch_saved_shard: "rank-00000.bin is damaged",
    _dcp_metadata_alone: "manifest.json is missing",
    _fifo: "rank-00000.bin is a named pipe, not a regular file",
    _outside_its_file: "is outside rank-00000.bin",
    _a_piece_less: "do not cover it exactly",
    _not_numbers: "malformed",
    _deep: "its manifest is invalid",
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
    try:
        resume(engine, copy.parent, said.append)
        raise AssertionError("it was loaded")
    except Mismatch as error:
        said.append(str(error))
    except Damaged as error:
        assert "none of the 1 checkpoints" in str(error)
    assert HOSTILE[act] in said[0], said
    assert not Path("exploded").exists()
    if not any(late in HOSTILE[act] for late in ("rank-00000.bin is damaged", "not a number", "state is invalid")):
        assert everything(engine) == before


def refused(folder: str) -> str:
    _, engine = engine_of({"stage": 3}, seed=3)
    with pytest.raises(Damaged) as error:
        load(engine, Folder(folder).of(2))
    return str(error.value)


def test_what_one_rank_alone_finds_wrong_is_refused_on_all(tmp_path):
    run_ranks(2, save_at, str(tmp_path), {"stage": 3}, 2)

    def change(manifest):
        state = manifest["tensors"]["random/1/cpu"]
        state["shape"] = state["pieces"][0][1] = [16]

    rewrite(Folder(tmp_path).of(2), change)
    assert all("random/1/cpu is not a random state" in said for said in run_ranks(2, refused, str(tmp_path)))


LEAVES = st.one_of(
    st.sampled_from(
        [0, 1, 2, 7, -1, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), True, None, "", "x", [], {}]
    ),
    st.integers(0, 6000),
    st.sampled_from(["float64", "int32", "int64", "uint8", "bool", "../x", "rank-00001.bin"]),
)


def places(node, path=()):
    """Every place of a JSON document."""
    yield path
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from places(child, (*path, key))


@pytest.mark.longer
@settings(max_examples=250 if LONG else 60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_manifest_with_anything_anywhere_is_refused_or_loads_the_same(saved, target, tmp_path_factory, data):
    """A checksum that holds, and any one place of it replaced, removed or said twice: nothing else ever comes of it."""
    path, expected = saved
    copy = tmp_path_factory.getbasetemp() / "altered" / path.name
    shutil.rmtree(copy.parent, ignore_errors=True)
    shutil.copytree(path, copy)
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    place = data.draw(st.sampled_from([place for place in places(manifest) if place]))
    act = data.draw(st.sampled_from(["replace", "remove", "repeat"]))

    def change(manifest):
        *above, last = place
        node = manifest
        for key in above:
            node = node[key]
        if act == "replace":
            node[last] = data.draw(LEAVES)
        elif act == "remove":
            del node[last]
        elif isinstance(node, list):
            node.append(node[last])

    rewrite(copy, change)
    try:
        load(target, copy)
    except (Damaged, Mismatch):
        return
    if place[0] != "values":  # of those a number may be another number
        assert everything(target) == expected


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


def test_a_config_out_of_a_checkpoint_never_names_code(tmp_path):
    from zerocli.cli.train import own_config

    _, engine = engine_of({"stage": 2})
    for name, model in (("plain", {"layers": 2}), ("code", {"factory": "os:getcwd"}), ("odd", "factory")):
        saver = Saver(engine, tmp_path / name / "checkpoints", asynchronous=False)
        saver.save(1, {"config": {"model": model}})
        saver.close()
        expected = str(tmp_path / name / "config.json") if name == "plain" else "tiny"
        assert own_config(str(tmp_path / name), "tiny") == expected


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
    assert "step 3 was not written: the disk is full" in said[-1] and "that of step 1 is kept" in said[-1]
    assert os.listdir(tmp_path) == ["step-00000001"]
    monkeypatch.undo()
    saver.save(5)  # and the next save finds room again
    saver.close()
    assert saver.failure is None and resume(engine, tmp_path).step == 5
    load(engine, Folder(tmp_path).of(1))
    assert everything(engine) == expected


def test_lines_of_metrics_wait_for_room_and_are_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run_ranks(1, write_lines, str(path))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(9))


def write_lines(path: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said: list[str] = []
    metrics = MetricsFile(Path(path), said.append)
    lines = [Line(step, 1.0, 1.0, 1.0, 1, 1.0, 1.0, {}, 0, {}, {}, {}, {}, False) for step in range(9)]
    metrics.write(lines[0])
    room = os.path.getsize(path) * 5 // 2  # of two lines and a half
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    for line in lines[1:6]:
        metrics.write(line)
        metrics.sync()
        assert Path(path).read_text().endswith("}\n")
    assert len(Path(path).read_text().splitlines()) == 2 and len(said) == 1 and path in said[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for line in lines[6:]:
        metrics.write(line)
    metrics.close()


def test_a_file_that_cannot_be_written_keeps_what_it_held(tmp_path):
    path = tmp_path / "config.json"
    write_text(path, "before")
    run_ranks(1, write_too_much, str(path))
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["config.json"]
    write_text(path, "after")
    assert path.read_text() == "after"


def write_too_much(path: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="too large") as error:
        write_text(Path(path), "x" * 1000)
    assert error.value.filename == path


def test_a_run_on_a_full_disk_goes_on_and_ends_with_what_it_could_not_save(tmp_path):
    """A limit on the size of files stands for the full disk."""
    whole = train(tmp_path / "whole")
    assert whole.codes == [0, 0]
    ended = train(tmp_path / "run", "checkpoint.every=3", file_nbytes=20000)
    assert ended.codes == [1, 1]
    assert "step 3 was not written" in ended.said[0] and "step 6 was not written" in ended.said[0]
    assert "there is no earlier one" in ended.said[0] and "Traceback" not in ended.said[0]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not list((tmp_path / "run/checkpoints").iterdir())
