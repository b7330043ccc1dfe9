"""Exported weights: the format, Hugging Face's names and layouts, streamed; and runs that start from them."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exports import MODELS, config_of, expected, noisy, read_back
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lengths import LONG
from ranks import run_ranks
from torch import nn

from zerocli import config as configs
from zerocli.checkpoint import Folder, Saver, safetensors
from zerocli.checkpoint import export as exporting
from zerocli.checkpoint import reader as readers
from zerocli.checkpoint.export import flat_start
from zerocli.checkpoint.imports import load_weights
from zerocli.cli import main as cli
from zerocli.config import to_dict
from zerocli.errors import UserError
from zerocli.run import engines


def saved_run(folder: str, sets: list[str], stage: int) -> dict[str, torch.Tensor]:
    config = config_of(sets)
    engine = engines.make_engine(config, stage=stage)
    state = noisy(engine)
    saver = Saver(engine, Path(folder) / "checkpoints", asynchronous=False)
    saver.save(7, {"config": to_dict(config), "samples": 0})
    saver.close()
    assert saver.failure is None, saver.failure
    return state


IN_SUITE = ("gpt2", "qwen3 with biases")


@pytest.mark.longer
@pytest.mark.parametrize(
    "name", [name if name in IN_SUITE else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_exports_have_hugging_face_names_and_layouts_and_start_a_run_bit_for_bit(tmp_path, name, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    state = run_ranks(3, saved_run, str(run), MODELS[name], 3)[0]
    assert cli.run(["export", str(run), str(out), "--file-size", "20KB", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1 and document["step"] == 7 and len(document["files"]) > 1
    found, wanted = read_back(out), expected(state, config_of(MODELS[name]))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in wanted.values())
    # The exported config gives the same model, and the weights load into it at any stage and world size.
    theirs = configs.load(str(out / "config.json"), ["train.seq=16"])
    ours = config_of(MODELS[name])
    keys = ("family", "layers", "hidden", "heads", "vocab", "tie", "norm_eps", "head_dim", "qkv_bias", "out_bias")
    keys += ("mlp_bias", "qk_norm", "window", "window_layers", "rope_scaling", "dropout")
    assert all(getattr(theirs.model, key) == getattr(ours.model, key) for key in keys)
    assert theirs.model.positions == (ours.model.positions or ours.train.seq)
    for world, stage in ((2, 3), (1, 0), (3, 2))[: 3 if LONG else 1]:
        for loaded in run_ranks(world, loaded_run, str(out), MODELS[name], stage):
            assert all(torch.equal(loaded[key], state[key]) for key in state), (world, stage)


def loaded_run(path: str, sets: list[str], stage: int) -> dict[str, torch.Tensor]:
    config = config_of(sets)
    engine = engines.make_engine(config, stage=stage)
    assert "Hugging Face" in load_weights(engine, path, config.model)
    return engine.state_dict()


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3 with biases", "gpt2 with more positions"])
def test_transformers_computes_the_same_loss(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
    state = saved_run(str(tmp_path / "run"), MODELS[name], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = engines.make_model(config_of(MODELS[name]), "cpu").eval()
    ours.load_state_dict(state)
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)


def test_bf16_is_a_rounding_of_what_was_saved(tmp_path):
    state = saved_run(str(tmp_path / "run"), MODELS["llama"], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    found = read_back(tmp_path / "out")
    assert torch.equal(found["model.norm.weight"], state["head.norm.weight"].bfloat16())
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "out/model.safetensors").exists()


def test_what_fp16_cannot_hold_is_refused_not_made_infinite(tmp_path, capsys):
    config = config_of(MODELS["llama"])
    engine = engines.make_engine(config)
    state = noisy(engine)
    state["blocks.1.norm2.weight"][3] = -7e4
    engine.load_state_dict(state)
    saver = Saver(engine, tmp_path / "run/checkpoints", asynchronous=False)
    saver.save(1, {"config": to_dict(config)})
    saver.close()
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "fp16"]) == 1
    said = capsys.readouterr().err
    assert "post_attention_layernorm.weight holds 7e+04" in said and "--dtype bf16" in said
    assert os.listdir(tmp_path) == ["run"]
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bf16"]) == 0


def test_an_export_that_has_no_room_says_how_much_it_needs(tmp_path, monkeypatch, capsys):
    saved_run(str(tmp_path / "run"), MODELS["llama"], 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 3
    assert "KiB needed, 1000 B free there" in capsys.readouterr().err and os.listdir(tmp_path) == ["run"]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(3, 5), nn.Parameter(torch.tensor(2.0))


def test_other_models_keep_their_own_names(tmp_path):
    import zerocli

    engine = zerocli.shard(Plain(), stage=2)
    saver = Saver(engine, tmp_path / "run" / "checkpoints")
    saver.save(1)
    saver.close()
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found = read_back(tmp_path / "out")
    state = engine.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[key], state[key]) for key in state)


def test_a_tier_that_is_not_installed_here_does_not_prevent_an_export(tmp_path):
    """Placement does not change weights, so the saved `offload` section is not read."""
    config = config_of(MODELS["llama"])
    engine = engines.make_engine(config)
    state = noisy(engine)
    saved = to_dict(config)
    saved["offload"] |= {"placement": "optimizer=cellar", "no_such_key": 1}
    with pytest.raises(UserError, match="offload"):
        configs.from_dict(saved)
    saver = Saver(engine, tmp_path / "run/checkpoints", asynchronous=False)
    saver.save(1, {"config": saved})
    saver.close()
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found, wanted = read_back(tmp_path / "out"), expected(state, config)
    assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_memory_is_bounded_by_pieces_not_by_the_model(tmp_path, monkeypatch):
    """Of an untransposed model no more is in memory at once than each thread's piece."""
    monkeypatch.setattr(exporting, "NUM_THREADS", 4)
    saved_run(str(tmp_path / "run"), MODELS["llama"], 0)
    alive, most, lock = 0, 0, threading.Lock()
    read, write = readers.Reader.piece, safetensors.Writer.write

    def piece(self, name, index):
        nonlocal alive, most
        values = read(self, name, index)
        with lock:
            alive += values.nbytes
            most = max(most, alive)
        return values

    def wrote(self, name, first, values):
        nonlocal alive
        write(self, name, first, values)
        with lock:
            alive -= values.nbytes

    monkeypatch.setattr(readers.Reader, "piece", piece)
    monkeypatch.setattr(safetensors.Writer, "write", wrote)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    largest = max(value.nbytes for value in read_back(tmp_path / "out").values())
    assert alive == 0 and 0 < most <= 4 * 2 * largest  # gate and up are one piece, in four threads


def test_a_box_that_is_a_run_of_memory_is_known_as_one():
    for shape, offsets, sizes in (
        ((4, 5), (1, 0), (2, 5)),
        ((4, 5), (1, 2), (1, 3)),
        ((4, 5), (1, 2), (2, 3)),
        ((2, 3, 4), (1, 1, 0), (1, 2, 4)),
        ((2, 3, 4), (0, 1, 0), (2, 2, 4)),
        ((7,), (2,), (3,)),
        ((), (), ()),
    ):
        tensor = torch.arange(max(1, int(torch.Size(shape).numel()))).view(shape)
        box = tensor[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1).tolist()
        runs = box == list(range(box[0], box[0] + len(box)))
        assert flat_start(shape, offsets, sizes) == (box[0] if runs else None)


def test_mistakes_get_facts(tmp_path, capsys):
    assert cli.run(["export", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    (tmp_path / "hollow").mkdir()
    assert cli.run(["export", str(tmp_path / "hollow"), str(tmp_path / "out")]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err
    saved_run(str(tmp_path / "run"), MODELS["gpt2"], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--step", "3"]) == 2
    assert "there are 7" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "taken")]) == 2
    damage(Folder(tmp_path / "run/checkpoints").of(7) / "rank-00000.bin")
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert "is damaged within bytes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()


def damage(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[100] ^= 8
    shard.write_bytes(data)


def test_the_newest_whole_checkpoint_is_exported_though_damage_is_met_on_the_way(tmp_path, capsys):
    config = config_of(MODELS["llama"])
    engine = engines.make_engine(config)
    saver = Saver(engine, tmp_path / "run/checkpoints", asynchronous=False, keep=3)
    for step in (1, 2, 3):
        saver.save(step, {"config": to_dict(config), "samples": 0})
    saver.close()
    for step in (2, 3):
        damage(saver.folder.of(step) / "rank-00000.bin")
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["step"] == 1
    assert all(f"step-0000000{n} skipped: rank-00000.bin is damaged" in said.err for n in (2, 3))
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "asked"), "--step", "3"]) == 1
    assert cli.run(["export", str(saver.folder.of(1)), str(tmp_path / "asked"), "--step", "3"]) == 2
    damage(saver.folder.of(1) / "rank-00000.bin")
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "none")]) == 1
    assert "none of its 3 checkpoints is whole" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_an_export_removes_nothing_and_fills_a_folder_that_is_there(tmp_path, monkeypatch):
    saved_run(str(tmp_path / "run"), MODELS["llama"], 0)
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp/mine").touch()
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out.tmp/mine").exists()
    here = tmp_path / "here"
    here.mkdir()
    inode = here.stat().st_ino
    monkeypatch.chdir(here)
    assert cli.run(["export", str(tmp_path / "run"), "."]) == 0
    assert here.stat().st_ino == inode and sorted(os.listdir(here)) == sorted(os.listdir(tmp_path / "out"))
    assert cli.run(["export", str(tmp_path / "run"), "."]) == 2
    os.mkfifo(tmp_path / "pipe")
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "pipe")]) == 2
    assert cli.run(["export", str(tmp_path / "run"), "/proc/nowhere/out"]) == 1


def test_an_export_of_a_config_that_is_not_the_models_is_refused(tmp_path, capsys):
    config = config_of(MODELS["llama"])
    engine = engines.make_engine(config)
    for number, change in enumerate((1, 3, 10**4)):
        saver = Saver(engine, tmp_path / f"{number}/checkpoints", asynchronous=False)
        told = to_dict(config)
        told["model"]["layers"] = change
        saver.save(1, {"config": told})
        saver.close()
        assert cli.run(["export", str(tmp_path / f"{number}"), str(tmp_path / "out")]) == 1
        assert "parameter blocks." in capsys.readouterr().err


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


BAD_FILES = {
    "empty": b"",
    "header beyond the file": _file({}, length=1 << 60),
    "not json": _file(b"\x80\x04\x95pickle"),
    "bytes beyond the file": _file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"x" * 8),
    "bytes that are not the shape's": _file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, b"x" * 8),
    "negative": _file({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}, b"x" * 8),
    "nested": _file(b"[" * 50000),
    "a name twice": _file(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        b"xy",
    ),
    "bytes of two tensors": _file(
        {n: {"dtype": "U8", "shape": [4], "data_offsets": [at, at + 4]} for n, at in (("a", 0), ("b", 2))}, b"x" * 6
    ),
    "bytes of none": _file({"a": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, b"x" * 6),
    "bytes of none at the end": _file({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"x" * 6),
    "an unknown type": _file({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"xx"),
    "true for one": _file({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_not_safetensors_are_refused(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[name])
    with pytest.raises(UserError, match="is not a safetensors file"):
        safetensors.Weights(tmp_path)


ODD = st.one_of(
    st.sampled_from([0, 1, 4, 8, -1, 2**63, 10**30, 1.0, float("nan"), True, None, "", "F32", "I8", "F8_E4M3", [], {}]),
    st.integers(0, 40),
)


@pytest.mark.longer
@settings(max_examples=300 if LONG else 80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_header_is_refused_or_gives_each_byte_to_one_tensor(tmp_path, data):
    header: dict = {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
        "c": {"dtype": "U8", "shape": [0], "data_offsets": [22, 22]},
    }
    for _ in range(data.draw(st.integers(0, 2))):
        name, key = (
            data.draw(st.sampled_from("abc")),
            data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"])),
        )
        value = data.draw(st.one_of(ODD, st.lists(ODD, max_size=3)))
        if isinstance(header[name], dict):
            header[name][key] = value
        if data.draw(st.integers(0, 5)) == 0:
            header[name] = value
    text = bytearray(json.dumps(header).encode())
    if data.draw(st.booleans()):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.one_of(st.just(len(text)), st.integers(0, 2**64 - 1)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(_file(bytes(text), b"x" * data.draw(st.sampled_from([22, 22, 22, 21, 0, 30])), length))
    try:
        weights = safetensors.Weights(tmp_path)
    except UserError as error:
        assert len(str(error)) < 1000
        return
    taken = sorted((entry.start, entry.start + entry.nbytes) for _, entry in weights.entries.values() if entry.nbytes)
    assert [start for start, _ in taken] == [8 + length, *(stop for _, stop in taken[:-1])]
    assert taken[-1][1] == path.stat().st_size
    for name, (_, entry) in weights.entries.items():
        assert weights.read(name, 0, entry.numel).numel() == entry.numel


def weights_file(path: Path, **tensors: torch.Tensor) -> None:
    entries = [safetensors.Entry(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]
    writer = safetensors.Writer(path, entries)
    for name, value in tensors.items():
        writer.write(name, 0, value.reshape(-1))
    writer.finish()
    writer.close()


def test_an_index_decides_which_file_a_tensor_is_taken_from(tmp_path):
    weights_file(tmp_path / "first.safetensors", a=torch.zeros(3), b=torch.zeros(2))
    weights_file(tmp_path / "second.safetensors", a=torch.ones(3))
    with pytest.raises(UserError, match=r"a is in first\.safetensors and in second\.safetensors"):
        safetensors.Weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for place, value in (("first", 0.0), ("second", 1.0)):
        index.write_text(json.dumps({"weight_map": {"a": f"{place}.safetensors"}}))
        weights = safetensors.Weights(tmp_path)
        assert weights.read("a", 0, 3).tolist() == [value] * 3 and list(weights.entries) == ["a"]
    index.write_text(json.dumps({"weight_map": {"b": "second.safetensors"}}))
    with pytest.raises(UserError, match=r"says that b is in second\.safetensors, and it is not"):
        safetensors.Weights(tmp_path)
    index.write_text('{"weight_map": {"a": "first.safetensors", "a": "second.safetensors"}}')
    with pytest.raises(UserError, match="twice"):
        safetensors.Weights(tmp_path)


def test_quantized_weights_are_refused_and_unused_ones_are_said(tmp_path):
    saved_run(str(tmp_path / "run"), MODELS["llama"], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    fewer = config_of([*MODELS["llama"], "model.layers=1"])
    said = load_weights(engines.make_engine(fewer), str(tmp_path / "out"), fewer.model)
    assert re.search(r"not used: model\.layers\.1\.\S+, .* and 5 more", said), said
    weights = read_back(tmp_path / "out")
    config = config_of(MODELS["llama"])
    for dtype in (torch.int8, torch.float8_e4m3fn):
        weights["model.norm.weight"] = torch.ones(32).to(dtype)
        folder = tmp_path / str(dtype)
        folder.mkdir()
        weights_file(folder / "model.safetensors", **weights)
        with pytest.raises(UserError, match=r"model\.norm\.weight is \w+: quantized"):
            load_weights(engines.make_engine(config), str(folder), config.model)


def test_weights_of_mixed_types_are_each_read_as_they_are(tmp_path):
    state = saved_run(str(tmp_path / "run"), MODELS["llama"], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    weights = {name: value.to(kinds[i % 4]) for i, (name, value) in enumerate(read_back(tmp_path / "out").items())}
    (tmp_path / "mixed").mkdir()
    weights_file(tmp_path / "mixed/model.safetensors", **weights)
    config = config_of(MODELS["llama"])
    engine = engines.make_engine(config)
    load_weights(engine, str(tmp_path / "mixed"), config.model)
    wanted = expected(engine.state_dict(), config)
    assert all(torch.equal(wanted[name], value.float()) for name, value in weights.items())
    assert not torch.equal(engine.state_dict()["blocks.0.mlp.down.weight"], state["blocks.0.norm1.weight"])


def test_an_index_cannot_lead_out_of_its_folder(tmp_path):
    for name in ("../x.safetensors", "/etc/passwd", "a/b", "", 3):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(UserError, match="outside its folder|is missing"):
            safetensors.Weights(tmp_path)
    assert os.path.exists("/etc/passwd")


def test_weights_of_another_shape_are_named(tmp_path):
    saved_run(str(tmp_path / "run"), MODELS["llama"], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    config = config_of([*MODELS["llama"], "model.vocab=70", "model.layers=3"])
    engine = engines.make_engine(config)
    with pytest.raises(UserError, match=r"embed_tokens.weight has shape \[61, 32\], not \[70, 32\]"):
        load_weights(engine, str(tmp_path / "out"), config.model)
