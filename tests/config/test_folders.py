"""A Hugging Face folder as CONFIG: its weights, whose code builds it, and what is refused."""

from __future__ import annotations

import json
import os

import pytest

from zerocli.checkpoint.safetensors import Weights
from zerocli.config import from_dict, hub, load, to_dict
from zerocli.errors import ConfigError, UserError

LLAMA = dict(model_type="llama", vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
             intermediate_size=96, max_position_embeddings=64)  # fmt: skip
MAMBA = dict(model_type="mamba", vocab_size=96)


@pytest.fixture
def folder(tmp_path):
    def write(values, *files):
        (tmp_path / "config.json").write_text(json.dumps(values))
        for file in files:
            (tmp_path / file).touch()
        return str(tmp_path)

    return write


def refused(*given) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*given)
    return caught.value.render()


def test_a_folder_means_its_weights_and_a_config_alone_random_ones(folder):
    path = folder(LLAMA, "model-00001-of-00002.safetensors")
    made = load(path)
    assert (made.model.folder, made.model.code, made.train.init_from) == (path, "zerocli", path)
    assert made.train.seq == 64 and made.model.vocab == 128
    assert load(path, flags={"train.init_from": "/other"}).train.init_from == "/other"
    alone = load(os.path.join(path, "config.json"))
    assert (alone.model, alone.train.init_from) == (made.model, "")
    assert from_dict(json.loads(json.dumps(to_dict(made)))) == made


def test_our_own_code_is_taken_where_it_covers_the_config_and_transformers_elsewhere(folder, monkeypatch):
    path = folder(MAMBA, "model.safetensors")
    monkeypatch.setattr(hub, "installed", lambda: True)
    made = load(path)
    assert (made.model.code, made.model.vocab, made.model.external) == ("transformers", 96, True)
    assert load(folder(LLAMA), ["model.code=transformers"]).model.code == "transformers"
    assert "is not built in" in refused(folder(MAMBA), ["model.code=zerocli"])
    monkeypatch.setattr(hub, "installed", lambda: False)
    assert "pip install 'zerocli[hf]'" in refused(path)
    assert load(folder(LLAMA)).model.code == "zerocli"  # with or without transformers


def test_what_the_folder_decides_cannot_be_set(folder, monkeypatch):
    monkeypatch.setattr(hub, "installed", lambda: True)
    path = folder(MAMBA, "model.safetensors")
    assert "--set model.layers=2: layers: transformers builds the model" in refused(path, ["model.layers=2"])
    assert "tp 2: models of transformers are not split" in refused(path, (), {"parallel.tp": 2})
    assert "needs a Hugging Face folder" in refused("tiny", ["model.code=transformers"])


def test_a_pipe_or_a_broken_link_by_the_name_of_weights_is_named(tmp_path):
    weights = tmp_path / "model.safetensors"
    for make, said in ((os.mkfifo, "is a named pipe"), (lambda path: path.symlink_to("gone"), "leads to no file")):
        make(weights)
        assert hub.stored(str(tmp_path)) == {}  # a pipe is not waited for
        with pytest.raises(UserError, match=said):
            Weights(tmp_path)
        weights.unlink()


def test_folders_without_safetensors_get_the_next_command(folder, tmp_path):
    assert "config.json as CONFIG starts from random weights" in refused(folder(LLAMA))
    said = refused(folder(LLAMA, "pytorch_model.bin"))
    assert "pytorch_model.bin may hold code" in said and "save_pretrained" in said
    (tmp_path / "config.json").write_text(json.dumps({"model": {}}))
    assert "is the folder of a run" in refused(str(tmp_path))


def test_the_conversion_command_works(folder, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is an optional extra")
    import shlex

    words = shlex.split(hub.conversion("in folder"))
    assert words[:2] == ["python", "-c"] and words[3:] == ["in folder", os.path.abspath("in folder-safetensors")]
    compile(words[2], "command", "exec")
    assert hasattr(transformers.AutoModelForCausalLM, "from_pretrained")
