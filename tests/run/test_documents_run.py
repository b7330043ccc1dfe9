"""Runs on documents: one rank tokenises, samples and losses do not depend on the split, resuming is exact."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest
from document_models import VOCAB, some_rows, write_rows, write_tokenizer
from runs import losses, train

from zerocli import config as configs
from zerocli.cli import main as cli
from zerocli.data.held_out import open_held_out
from zerocli.data.preview import refuse_data
from zerocli.data.sources import open_batches, with_packing
from zerocli.errors import UserError

MODEL = "model.factory=document_models:Attentive"
SETS = ("train.seq=40", "optimizer.lr=0.01", "optimizer.schedule=constant", "train.watchdog=30")


def sets_of(data: Path, *more: str) -> tuple[str, ...]:
    return (MODEL, f"data.path={data}", *SETS, *more)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "x.jsonl", some_rows())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data) -> Path:
    """A run of two ranks over more than an epoch."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    ended = train(folder, *sets_of(data, "train.steps=10", "data.tokenizer=bytes"))
    assert ended.codes == [0, 0], ended.said
    return folder


def test_a_run_says_what_its_data_is(whole, data):
    said = Path(f"{whole}.said0").read_text()
    assert re.search(
        r"data: .*x.jsonl \(jsonl, prompt/completion\): 40 documents, [\d,]+ tokens, [\d,]+ of them count", said
    )
    assert "tokenizer: bytes (as asked)" in said
    assert re.search(r"windows: \d+ of 40 tokens, packed, \d+\.\d % full", said)
    assert re.search(r"data: \d+ documents longer than 40 tokens, truncated: \d+ tokens dropped", said)
    assert re.search(r"epochs: [\d.]+ by step 10: 4 windows per step, \d+ in the data", said)
    assert "data: " not in Path(f"{whole}.said1").read_text()
    assert sorted(file.suffix for file in (data.parent / ".zerocli-cache").iterdir()) == [".tokens", ".windows"]


def test_resuming_in_the_middle_of_an_epoch_is_bit_exact(tmp_path, whole, data):
    sets = sets_of(data, "data.tokenizer=bytes")
    assert train(tmp_path / "run", *sets, "train.steps=3").codes == [0, 0]
    ended = train(tmp_path / "run", *sets, "train.steps=10", resume=True)
    assert ended.codes == [0, 0] and "resuming after step 3" in ended.said[0]
    assert losses(tmp_path / "run") == losses(whole)


def test_one_rank_and_two_ranks_train_on_the_same_samples(tmp_path, whole, data):
    """Two ranks of 2, one rank of 4, and one of 2 x 2 micro-steps, the last two resumed from each other."""
    sets = sets_of(data, "data.tokenizer=bytes")
    assert train(tmp_path / "run", *sets, "train.batch=4", "train.steps=5", world=1).codes == [0]
    ended = train(tmp_path / "run", *sets, "train.accumulate=2", "train.steps=10", world=1, resume=True)
    assert ended.codes == [0], ended.said
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-5)


@pytest.mark.long
def test_a_check_compares_masked_and_random_micro_steps_too(tmp_path, data):
    sets = sets_of(data, "data.tokenizer=bytes", "train.accumulate=2", "checkpoint.every=0", "train.steps=3")
    sets = (*sets[1:], "model.dropout=0.2")  # a model of ours; each micro-step of each rank draws its own numbers
    ended = train(tmp_path / "run", *sets, check=3)
    assert ended.codes == [0, 0] and "check: equal to unsharded training over 3 steps" in ended.said[0], ended.said


def test_epochs_decide_the_steps_also_of_a_resumed_run(tmp_path, data):
    sets = sets_of(data, "data.tokenizer=bytes", "checkpoint.every=1")
    stopped = train(tmp_path / "run", *sets, "train.epochs=0.3", world=1)
    windows = int(re.search(r"([\d,]+) in the data", stopped.said[0])[1])
    assert stopped.codes == [0] and len(losses(tmp_path / "run")) == -(-windows * 3 // 20)
    resumed = train(tmp_path / "run", *sets, "train.epochs=1", "train.batch=3", world=1, resume=True)
    assert resumed.codes == [0], resumed.said
    steps, seen = -(-windows * 3 // 20), 2 * -(-windows * 3 // 20)
    assert max(losses(tmp_path / "run")) == steps + -(-(windows - seen) // 3)


def test_a_model_without_positions_trains_unpacked_documents_only(tmp_path, data):
    sets = sets_of(data, "data.tokenizer=bytes", "model.factory=document_models:Blind", "train.steps=1")
    ended = train(tmp_path / "run", *sets, world=1)
    assert ended.codes == [2] and "takes no positions" in ended.said[0] and "data.pack=false" in ended.said[0]
    ended = train(tmp_path / "run", *sets, "data.pack=false", world=1)
    assert ended.codes == [0] and "windows: 40 of 40 tokens, one document each" in ended.said[0], ended.said


def test_a_malformed_line_ends_the_run_with_its_place(tmp_path):
    bad = write_rows(tmp_path / "x.jsonl", [*some_rows(), {"text": 1}])
    ended = train(tmp_path / "run", *sets_of(bad, "data.tokenizer=bytes"), awaited=[0])
    assert ended.codes[0] == 2 and "x.jsonl:41: " in ended.said[0] and "Traceback" not in "".join(ended.said)


def test_a_dry_run_tries_the_data_and_writes_nothing(tmp_path, capsys):
    data = write_rows(tmp_path / "x.jsonl", some_rows())
    assert cli.run(["train", "--dry-run", "--data", str(data), "--ranks", "2"]) == 0
    said = capsys.readouterr().err
    assert "x.jsonl (jsonl), not tokenised" in said and "rows of prompt/completion; the first 40 were tokenised" in said
    assert list(tmp_path.iterdir()) == [data]
    write_rows(data, [{"prompt": "a"}])
    assert cli.run(["train", "--dry-run", "--data", str(data)]) == 2
    assert "x.jsonl:1: has neither text" in capsys.readouterr().err
    write_rows(data, [{"text": "abc"}])
    assert cli.run(["train", "--dry-run", "--data", str(data), "--set", "model.vocab=99"]) == 2
    assert "bytes: has 256 token ids, and the model knows 99: 0 to 98" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("x.jsonl", b'{"text": 1}\n', "x.jsonl:1: text is a number, not a string"),
        ("x.txt", b"ab\0c", "x.txt: has a NUL byte at offset 2"),
        ("x.txt.gz", b"\x1f\x8b", "x.txt.gz: is packed"),
    ],
)
def test_what_the_first_bytes_show_is_refused_before_the_ranks_start(
    tmp_path, monkeypatch, capsys, name, content, fact
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / name).write_bytes(content)
    assert cli.run(["train", "--data", name]) == 2
    said = capsys.readouterr().err
    assert f"error: {fact}" in said and "ranks 2" not in said and not (tmp_path / "runs").exists()


def test_text_is_tokenised_once_by_the_models_own_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path / "model")
    (tmp_path / "text").mkdir()
    (tmp_path / "text/x.txt").write_text("so it is, and so it was\n" * 40)
    sets = (f"data.path={tmp_path / 'text'}", f"model.folder={folder}", *SETS, f"model.vocab={VOCAB}", "train.steps=2")
    ended = train(tmp_path / "run", *sets)
    assert ended.codes == [0, 0], ended.said
    assert (
        "(text): 880 tokens, all count" in ended.said[0] and "tokenizer.json (of the model's folder)" in ended.said[0]
    )
    [made] = (tmp_path / "text/.zerocli-cache").iterdir()
    before = made.stat().st_mtime_ns
    assert train(tmp_path / "again", *sets).codes == [0, 0] and made.stat().st_mtime_ns == before
    content = bytearray(made.read_bytes())
    content[100] ^= 1
    made.write_bytes(content)
    ended = train(tmp_path / "mended", *sets)
    assert ended.codes == [0, 0] and "section ids is damaged: it is made again" in ended.said[0]
    assert losses(tmp_path / "run") == losses(tmp_path / "mended")
    small = train(tmp_path / "small", *sets, "model.vocab=256")
    assert small.codes == [2, 2] and "tokenizer.json: has 261 token ids, and the model knows 256" in small.said[0]


def test_files_are_mixed_by_weight_in_an_order_that_the_seed_decides(tmp_path):
    """A weight of 3 gives each window three times per epoch, one of 0.5 each in every second epoch."""
    for name, number in (("a", 6), ("b", 8)):
        write_rows(tmp_path / f"{name}.jsonl", [{"text": f"{name}{k}" + "." * 20} for k in range(number)])
    a, b = (str(tmp_path / f"{name}.jsonl") for name in "ab")
    flags = {"data.path": (f"{a}:3", f"{b}:0.5")}
    config = configs.load("tiny", ["data.tokenizer=bytes", "train.seq=24", "data.pack=false"], flags)
    assert config.data.path == a and config.data.mix == (f"{a}:3", f"{b}:0.5")
    batches = open_batches(config)
    assert batches.num_windows == 3 * 6 + 4 and "18 windows per epoch (weight 3)" in "\n".join(batches.lines)
    seen = [bytes(batches.take(range(index, index + 1))[0][0, :2].tolist()).decode() for index in range(44)]
    counted = [Counter(seen[:22]), Counter(seen[22:])]
    for epoch in counted:
        assert {key: epoch[key] for key in epoch if key[0] == "a"} == {f"a{k}": 3 for k in range(6)}
    assert sorted(key for epoch in counted for key in epoch if key[0] == "b") == [f"b{k}" for k in range(8)]
    assert seen[:22] != seen[22:] and open_batches(config).take(range(44))[0].equal(batches.take(range(44))[0])
    one = configs.load("tiny", flags={"data.path": (a,)}).data
    assert one.path == a and one.mix == ()
    (tmp_path / "x.toml").write_text(f'[data]\npath = ["{a}:2", "{b}"]\n')
    written = configs.load(str(tmp_path / "x.toml")).data
    assert written.path == a and written.mix == (f"{a}:2", b)
    assert configs.load(str(tmp_path / "x.toml"), [f"data.path={b}"]).data.mix == ()
    held = open_batches(dataclasses.replace(config, data=dataclasses.replace(config.data, split=0.25))).held_out(1)
    assert held is not None and held.num_batches == 4  # the last quarter of each file, once
    (tmp_path / "c.txt").write_text("text " * 50)
    with pytest.raises(UserError, match="is text, and several files are mixed only if all are documents"):
        open_batches(configs.load("tiny", flags={"data.path": (a, str(tmp_path / "c.txt"))}))


def test_a_bad_row_anywhere_is_refused_before_the_ranks_start(tmp_path):
    """Also in held-out data; what is tokenised then is what the ranks find in the cache."""
    path = write_rows(tmp_path / "x.jsonl", [*some_rows(), {"prompt": 3, "completion": ""}])
    config = configs.load("tiny", [f"data.path={path}", "data.tokenizer=bytes"])
    with pytest.raises(UserError, match="x.jsonl:41: prompt is a number"):
        refuse_data(config)
    good = write_rows(tmp_path / "y.jsonl", some_rows())
    held = dataclasses.replace(config.data, path=str(good), validation=str(path))
    with pytest.raises(UserError, match="x.jsonl:41: prompt is a number"):
        refuse_data(dataclasses.replace(config, data=held))
    made = sorted((tmp_path / ".zerocli-cache").iterdir())
    assert len(made) == 2
    open_batches(dataclasses.replace(config, data=dataclasses.replace(held, validation="")))
    assert sorted((tmp_path / ".zerocli-cache").iterdir()) == made


@pytest.mark.parametrize(("family", "why"), [("mamba", "linear_attention"), ("opt", "makes its masks"), ("llama", "")])
def test_a_model_that_cannot_pack_documents_trains_without(tmp_path, data, family, why):
    transformers = pytest.importorskip("transformers")
    shape = dict(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
    transformers.AutoConfig.for_model(family, **shape).save_pretrained(tmp_path)
    sets = ["model.code=transformers", "train.seq=40", "data.tokenizer=bytes", f"data.path={data}"]
    config = configs.load(str(tmp_path / "config.json"), sets)
    chosen, line = with_packing(config)
    assert chosen.data.pack is not bool(why) and why in line and line.startswith("packing: off") == bool(why)
    text = dataclasses.replace(config, data=dataclasses.replace(config.data, path=""))
    assert with_packing(text) == (text, "")


def test_prompts_count_with_on_inputs_and_long_rows_are_said_at_the_end_too(tmp_path, data):
    sets = [f"data.path={data}", "data.tokenizer=bytes", "train.seq=20"]
    counts = [
        open_batches(configs.load("tiny", [*sets, *more])).lines[0].split(", ")[-1]
        for more in ([], ["train.on_inputs=true"], ["data.mask=none"])
    ]
    assert counts[0] != counts[1] == counts[2]
    for long, said in (("truncate", "truncated: "), ("drop", "left out with "), ("split", "split (the longest")):
        batches = open_batches(configs.load("tiny", [*sets, f"data.long={long}"]))
        assert said in batches.notes[0] and batches.notes[0] in batches.lines


@pytest.mark.parametrize("kind", ["split", "validation"])
def test_held_out_documents_come_in_the_batch_that_was_chosen(kind, tmp_path, data):
    """As when `--auto` takes smaller micro-batches than the config has."""
    more = ["data.split=0.2"] if kind == "split" else [f"data.validation={data}"]
    sets = [f"data.path={data}", "data.tokenizer=bytes", "train.seq=40", "train.batch=4", "train.eval_every=1", *more]
    config = configs.load("tiny", sets)
    batches = open_batches(config)
    chosen = dataclasses.replace(config, train=dataclasses.replace(config.train, batch=1, accumulate=4))
    held = open_held_out(chosen, batches, open_batches)
    assert held is not None and held.positions
    rows = [held.batch(index)[0] for index in range(held.num_batches)]
    assert len(rows) > 4 and all(each.shape == (1, 40) for each in rows)
    assert len({tuple(each.flatten().tolist()) for each in rows}) == len(rows)
