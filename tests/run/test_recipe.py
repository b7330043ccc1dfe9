"""The defaults of a fine-tuning follow from the folder and the data; what is missing is refused before ranks start."""

from __future__ import annotations

import json

import pytest

from zerocli import config as configs
from zerocli.checkpoint.safetensors import Entry, Writer
from zerocli.cli import main as cli
from zerocli.config.schema import TrainConfig
from zerocli.run import engines, recipe
from zerocli.run.schedule import make_schedule, with_whole_steps

NUMEL = 7_000_000_000
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder whose weights are a header alone, and data of 400 documents, 3 of them long."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [NUMEL], "data_offsets": [0, 2 * NUMEL]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    rows = [{"prompt": "x" * 90, "completion": "y" * (600 if row % 150 == 0 else 38)} for row in range(400)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BYTES = ("data.path=data.jsonl", "data.tokenizer=bytes")


def chosen(folder, *sets, **plan):
    """Return the values that are chosen beside those of `sets`, by key."""
    sets = [*BYTES, *sets]
    config, given = configs.load(str(folder), sets), configs.given_keys(str(folder), sets)
    return {each.key: each.value for each in recipe.choose(config, given, recipe.Plan(**{"ranks": 2, **plan}))}


def test_a_folder_is_tuned_by_its_size_and_its_documents(folder):
    """The learning rate is that of 7B; documents have 128 bytes, and less than 1 % have 690."""
    found = chosen(folder)
    assert found["optimizer.lr"] == 2e-5 and found["optimizer.weight_decay"] == 0 and found["optimizer.warmup"] == 0.03
    assert found["train.epochs"] == 1 and "train.steps" not in found
    assert found["train.seq"] == 128
    assert 1 < found["train.global_batch"] <= recipe.GLOBAL_BATCH
    assert found["train.global_batch"] % (2 * found["train.batch"]) == 0
    assert found["checkpoint.every"] == recipe.SAVE_SHARE and found["train.eval_every"] == recipe.EVAL_SHARE
    assert found["data.split"] == recipe.HELD_OUT


def test_an_epoch_has_as_much_of_a_file_as_its_weight_says(folder, tmp_path):
    (tmp_path / "more.jsonl").write_bytes((tmp_path / "data.jsonl").read_bytes())
    plain = recipe.measure(configs.load(str(folder), BYTES))
    mixed = ("data.mix=['data.jsonl:0.5', 'more.jsonl:2']", "data.tokenizer=bytes")
    found = recipe.measure(configs.load(str(folder), mixed))
    assert plain.documents == 400
    assert found == (2.5 * plain.documents, 2.5 * plain.tokens, plain.most)


def test_what_a_user_gives_wins(folder):
    sets = ("optimizer.lr=1e-3", "train.seq=64", "train.steps=9", "train.batch=3", "checkpoint.every=0", "data.split=0")
    found = chosen(folder, *sets)
    assert not found.keys() & {text.partition("=")[0] for text in sets}
    assert not found.keys() & {"train.epochs", "train.eval_every", "train.eval_batches"}
    assert found["train.global_batch"] % (2 * 3) == 0
    assert "train.global_batch" not in chosen(folder, "train.accumulate=4")
    assert "train.batch" not in chosen(folder, auto=True) and chosen(folder, auto=True)["train.global_batch"] % 2 == 0


def test_the_micro_batch_is_one_that_fits(folder):
    found = chosen(folder, "train.global_batch=64", fits=lambda config: config.train.batch <= 4)
    assert found["train.batch"] == 4


def test_a_run_from_scratch_saves_its_last_step_and_evaluates_some_of_its_data():
    config = configs.load("tiny", ["train.eval_every=20"])
    found = {each.key: each.value for each in recipe.choose(config, frozenset(), recipe.Plan(2))}
    assert found["checkpoint.every"] > config.train.steps
    assert found["train.eval_batches"] * config.train.batch * config.train.seq <= recipe.EVAL_TOKENS
    assert [each.key for each in recipe.choose(configs.load("tiny"), frozenset(), recipe.Plan(2, checked=True))] == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["optimizer.lr=0"], "lr 0: no parameter will change"),
        (["optimizer.lr=5"], "lr 5 is 250,000 times the 2e-05 of a model of this size"),
        (["optimizer.lr=1e-4"], ""),
        (["optimizer.warmup=1000", "train.steps=5"], "warmup 1000 and 5 steps: the learning rate reaches 0.005 of lr"),
        (["activations.policy=recompute:99"], "the model has 1 block"),
    ],
)
def test_values_that_are_hardly_meant_are_said(given, said, folder):
    sets = [*BYTES, *given]
    notes = recipe.notes(configs.load(str(folder), sets), configs.given_keys(str(folder), sets))
    assert said in " ".join(notes) and bool(notes) == bool(said)


def test_shares_become_steps():
    sets = ["train.steps=49", "checkpoint.every=0.25", "train.eval_every=0.1", "optimizer.warmup=0.03"]
    config = with_whole_steps(configs.load("tiny", sets))
    assert (config.checkpoint.every, config.train.eval_every, config.optimizer.warmup) == (13, 5, 2)
    assert make_schedule(configs.OptimizerConfig(lr=1.0, warmup=0.03), 49)(1) == 0.5
    assert with_whole_steps(configs.load("tiny", ["checkpoint.every=7"])).checkpoint.every == 7


REFUSED = {
    "train model": ("which data?", "--data FILE"),
    "train model --data data.jsonl": ("has no tokenizer.json", "data.tokenizer=bytes"),
    "train model --data data.jsonl --set data.tokenizer=bytes --set data.validation=no.jsonl": (
        "no.jsonl: no such file",
        "data.split=0.05",
    ),
    "train model --data data.jsonl --epochs 0": ("--epochs 0", "--steps N"),
    "train --ranks 1000000": ("at most", "--ranks"),
    "train --ranks 3 --tp 2": ("does not divide ranks 3", "--tp 1, or --ranks 4"),
    "train --max-length 8": ("--max-length", "--seq"),
    "train --grad-accum 8": ("--grad-accum", "--accumulate"),
    "train --optimizer sgd": ("--optimizer", "optimizer.name="),
    "train --qlora": ("--qlora", "--lora 16"),
    "train --load-in-4bit": ("--load-in-4bit", "--lora 16 --base nf4"),
    "train --set optimizer.learning_rate=1": ("learning_rate", "--set optimizer.lr=1"),
    "train --save-every sometimes": ("never", "zerocli train --help"),
    "train adapter --data data.jsonl": ("holds an adapter", "zerocli train BASE --lora adapter --data FILE"),
    "train weights.gguf": ("GGUF", "hf download"),
    "train axolotl.yml": ("config of axolotl", "zerocli train ./Llama --data FILE --lr 0.0002"),
    "fit ./nowhere": ("no such file or folder", "configs ls"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_missing_or_meant_otherwise_is_named(line, folder, tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    (tmp_path / "axolotl.yml").write_text("base_model: meta/Llama\nlearning_rate: 0.0002\ndatasets:\n  - path: x\n")
    assert cli.run(line.split()) == 2
    said = capsys.readouterr().err
    fact, _, hint = said.partition("try: ")
    assert REFUSED[line][0] in fact and REFUSED[line][1] in hint, said
    assert not (tmp_path / "runs").exists()


def test_files_that_the_index_names_are_needed(folder, capsys):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli.run(["train", "model", "--data", "data.jsonl", "--set", "data.tokenizer=bytes"]) == 2
    assert "not there: model-2.safetensors" in capsys.readouterr().err


def write_weights(folder, *sets):
    """Write weights of the folder's model with these sizes, under our names; return their names."""
    state = engines.make_model(configs.load(str(folder), sets), "cpu").state_dict()
    writer = Writer(folder / "model.safetensors", [Entry(n, t.dtype, tuple(t.shape)) for n, t in state.items()])
    for name, values in state.items():
        writer.write(name, 0, values.reshape(-1))
    writer.finish()
    writer.close()
    return list(state)


def test_a_dry_run_refuses_the_weights_that_train_would(folder, capsys):
    words = ["train", "model", "--data", "data.jsonl", "--set", "data.tokenizer=bytes", "--lora", "2", "--dry-run"]
    assert cli.run(words) == 2 and "the bytes of w do not fit" in capsys.readouterr().err
    names = write_weights(folder)
    assert cli.run(words) == 0 and "weights from" in capsys.readouterr().err
    assert cli.run([*words, "--set", "model.mlp_hidden=96"]) == 2
    assert "has shape [32, 64], not [32, 96]" in capsys.readouterr().err
    assert cli.run([*words, "--set", "model.layers=2"]) == 2
    assert "has no tensor model.layers.1" in capsys.readouterr().err
    index = {"weight_map": dict.fromkeys(names, "model.safetensors") | {"more": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli.run(words) == 2 and "more is in model.safetensors, and it is not" in capsys.readouterr().err


def test_a_dry_run_and_fit_have_the_shape_of_train(folder, tmp_path, capsys):
    """The settings are a table with reasons, and a dry run leaves no tokens beside the data."""
    write_weights(folder)
    before = sorted(path.name for path in tmp_path.iterdir())
    words = ["--data", "data.jsonl", "--set", "data.tokenizer=bytes", "--lr", "1e-4", "--ranks", "2", "--json"]
    assert cli.run(["train", "model", *words, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert "optimizer.lr            0.0001" in shown.err and "99 % of documents have up to 128" in shown.err
    train = json.loads(shown.out)["config"]["train"]
    assert cli.run(["fit", "model", "--ranks", "2", *(word for text in BYTES for word in ("--set", text))]) == 0
    shown = capsys.readouterr().out
    assert f"batch {train['batch']} x seq {train['seq']}" in shown and TrainConfig.batch != train["batch"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("finetune-7b", "--ranks 1 --gpu-memory 80GB --host-memory 128GB --stage 2 --offload optimizer=cpu"),
        ("lora-8b", "--hardware rtx4090 --ranks 1 --stage 2 --offload none"),
        ("pretrain-1b", "--hardware a100-80 --ranks 8 --stage 1 --offload none"),
    ],
)
def test_a_bundled_recipe_fits_what_it_says(name, words, capsys):
    config = configs.load(name)
    assert cli.run(["fit", name, *words.split(), "--json"]) == 0
    [best] = json.loads(capsys.readouterr().out)["candidates"]
    assert best["stage"] == config.zero.stage and best["fits"]


def test_a_bare_count_says_which_flags_it_ignores(capsys):
    assert cli.run(["fit", "7B", "--seq", "4096", "--batch", "4"]) == 0
    assert "--batch and --seq change nothing" in capsys.readouterr().out
