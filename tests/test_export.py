"""Exported weights: the format, Hugging Face's names and layouts, streamed; and runs that start from them."""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import nn

from zerocli import cli, safetensors, trainer
from zerocli import config as configs
from zerocli import export as exporting
from zerocli.checkpoint import Folder, Saver
from zerocli.checkpoint import reader as readers
from zerocli.config import to_dict
from zerocli.errors import UserError
from zerocli.export import flat_start
from zerocli.weights import load_weights

SHAPE = (
    "model.layers=2 model.hidden=32 model.heads=4 model.vocab=61 model.mlp_hidden=40 train.seq=16 train.batch=2".split()
)
MODELS = {
    "llama": ["model.family=llama", "model.kv_heads=2", "model.tie=false"],
    "llama tied": ["model.family=llama", "model.mlp_hidden=0"],
    "gpt2": ["model.family=gpt2"],
    "gpt2 untied without biases": ["model.family=gpt2", "model.tie=false", "model.bias=false"],
}


def config_of(sets: list[str]) -> configs.Config:
    return trainer.resolve(configs.load("tiny", [*SHAPE, *sets]), 1)


def noisy(engine) -> dict[str, torch.Tensor]:
    """Give every parameter values of its own (fresh norms and biases are all alike), and return them."""
    generator = torch.Generator().manual_seed(5)
    state = {k: torch.randn(v.shape, generator=generator) * 0.1 for k, v in sorted(engine.state_dict().items())}
    if "head.weight" in state and "embed.weight" in state and engine.model.head.is_tied:
        state["head.weight"] = state["embed.weight"]
    if "head.weight" in state and "embed.tokens.weight" in state and engine.model.head.is_tied:
        state["head.weight"] = state["embed.tokens.weight"]
    engine.load_state_dict(state)
    return state


def saved_run(folder: str, sets: list[str], stage: int) -> dict[str, torch.Tensor]:
    config = config_of(sets)
    engine = trainer.make_engine(config, stage=stage)
    state = noisy(engine)
    saver = Saver(engine, Path(folder) / "checkpoints", asynchronous=False)
    saver.save(7, {"config": to_dict(config), "samples": 0})
    saver.close()
    assert saver.failure is None, saver.failure
    return state


def read_back(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in an export, read by the format's own library where it is there, and by ours."""
    weights = safetensors.Weights(folder)
    ours = {name: weights.read(name, 0, entry.numel).view(entry.shape) for name, (_, entry) in weights.entries.items()}
    try:
        from safetensors.torch import load_file
    except ImportError:
        return ours
    theirs: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        theirs |= load_file(file)
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[n].float(), ours[n]) for n in ours)
    return theirs


def expected(state: dict[str, torch.Tensor], config: configs.Config) -> dict[str, torch.Tensor]:
    """What Hugging Face calls each, written out here once more."""
    model, found = config.model, {}
    head = model.hidden // model.heads
    kv = (model.kv_heads or model.heads) * head
    if model.family == "llama":
        found["model.embed_tokens.weight"] = state["embed.weight"]
        found["model.norm.weight"] = state["head.norm.weight"]
        for i in range(model.layers):
            ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
            q, k, v = state[ours + "attention.qkv.weight"].split((model.hidden, kv, kv))
            gate, up = state[ours + "mlp.gate_up.weight"].chunk(2)
            found |= {f"{theirs}self_attn.{n}_proj.weight": t for n, t in (("q", q), ("k", k), ("v", v))}
            found |= {f"{theirs}mlp.gate_proj.weight": gate, f"{theirs}mlp.up_proj.weight": up}
            found[theirs + "self_attn.o_proj.weight"] = state[ours + "attention.out.weight"]
            found[theirs + "mlp.down_proj.weight"] = state[ours + "mlp.down.weight"]
            found[theirs + "input_layernorm.weight"] = state[ours + "norm1.weight"]
            found[theirs + "post_attention_layernorm.weight"] = state[ours + "norm2.weight"]
    else:
        found["transformer.wte.weight"] = state["embed.tokens.weight"]
        found["transformer.wpe.weight"] = state["embed.positions.weight"]
        found["transformer.ln_f.weight"] = state["head.norm.weight"]
        found["transformer.ln_f.bias"] = state.get("head.norm.bias", torch.zeros(model.hidden))
        pairs = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out"}
        pairs |= {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
        for i in range(model.layers):
            for theirs, ours in pairs.items():
                weight = state[f"blocks.{i}.{ours}.weight"]
                found[f"transformer.h.{i}.{theirs}.weight"] = weight.t() if weight.dim() == 2 else weight
                bias = state.get(f"blocks.{i}.{ours}.bias", torch.zeros(weight.shape[0]))
                found[f"transformer.h.{i}.{theirs}.bias"] = bias
    if not model.tie:
        found["lm_head.weight"] = state["head.weight"]
    return found


@pytest.mark.parametrize("name", MODELS)
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
    keys = ("family", "layers", "hidden", "heads", "vocab", "tie", "norm_eps")
    assert all(getattr(theirs.model, key) == getattr(ours.model, key) for key in keys)
    for world, stage in ((1, 0), (2, 3), (3, 2)):
        for loaded in run_ranks(world, loaded_run, str(out), MODELS[name], stage):
            assert all(torch.equal(loaded[key], state[key]) for key in state), (world, stage)


def loaded_run(path: str, sets: list[str], stage: int) -> dict[str, torch.Tensor]:
    config = config_of(sets)
    engine = trainer.make_engine(config, stage=stage)
    assert "Hugging Face" in load_weights(engine, path, config.model)
    return engine.state_dict()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_transformers_computes_the_same_loss(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
    state = saved_run(str(tmp_path / "run"), MODELS[name], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = trainer.make_model(config_of(MODELS[name]), "cpu").eval()
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
    assert "no whole checkpoint" in capsys.readouterr().err
    saved_run(str(tmp_path / "run"), MODELS["gpt2"], 0)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--step", "3"]) == 2
    assert "there are 7" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "taken")]) == 2
    shard = Folder(tmp_path / "run/checkpoints").of(7) / "rank-00000.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 8
    shard.write_bytes(data)
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert "is damaged within bytes" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()


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
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_are_not_safetensors_are_refused(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(BAD_FILES[name])
    with pytest.raises(UserError, match="is not a safetensors file"):
        safetensors.Weights(tmp_path)


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
    engine = trainer.make_engine(config)
    with pytest.raises(UserError, match=r"embed_tokens.weight has shape \[61, 32\], not \[70, 32\]"):
        load_weights(engine, str(tmp_path / "out"), config.model)
