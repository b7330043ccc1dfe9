"""Configs: what is right is read from every source; what is wrong is named, with its place, all at once."""

import ast
import dataclasses
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_configs import configs
from texts import CHARACTERS

from zerocli.config import (
    FIELDS,
    SECTIONS,
    Config,
    ModelConfig,
    bundled,
    from_dict,
    load,
    schema,
    to_dict,
)
from zerocli.config import file as configfile
from zerocli.config.file import key_lines
from zerocli.config.laws import violations
from zerocli.config.yaml import other_trainer
from zerocli.errors import ConfigError

ANY_TEXT = st.text(CHARACTERS)
some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="my.toml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_file


def refused(source, sets=(), flags=None):
    """Return the problems, as lines, with which a config is refused."""
    with pytest.raises(ConfigError) as caught:
        load(source, sets, flags)
    assert caught.value.exit_code == 2
    return [line.replace(os.path.dirname(source) + "/", "") for line in caught.value.lines]


def test_every_field_says_what_it_is():
    sections = [node for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)]
    assert len(sections) == len(SECTIONS) + 1  # and the whole
    for node in sections:
        if node.name.endswith("Config"):
            body = [each for each in node.body if not isinstance(each, ast.FunctionDef)]
            for field, after in zip(body[1::2], body[2::2], strict=True):
                assert isinstance(field, ast.AnnAssign)
                assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(field)


def test_reading_a_config_does_not_import_torch():
    program = "import sys, zerocli.config; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_empty_file_is_the_defaults(write):
    assert load(write("")) == dataclasses.replace(Config(), name="my")
    assert list(violations(Config())) == []


def test_flags_come_over_sets_over_the_file(write):
    path = write("[train]\nsteps = 1\nbatch = 1\nseq = 1\n")
    made = load(path, ["train.batch=2", "train.seq=2"], {"train.seq": 3, "zero.stage": None, "offload.nvme_path": ()})
    assert (made.train.steps, made.train.batch, made.train.seq) == (1, 2, 3)
    assert made.zero.stage == 2


def test_a_command_line_replaces_what_the_file_says_in_another_way():
    asked = load("lora-8b", flags={"train.steps": 6, "train.epochs": None}, sets=["train.accumulate=2"])
    assert (asked.train.steps, asked.train.epochs) == (6, 0.0)
    assert (asked.train.accumulate, asked.train.global_batch) == (2, 0)
    both = load("lora-8b", flags={"train.steps": 6, "train.epochs": 2.0})
    assert (both.train.steps, both.train.epochs) == (6, 2.0)


def test_values_take_their_types(write):
    text = 'name = "x"\nzero = {bucket = "1MiB"}\n[checkpoint]\nasync = false\n[optimizer]\nlr = 1\n'
    made = load(write(text + "[optimizer.options]\nnesterov = true\n"))
    assert (made.name, made.zero.bucket, made.checkpoint.async_) == ("x", 2**20, False)
    assert isinstance(made.optimizer.lr, float)
    assert made.optimizer.options == {"nesterov": True}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer.name=sgd", "name", "sgd"),
        ("optimizer.name='sgd'", "name", "sgd"),
        ("optimizer.lr=1e-3", "lr", 1e-3),
        ("optimizer.betas=[0.5, 0.6]", "betas", (0.5, 0.6)),
        ("optimizer.betas=0.5,0.6", "betas", (0.5, 0.6)),
        ("optimizer.options.nesterov=true", "options", {"nesterov": True}),
    ],
)
def test_set_reads_toml_or_bare_text(write, text, key, value):
    assert getattr(load(write(""), [text]).optimizer, key) == value


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("auto", "auto"), ('"auto"', "auto")])
def test_compile_is_true_false_or_auto(write, text, value):
    assert load("tiny").model.compile == "auto"
    config = load("tiny", sets=[f"model.compile={text}"])
    assert config.model.compile is value or config.model.compile == value == "auto"
    assert from_dict(to_dict(config)) == config


def test_set_keeps_text_that_looks_like_a_number(write):
    made = load(write(""), ["data.path=2024", "offload.nvme_path=/a,/b", "zero.bucket=2MiB", "offload.staging=77"])
    assert made.data.path == "2024"
    assert made.offload.nvme_path == ("/a", "/b")
    assert (made.zero.bucket, made.offload.staging) == (2 * 2**20, 77)
    assert made.offload.read_ahead == load(write("")).offload.read_ahead == 512 * 2**20  # a key of its own
    saved = to_dict(made)
    del saved["offload"]["read_ahead"]  # as a run had it before the key was there
    assert from_dict(saved) == made


def test_all_problems_come_at_once_with_their_lines(write):
    path = write(
        """# a comment with [brackets] = and "quotes"
steps = 3
name = "fine"
[train]
stepz = 3
batch = "ten"
seq = 0
[modle]
layers = 2
[zero]
stage = 5
[model]
hidden = 130
heads = 4
tie = 1
"""
    )
    assert refused(path, ["train.stepz=3", "nonsense"], {"parallel.tp": 0}) == [
        "my.toml:2: there is no key steps outside a section; did you mean train.steps?",
        "my.toml:5: there is no key train.stepz; did you mean train.steps?",
        'my.toml:6: batch "ten" is not a whole number',
        "my.toml:8: there is no section modle; did you mean model?",
        "my.toml:15: tie 1 is not true or false",
        "--set train.stepz=3: there is no key train.stepz; did you mean train.steps?",
        "--set nonsense: has no value: write section.key=value",
        "my.toml:7: seq 0 is below 1",
        "my.toml:11: stage 5 is not one of 0, 1, 2, 3",
        "--tp 0: tp 0 is below 1",
        "my.toml:14: heads 4 does not divide hidden 130",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("train.steps=true", "steps true is not a whole number"),
        ("train.steps=1e3", "steps 1000.0 is not a whole number: write 1000"),
        ("train.steps=-1", "steps -1 is below 1"),
        ("train.steps=0x" + "f" * 5000, "steps an integer of 20000 bits is beyond 64 bits"),
        ("train.precision=bf61", 'precision "bf61" is not one of auto, fp32, bf16, fp16; did you mean bf16?'),
        ("model.compile=maybe", 'compile "maybe" is not one of auto, true, false'),
        ("model.compile=aut", 'compile "aut" is not one of auto, true, false; did you mean auto?'),
        ("model.compile=1", "compile 1 is not text, true or false"),
        ("optimizer.lr=nan", "lr NaN is not finite"),
        ("optimizer.lr=1979-05-27", "lr a date is not a number"),
        ("optimizer.betas=[0.9]", "betas [0.9] is not two numbers"),
        ("optimizer.betas=[0.9, 1.0]", "betas 1.0 is not below 1"),
        ("optimizer.betaz=1", "there is no key optimizer.betaz; did you mean optimizer.betas?"),
        ("zero.lr=1", "there is no key zero.lr; did you mean optimizer.lr?"),
        ("zreo.stage=1", "there is no section zreo; did you mean zero.stage?"),
        ("zero=1", "zero is a section of keys, not 1"),
        ("zero.bucket=12XB", 'bucket "12XB" is not a size: XB is not one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB'),
        ("zero.bucket=-5", "bucket -5 is below 1"),
        ("model.kv_heads=3", "kv_heads 3 does not divide heads 4"),
        ("model.factory=os.system", 'factory "os.system" is not of the form package.module:callable'),
        ("parallel.tp=3", "tp 3 does not divide heads 4; did you mean tp 2?"),
        ("parallel.shard_ranks=-1", "shard_ranks -1 is below 0"),
        ("name=../x", 'name "../x" is not of the form my-model'),
    ],
)
def test_each_wrong_value_is_named(write, text, problem):
    assert refused(write(""), [text]) == [f"--set {text[:80]}: {problem}"]


def test_a_law_between_keys_is_broken_by_the_one_given_last(write):
    path = write("[model]\nheads = 4\nhidden = 128\n")
    assert refused(path, ["model.hidden=130"]) == ["--set model.hidden=130: heads 4 does not divide hidden 130"]


def test_groups_that_do_not_tile_the_ranks_are_named_with_those_that_do(write):
    keys = ["parallel.ranks=6", "parallel.tp=2", "parallel.shard_ranks=2"]
    fact = "shard_ranks 2 does not divide the 3 data-parallel ranks: 1 or 3 does"
    assert refused(write(""), keys) == [f"--set parallel.shard_ranks=2: {fact}"]
    assert load(write(""), keys[:2] + ["parallel.shard_ranks=3"]).parallel.shard_ranks == 3
    assert len(refused(write(""), [f"parallel.ranks={2**62}", "parallel.shard_ranks=3"])) == 1  # at once


def test_a_key_already_wrong_takes_part_in_no_conclusion(write):
    assert refused(write('[model]\nhidden = 130\nheads = "four"\n')) == [
        'my.toml:3: heads "four" is not a whole number'
    ]
    assert len(refused(write("[model]\nheads = 0\n"))) == 1


def test_syntax_errors_have_line_and_column(write):
    assert refused(write("[train]\nsteps = = 3\n")) == ["my.toml:2:9: TOML syntax: Invalid value"]
    assert refused(write("[train\n"))[0].startswith("my.toml:1:7: TOML syntax: ")
    assert refused(write('{"model_type": }', "config.json")) == ["config.json:1:16: JSON syntax: Expecting value"]
    assert refused(write("a = " + "[" * 100_000)) == ["my.toml: cannot be read as TOML: nested too deeply"]


def test_files_that_cannot_be_read_are_named(write, tmp_path):
    assert refused(str(tmp_path / "none.toml")) == ["none.toml: no such file"]
    (tmp_path / "folder.toml").mkdir()
    assert refused(str(tmp_path / "folder.toml")) == ["folder.toml: is a folder, not a config file"]
    assert refused(write(b"# fine\n# \xff\n")) == ["my.toml:2: is not UTF-8: byte 0xff"]
    assert refused(write("", "my.conf")) == ["my.conf: is neither a .toml, .yaml nor .json file"]
    assert "\0.toml: no such file" in refused("\0.toml")[0]
    assert load(write(b"\xef\xbb\xbf[train]\r\nsteps = 7\r\n")).train.steps == 7


YAML = "train:\n  steps: 3 # few\n  precision: bf16\n"
YAML += "optimizer:\n  lr: 1e-4\n  betas: [0.9, 0.99]\ndata:\n  path: 'a b.txt'\n"


def test_yaml_says_what_toml_says(write):
    """Numbers such as 1e-4 are numbers, every problem has its line, and no tag, alias or second key is taken."""
    pytest.importorskip("yaml")
    toml = '[train]\nsteps = 3\nprecision = "bf16"\n'
    toml += '[optimizer]\nlr = 1e-4\nbetas = [0.9, 0.99]\n[data]\npath = "a b.txt"\n'
    assert load(write(YAML, "my.yaml")) == load(write(toml, "my.toml"))
    assert load(write("", "my.yml")) == load(write("", "my.toml"))
    wrong = "train:\n  stesp: 3\nmodel:\n  heads: four\n  factory: os:system\n"
    assert [line.partition(": ")[0] for line in refused(write(wrong, "my.yaml"))] == [f"my.yaml:{n}" for n in (2, 4, 5)]
    assert "no code is run because a file says so" in refused(write(wrong, "my.yaml"))[2]
    assert refused(write("train: {steps: 3}\ntrain: {batch: 2}\n", "my.yaml")) == [
        "my.yaml:2: train is there twice; first at my.yaml:1"
    ]
    assert refused(write("train: &a {steps: 3}\ndata: *a\n", "my.yaml")) == ["my.yaml:2: *a: aliases are not read"]
    assert "could not determine a constructor" in refused(write("train: !!python/name:os.system\n", "my.yaml"))[0]
    assert refused(write("a:\n\tb: 1\n", "my.yaml"))[0].startswith("my.yaml:2:1: YAML syntax: ")
    assert refused(write("- a\n", "my.yaml")) == ["my.yaml: holds no sections with keys"]


def test_the_commands_for_other_trainers_files_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "docs/migrate.md").read_text()
    found = re.findall(r"```yaml\n(.*?)```.*?```\n(zerocli [^\n]*)\n```", page, re.DOTALL)
    assert [other_trainer(text)[1] for text, _ in found] == [command for _, command in found] and len(found) == 2


def test_an_unreadable_file_is_named(write, monkeypatch):
    def deny(path, mode):
        raise PermissionError(13, "Permission denied", path)

    path = write("")
    monkeypatch.setattr(configfile, "open", deny, raising=False)
    assert refused(path) == ["my.toml: cannot be read (Permission denied)"]


def test_an_unknown_name_lists_the_known_ones(monkeypatch):
    monkeypatch.setattr("zerocli.config.file.bundled", lambda: [("tiny", "", ""), ("gpt2-xl", "", "")])
    assert refused("gpt2xl") == [
        "gpt2xl: no bundled config has this name; there are tiny, gpt2-xl; did you mean gpt2-xl?"
    ]


def test_bundled_configs_load_and_say_what_they_are():
    for name, sentence, path in bundled():
        assert load(name).name == name
        assert sentence and not sentence.startswith("zerocli"), path


def test_lines_are_found_in_every_way_toml_writes_a_key():
    text = '''a.b = 1
"c" = """
d = 2
""" # e = 3
[f.g]
h = { i = 1, "j" = { k = [1, { l = 2 }] } }
m = [
  "n = 1", # ] }
]
o = 1.5
[[p]]
q = 'x'
'''
    lines = {".".join(key): line for key, line in key_lines(text).items()}
    inline = {"f.g.h.i": 6, "f.g.h.j": 6, "f.g.h.j.k": 6, "f.g.h.j.k.l": 6}
    assert lines == {"a.b": 1, "c": 2, "f.g": 5, "f.g.h": 6, "f.g.m": 7, "f.g.o": 10, "p": 11, "p.q": 12} | inline


def test_hugging_face_shapes_are_taken_over(write):
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "n_inner": None, "vocab_size": 99}
    made = load(write(json.dumps(gpt2 | {"n_positions": 32, "dropout": "unknown"}), "config.json"))
    from_file = {"folder": made.model.folder, "code": "zerocli"}
    assert os.path.isfile(os.path.join(made.model.folder, "config.json"))
    assert made.model == ModelConfig(
        "gpt2", layers=2, hidden=64, heads=2, vocab=99, dropout=0.1, positions=32, **from_file
    )
    assert made.train.seq == 32 and made.train.init_from == ""

    llama = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-6, "vocab_size": 128,
        "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5e5}, "head_dim": 16, "hidden_act": "silu",
    }  # fmt: skip
    expected = ModelConfig(
        "llama", 3, 64, 4, 2, 128, 96, tie=True, bias=False, rope_theta=5e5, norm_eps=1e-6, positions=2048, **from_file
    )
    assert load(write(json.dumps(llama), "config.json")).model == expected


def test_hugging_face_files_that_do_not_map_are_refused(write):
    path = write('{\n "model_type": "mamba"\n}', "config.json")
    ours = ["model.code=zerocli"]
    assert refused(path, ours) == [
        'config.json:2: model_type "mamba" is not built in: gpt2, llama, mistral, qwen2, qwen3 are'
    ]
    assert "neither a model_type" in refused(write("{}", "config.json"))[0]
    assert refused(write("[]", "config.json")) == ["config.json: holds no JSON object"]
    path = write('{"model_type": "gpt2",\n"n_layer": "x",\n"n_positions": 64}', "config.json")
    assert refused(path, ["train.seq=65"]) == [
        'config.json:2: layers "x" is not a whole number',
        "--set train.seq=65: seq 65 is beyond the 64 positions the model was made for",
    ]


def test_a_factory_is_named_and_not_imported():
    made = load("no_such_package.module:make")
    assert (made.name, made.model.factory) == ("make", "no_such_package.module:make")


def test_a_run_config_is_a_source_again(write):
    made = load(write("[train]\nsteps = 7\n"), ["optimizer.options.a=[1, {b = 2}]"])
    assert load(write(json.dumps(to_dict(made), indent=1), "config.json")) == made
    with pytest.raises(ConfigError, match="config.json train.steps: steps 0 is below 1"):
        from_dict({"train": {"steps": 0}}, "config.json")


def test_config_errors_travel_by_pickle():
    with pytest.raises(ConfigError) as caught:
        load("nowhere")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.problems, copy.hint, copy.exit_code) == (caught.value.problems, caught.value.hint, 2)
    assert copy.render().endswith("\ntry: zerocli configs ls")


@some
@given(configs())
def test_a_config_survives_its_file(config):
    assert list(violations(config)) == []
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@some
@given(st.sampled_from(sorted(set(FIELDS) - {"name"})), st.data())
def test_a_typo_is_always_refused(write, key, data):
    at = data.draw(st.integers(0, len(key) - 1))
    typo = key[:at] + data.draw(st.sampled_from("zq_")) + key[at + data.draw(st.integers(0, 1)) :]
    section, _, name = typo.partition(".")
    if typo in FIELDS:
        return
    assert refused(write(""), [f"{typo}=1"])
    text = f"[{section}]\n{name} = 1\n" if name else f"{section} = 1\n"
    place = 1 if section not in SECTIONS else 2
    assert refused(write(text))[0].startswith(f"my.toml:{place}: there is no ")


@some
@given(st.one_of(ANY_TEXT, st.builds("{}={}".format, st.sampled_from(sorted(FIELDS)), ANY_TEXT)))
def test_any_set_is_a_config_or_a_config_error(write, text):
    try:
        load(write(""), [text])
    except ConfigError as error:
        assert error.problems


@some
@given(st.one_of(st.text('[]{}=.,"ab1 \n'), st.binary()), st.sampled_from(["my.toml", "config.json"]))
def test_any_file_is_a_config_or_a_config_error(write, content, name):
    try:
        load(write(content, name))
    except ConfigError as error:
        assert error.problems


@some
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT, st.lists), st.data())
def test_any_value_is_a_config_or_a_config_error(value, data):
    section, _, name = data.draw(st.sampled_from(sorted(FIELDS))).partition(".")
    try:
        from_dict({section: {name: value}} if name else {section: value})
    except ConfigError as error:
        assert error.problems


def test_a_preset_sets_what_the_paper_says_and_later_keys_win():
    stages = {name: load("tiny", [f"preset={name}"]) for name in ("C1", "C2", "C3", "C4", "C5")}
    assert [c.zero.stage for c in stages.values()] == [1, 1, 2, 2, 2]
    assert [c.activations.partition for c in stages.values()] == [False, True, False, True, True]
    assert [str(c.offload.placement) for c in stages.values()] == ["", "", "", "", "activations=cpu"]
    assert {c.activations.policy for c in stages.values()} == {"recompute"}
    changed = load("tiny", ["preset=C5", "activations.partition=false"], {"zero.stage": 3})
    assert (changed.zero.stage, changed.activations.partition) == (3, False)
    assert from_dict(to_dict(changed)) == changed
    with pytest.raises(ConfigError, match="not one of C1, C2, C3, C4, C5"):
        load("tiny", ["preset=C6"])
