"""Text from a model: the choice of a token, runs and folders, one rank and several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from commands import run
from document_models import VOCAB, write_rows, write_tokenizer
from hf_folders import write
from lengths import LONG
from ranks import run_ranks

from zerocli import config as configs
from zerocli.checkpoint.export import export
from zerocli.cli import main as cli
from zerocli.cli.generate import find, read_config
from zerocli.console import printable
from zerocli.data.encoder import Encoder
from zerocli.data.texts import Codec, end_ids, open_codec
from zerocli.errors import UserError
from zerocli.run import generate
from zerocli.run.complete import Sampling, choose, complete
from zerocli.run.engines import make_engine, make_model

SHAPE = ["model.hidden=32", "train.seq=32", "train.steps=3", "checkpoint.every=3"]
GIVEN = {"precision": "fp32", "stage": None, "offload": None, "sets": ()}
PROMPT = "def main(text):"


def draws(sampling: Sampling, logits: list[float], times: int = 400) -> list[int]:
    random = torch.Generator().manual_seed(sampling.seed)
    return [choose(torch.tensor(logits, dtype=torch.float64), sampling, random) for _ in range(times)]


def test_the_choice_of_a_token_obeys_its_settings():
    logits = [0.0, 3.0, 2.0, 3.0, -1.0]
    assert set(draws(Sampling(), logits)) == {1}
    assert set(draws(Sampling(temperature=1.0), logits)) == {0, 1, 2, 3, 4}
    assert set(draws(Sampling(temperature=1.0, top_k=2), logits)) == {1, 3}
    assert set(draws(Sampling(temperature=1.0, top_k=1), logits)) == {1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.8), logits)) == {1, 3}  # 0.41 + 0.41
    assert set(draws(Sampling(temperature=1.0, top_p=0.9), logits)) == {1, 2, 3}
    shares = torch.softmax(torch.tensor(logits), 0)
    counted = torch.bincount(torch.tensor(draws(Sampling(temperature=1.0), logits, 4000)), minlength=5) / 4000
    assert torch.allclose(counted, shares, atol=0.03)
    assert draws(Sampling(temperature=1.0, seed=1), logits) != draws(Sampling(temperature=1.0, seed=2), logits)
    with pytest.raises(UserError, match="not finite"):
        choose(torch.full((3,), float("nan")), Sampling(), torch.Generator())


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.long)])
def trained(request, tmp_path_factory) -> Path:
    """A run of two ranks, and its export beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    family = [f"model.family={request.param}", "zero.stage=3"]
    ended = runs.train(folder / "run", *SHAPE, *family, *(["model.tie=false"] if request.param == "llama" else []))
    assert ended.codes == [0, 0], ended.said
    export(str(folder / "run"), None, folder / "out", "fp32", 1 << 30)
    return folder


def _made(source: str, stage: int, sampling: Sampling, offload: str = "", cached: bool = True) -> list[int]:
    is_run = find(source)
    config = read_config(source, is_run, GIVEN | {"stage": stage, "offload": offload})
    weights = generate.Weights(source, is_run, None, 0 if is_run else generate.positions_of(source))
    codec = open_codec(config, "" if is_run else source)
    ids = codec.encode(PROMPT)
    config = generate.with_window(config, weights, len(ids) + sampling.max_tokens)
    model = make_model(config)
    model.requires_grad_(False)
    engine = make_engine(config, model, compile=False)
    generate.load(engine, config, weights, lambda text: None)
    held = engine.memory()
    assert held["optimizer_states"] == held["gradients"] == 0
    made = list(complete(engine, ids, sampling, config.train.seq, codec.ends, cached))
    engine.close()
    return made


@pytest.mark.longer
def test_ranks_stages_and_folders_give_the_same_text(trained):
    """With a cache of keys and values and without: all 32 positions of the run, 15 of them the prompt's."""
    source, out = str(trained / "run"), str(trained / "out")
    greedy, drawn = Sampling(17), Sampling(17, temperature=1.0, top_p=0.95, seed=5)
    for sampling in (greedy, drawn)[0 if LONG else 1 :]:
        alone = run_ranks(1, _made, source, 0, sampling)[0]
        assert len(alone) == 17
        assert run_ranks(2, _made, source, 3, sampling, "params=cpu" * (sampling is drawn)) == [alone, alone]
    assert run_ranks(1, _made, source, 0, drawn, "", False)[0] == alone
    assert run_ranks(2, _made, out, 3, Sampling(10)) == run_ranks(2, _made, source, 1, Sampling(10))


def test_greedy_text_is_that_of_transformers(trained):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "out")
    ids = torch.tensor([list(PROMPT.encode())])
    theirs = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert theirs[0, ids.shape[1] :].tolist() == run_ranks(1, _made, str(trained / "out"), 0, Sampling(12))[0]


@pytest.mark.long
def test_text_is_on_stdout_and_all_else_on_stderr(tmp_path):
    assert runs.train(tmp_path / "run", *SHAPE).codes == [0, 0]
    words = ["generate", "run", PROMPT, "--max-tokens", "5", "--ranks", "2", "--temperature", "1", "--seed", "7"]
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    made = run_ranks(1, _made, str(tmp_path / "run"), 0, Sampling(5, 1.0, seed=7))[0]
    assert done.stdout == printable(PROMPT + Codec(Encoder()).continuation(list(PROMPT.encode()), made)) + "\n"
    assert "stage 3 on 2 ranks" in done.stderr and "5 tokens in" in done.stderr


@pytest.mark.long
def test_one_process_is_enough_and_json_is_one_document(trained):
    words = ["generate", "out", PROMPT, "--max-tokens", "5", "--json", "--set", "data.tokenizer=bytes"]
    done = run(trained, *words)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and document["prompt"] == PROMPT
    assert document["tokens"] == run_ranks(1, _made, str(trained / "run"), 0, Sampling(5))[0]


def _weights(folder: Path, family: str) -> Path:
    """A folder of random weights, with a tokenizer of bytes and a chat template."""
    write(family, folder, vocab_size=VOCAB)
    (folder / "chat_template.jinja").unlink()
    return write_tokenizer(folder)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "qwen3", "gemma2", "mixtral"])
def test_a_cache_changes_no_greedy_text_of_any_code(tmp_path, family):
    """Our own code and transformers' models (with their own cache), in fp32 and bf16, beside transformers itself."""
    transformers = pytest.importorskip("transformers")
    folder = str(_weights(tmp_path, family))
    ids = list(range(3, 12))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    made = theirs.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
    for sets, precision in (((), "fp32"), (("model.code=transformers",), "fp32"), ((), "bf16")):
        config = read_config(folder, False, GIVEN | {"sets": sets, "precision": precision})
        weights = generate.Weights(folder, False, None, generate.positions_of(folder))
        config = generate.with_window(config, weights, len(ids) + 16)
        engine = make_engine(config, make_model(config).requires_grad_(False), compile=False)
        generate.load(engine, config, weights, lambda text: None)
        calls = count_tokens(engine)
        with_cache = list(complete(engine, ids, Sampling(16), config.train.seq))
        assert calls == [9] + [1] * 15
        if precision == "fp32":
            assert with_cache == made[0, 9:].tolist()
            assert list(complete(engine, ids, Sampling(16), config.train.seq, cached=False)) == with_cache
        engine.close()


def count_tokens(engine: Any) -> list[int]:
    """Return a list that gets the number of tokens of each later forward of the model."""
    calls: list[int] = []
    engine.model.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[1]))
    return calls


def asked(capsys, *words: str) -> tuple[int, str, str]:
    """Run `zerocli generate` in this process; return its exit code, stdout and stderr."""
    capsys.readouterr()
    code = cli.run(["generate", *words])
    return code, *capsys.readouterr()


def test_a_user_asks_a_folder(tmp_path, capsys):
    """Positions, stop strings, prompts of a file, messages, and a placement that changes nothing."""
    pytest.importorskip("transformers")
    folder = str(_weights(tmp_path / "llama", "llama"))
    code, out, said = asked(capsys, folder, "so so", "--json")
    whole = json.loads(out)
    assert code == 0 and len(whole["tokens"]) == 64 - 3 and whole["ended"] == "length"
    assert "the prompt has 3 tokens, and the model has 64 positions: at most 61 tokens can follow" in said
    code, out, said = asked(capsys, folder, "so so", "--max-tokens", "62")
    assert code == 2 and out == "" and "61 tokens can follow, not 62\ntry: --max-tokens 61" in said
    assert asked(capsys, folder, "so" * 64)[0] == 2
    text = whole["text"]
    stop = text[5:7]
    words = ("--max-tokens", "61", "--offload", "params=cpu")
    code, out, said = asked(capsys, folder, "so so", *words, "--stop", stop, "--stop", "nowhere")
    assert out == printable("so so" + text[: text.index(stop)]) + "\n"
    assert "no GPU, so the weights are in host memory anyway" in said and "stage 0 on 1 rank" in said
    (tmp_path / "p.jsonl").write_text('{"prompt": "so so"}\n{"messages": [{"role": "user", "content": "so"}]}\n')
    code, out, _ = asked(
        capsys, folder, "--prompts", str(tmp_path / "p.jsonl"), "--chat", "--json", "--max-tokens", "3"
    )
    first, second = json.loads(out)["texts"]
    assert [first["prompt"], second["prompt"]] == ["so so", "so"]
    rendered = "<|im_start|>user\nso<|im_end|>\n<|im_start|>assistant\n"
    assert second["prompt_tokens"] == open_codec(read_config(folder, False, GIVEN), folder).encode(rendered)
    code, out, said = asked(capsys, folder)
    assert code == 2 and "PROMPT is missing" in said
    assert asked(capsys, folder, "x", "--chat", "--plain")[0] == 2


def test_a_run_on_messages_is_asked_by_messages(tmp_path, capsys):
    """By default, with the tokens of training; the answer ends with the token that ends a turn."""
    pytest.importorskip("transformers")
    folder = _weights(tmp_path / "llama", "llama")
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so so"}]}] * 4
    data = write_rows(tmp_path / "x.jsonl", rows)
    sets = ["train.seq=24", "train.batch=1", "train.steps=60", "checkpoint.every=60", "optimizer.lr=0.02"]
    sets += ["optimizer.schedule=constant", "optimizer.warmup=0"]
    words = ["train", str(folder), "--data", str(data), "--ranks", "1", "--run-dir", str(tmp_path / "run")]
    assert cli.run([*words, *(word for each in sets for word in ("--set", each))]) == 0
    code, out, said = asked(capsys, str(tmp_path / "run"), "hi")
    assert code == 0 and out == "so so\n" and "chat: the run was trained on messages" in said
    code, out, _ = asked(capsys, str(tmp_path / "run"), "hi", "--plain", "--max-tokens", "2")
    assert out.startswith("hi")


def test_the_beginning_of_a_stop_string_is_held_back(capsys):
    stream = generate.Stream(True, ("END", "\n\n"))
    shown = []
    for text in ("a", "a\n", "a\nE", "a\nEN", "a\nENx", "a\nENx\n"):
        stream.follow(text)
        shown.append(capsys.readouterr().out)
    assert shown == ["a", "", "\n", "", "ENx", ""]
    assert generate.cut("a\nEND b\n\n", ("\n\n", "END")) == ("a\n", True)
    assert generate.cut("abc", ("d",)) == ("abc", False)


def test_a_text_ends_where_the_folder_says(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_ids(str(tmp_path)) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert end_ids(str(tmp_path)) == {5, 6}
    (tmp_path / "generation_config.json").write_text("[]")
    assert end_ids(str(tmp_path)) == {7}
    config = configs.load("tiny", ["model.layers=1"])
    engine = make_engine(config, make_model(config).requires_grad_(False), compile=False)
    first = list(complete(engine, [1, 2], Sampling(3), 128))
    assert list(complete(engine, [1, 2], Sampling(3), 128, frozenset(first[:1]))) == []
    engine.close()


def test_bytes_and_tokenizers_decode_what_they_encode(tmp_path):
    assert Codec(Encoder()).decode(Codec(Encoder()).encode("naïve ☃")) == "naïve ☃"
    assert Codec(Encoder()).continuation([65], [0xE2, 0x98, 0x83]) == "☃"
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    codec = open_codec(configs.load("tiny"), str(tmp_path))
    assert codec.encode("a b c") == [0, 1, 2] and codec.continuation([0], [1, 1]) == " b b"


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda folder: folder / "absent", "no such folder"),
        (lambda folder: folder, "has neither checkpoints nor"),
        (lambda folder: (folder / "metrics.jsonl").touch() or folder, "the run has no checkpoint"),
    ],
)
def test_what_is_no_model_is_named(tmp_path, make, fact):
    with pytest.raises(UserError, match=fact):
        find(str(make(tmp_path)))
