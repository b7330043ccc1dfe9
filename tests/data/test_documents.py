"""Documents: which tokens count for the loss, by kind of row and chat template; the cache of tokens."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest
from document_models import CHATML, FORGETFUL, MARKED, some_rows, write_rows, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from zerocli.data import cache, documents
from zerocli.data.cache import Node
from zerocli.data.chat import find_template
from zerocli.data.encoder import Encoder, FileEncoder, find_tokenizer
from zerocli.data.files import find_files
from zerocli.data.texts import Codec
from zerocli.errors import UserError


def tokenise(path, encoder=None, mask="auto", columns="", system=""):
    """Return the documents of a file, through a cache file beside it."""
    form, files = find_files(str(path))
    target = path.parent / f"{path.name}.cache"
    reading = documents.Reading(mask, columns, system)
    documents.write_documents(path.parent, target, form, files, encoder or Encoder(), reading, lambda moved: None)
    return documents.Documents.of(cache.Reader(target))


def each(found):
    """Return (ids, counted) of each document."""
    ends = [0, *found.ends.tolist()]
    return [(found.ids[a:b].tolist(), found.counted(a, b).tolist()) for a, b in zip(ends[:-1], ends[1:], strict=True)]


def counted_text(ids, counted):
    """Return the counted bytes as text, the others as dots."""
    return "".join(chr(token) if yes else "." for token, yes in zip(ids, counted, strict=True))


def test_prompts_do_not_count_and_completions_do(tmp_path):
    rows = [{"prompt": "é?", "completion": "yes"}, {"prompt": "", "completion": "no"}, {"prompt": "", "completion": ""}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    found = tokenise(path)
    # The first token of a document has nothing before it that could predict it.
    assert [counted_text(*document) for document in each(found)] == ["...yes", ".o"]
    assert found.kind == "prompt/completion" and found.about["empty"] == 1 and found.num_counted == 4
    assert [counted_text(*document) for document in each(tokenise(path, mask="none"))] == [".\xa9?yes", ".o"]


def test_a_tokenizers_bos_and_eos_surround_a_document(tmp_path):
    pytest.importorskip("tokenizers")
    encoder = FileEncoder(str(write_tokenizer(tmp_path / "model", bos=True) / "tokenizer.json"))
    assert encoder.eos == 258 and encoder.size == 261 and encoder.dtype is np.uint16
    path = write_rows(tmp_path / "x.jsonl", [{"prompt": "is it ", "completion": "so"}])
    [(ids, counted)] = each(tokenise(path, encoder))
    assert ids[0] == 257 and ids[-2:] == [256, 258]  # "so" is one token
    assert counted == [False] * 7 + [True, True]
    [(ids, counted)] = each(tokenise(write_rows(tmp_path / "y.jsonl", [{"text": "so"}]), encoder))
    assert ids == [257, 256, 258] and counted == [False, True, True]


TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "so so"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "é"},
]


def chat(tmp_path, template, messages=TALK, mask="auto"):
    """Return the counted tokens of a conversation as text, and the documents."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    path = str(write_tokenizer(tmp_path / "model", template) / "tokenizer.json")
    rows = write_rows(tmp_path / "x.jsonl", [{"messages": messages}])
    found = tokenise(rows, FileEncoder(path), mask)
    [(ids, counted)] = each(found)
    decoder = tokenizers.Tokenizer.from_file(path)
    text = decoder.decode([i for i, yes in zip(ids, counted, strict=True) if yes], skip_special_tokens=False)
    return text, found


def test_only_the_assistants_turns_count(tmp_path):
    text, found = chat(tmp_path, CHATML)
    assert text == "so so<|im_end|>\né<|im_end|>\n" and found.about["last_only"] == 0


def test_a_template_that_marks_what_is_generated_says_what_counts(tmp_path):
    text, _ = chat(tmp_path, MARKED)
    assert text == "so so<|im_end|>é<|im_end|>"  # without the line's end, which CHATML's turns include


def test_of_a_template_that_changes_earlier_turns_only_the_last_counts(tmp_path):
    text, found = chat(tmp_path, FORGETFUL)
    assert text == "(thinks) é<|im_end|>\n" and found.about["last_only"] == 1
    with pytest.raises(UserError, match=r"x.jsonl:1: the chat template renders earlier turns") as caught:
        chat(tmp_path, FORGETFUL, TALK[:-1])
    assert "data.mask=none" in caught.value.hint


CORPUS = [
    "Capital of France? Paris",
    "Capital of Italy? Rome",
    "Q: 2 + 2 = 4",
    "say hi to Paris and Rome. Paris it is",
] * 4
QUESTIONS = [
    ("Capital of France? ", "Paris"),
    ("Capital of France?", " Paris"),
    ("Q: 2 + 2 = ", "4"),
    ("Capital of It", "aly? Rome"),
    ("", "Rome"),
    ("say\n", "hi to Paris"),
    ("Capital of France?  ", "Paris and Rome."),
]


def trained(folder, kind):
    """Write a tokenizer of one of the common kinds, trained on CORPUS; return its encoder."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    if kind == "bytes":
        return Encoder()
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    made = tokenizers.Tokenizer(models.Unigram() if kind == "unigram" else models.BPE(unk_token="<unk>"))
    letters = pre_tokenizers.ByteLevel.alphabet()
    if kind in ("unigram", "metaspace"):
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        letters = sorted(set("".join(CORPUS)))
    elif kind == "llama":  # a space before the text, then none is special
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        strip = decoders.Strip(" ", 1, 0)
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), strip])
        letters = sorted(set("".join(CORPUS)) | {"\u2581", "\n"})
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefixed")
        made.decoder = decoders.ByteLevel()
    options = {"vocab_size": 400, "special_tokens": special, "initial_alphabet": letters, "show_progress": False}
    trainer = trainers.UnigramTrainer(unk_token="<unk>", **options) if kind == "unigram" else None
    made.train_from_iterator(CORPUS, trainer or trainers.BpeTrainer(**options))
    if kind in ("bos", "llama"):
        around = [("<s>", made.token_to_id("<s>")), ("</s>", made.token_to_id("</s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=around)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return FileEncoder(str(folder / "tokenizer.json"))


KINDS = ("bytes", "plain", "prefixed", "bos", "metaspace", "unigram", "llama")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_ids_that_it_has_at_generation_and_all_of_the_answer_counts(tmp_path, kind):
    encoder = trained(tmp_path / "model", kind)
    codec = Codec(encoder)
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in QUESTIONS]
    found = tokenise(write_rows(tmp_path / "x.jsonl", rows), encoder)
    for (prompt, answer), (ids, counted) in zip(QUESTIONS, each(found), strict=True):
        given = codec.encode(prompt)
        assert ids[: len(given)] == given, prompt
        assert counted == [index >= max(1, len(given)) for index in range(len(ids))], prompt
        made = ids[len(given) :]
        if encoder.eos is not None:
            assert made[-1] == encoder.eos
            made = made[:-1]
        assert made and codec.decode([*given, *made]) == codec.decode(codec.encode(prompt + answer)), prompt
    assert (found.about["apart"] > 0) == (kind != "bytes")


SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize("kind", ["plain", "prefixed", "metaspace", "llama"])
def test_a_turn_begins_after_the_ids_of_the_conversation_before_it(tmp_path, kind):
    pytest.importorskip("transformers")
    encoder = trained(tmp_path / "model", kind)
    (tmp_path / "model/chat_template.jinja").write_text(SPACED)
    talk = [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": "Paris"}]
    found = tokenise(write_rows(tmp_path / "x.jsonl", [{"messages": talk}]), encoder)
    [(ids, counted)] = each(found)
    [before] = encoder.encode(["user: Capital of France?\nassistant: "], places=False)
    first = counted.index(True)
    assert ids[:first] == before.ids.tolist() and all(counted[first:]) and found.about["apart"] == 1
    assert encoder.decode(ids[first:]).strip() == "Paris"


def test_without_a_mask_a_whole_conversation_counts(tmp_path):
    text, found = chat(tmp_path, FORGETFUL, mask="none")
    assert found.num_counted == len(found.ids) - 1 and text.count("<|im_end|>") == 5


def test_a_template_that_refuses_a_conversation_is_reported_with_its_line(tmp_path):
    with pytest.raises(UserError, match="x.jsonl:1: the chat template refuses this conversation: no system"):
        chat(tmp_path, "{{ raise_exception('no system') }}")


def test_a_broken_template_is_blamed_and_not_the_conversation(tmp_path):
    with pytest.raises(UserError, match=r"config.json: chat_template: line 2: is not a chat template: Expected"):
        chat(tmp_path, "\n{% if %}")
    with pytest.raises(UserError, match=r"chat_template: fails at .*x.jsonl:1: UndefinedError"):
        chat(tmp_path, "{{ nothing.at_all.here }}")


def test_a_role_that_the_template_does_not_know_is_refused_with_its_line(tmp_path):
    wrong = [{"role": "user", "content": "hi"}, {"role": "asistant", "content": "yo"}]
    with pytest.raises(UserError, match=r'x.jsonl:1: message 2 has the role "asistant"') as caught:
        chat(tmp_path, CHATML, wrong)
    assert caught.value.hint == "the role assistant"
    text, _ = chat(tmp_path, CHATML + "{# knows 'asistant' #}", [*wrong, {"role": "gpt", "content": "so"}])
    assert text == "so<|im_end|>\n"
    text, found = chat(tmp_path, CHATML, wrong[:1])  # nobody answers
    assert text == "" and found.about["silent"] == 1 and found.about["silent_at"].endswith("x.jsonl:1")


def test_tools_and_system_prompts_are_rendered_as_transformers_does(tmp_path):
    pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = write_tokenizer(tmp_path / "model", "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    encoder = FileEncoder(str(folder / "tokenizer.json"))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    talk, asked = TALK[1:3], {"role": "system", "content": "short"}
    rows = [{"messages": talk, "tools": tools}, {"messages": talk, "tools": json.dumps(tools), "system": "own"}]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    theirs.chat_template = find_template(str(folder))
    found = each(tokenise(write_rows(tmp_path / "x.jsonl", rows), encoder, system="short"))
    for (ids, _), system in zip(found, ("short", "own"), strict=True):
        whole = [{**asked, "content": system}, *talk]
        assert ids == theirs.apply_chat_template(whole, tools=tools, tokenize=True, return_dict=False)
    assert "so so" in theirs.decode([i for i, yes in zip(*found[0], strict=True) if yes])


def test_instructions_are_rendered_by_the_template_or_as_alpacas_text(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    rows = [{"instruction": "add", "input": "1 2", "output": "so"}, {"instruction": "go", "input": "", "output": "so"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    found = tokenise(path)
    texts = [bytes(ids).decode() for ids, _ in each(found)]
    assert texts[0].endswith("### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\nso")
    assert "paired with an input" in texts[0] and "paired" not in texts[1] and "### Input" not in texts[1]
    assert found.kind == "instruction/output" and found.num_counted == 4 and "Alpaca" in found.about["as"]
    encoder = FileEncoder(str(write_tokenizer(tmp_path / "model") / "tokenizer.json"))
    [(ids, counted), _] = each(tokenise(path, encoder))
    assert encoder.decode(ids) == "user\nadd\n1 2\nassistant\nso\n"
    assert encoder.decode([i for i, yes in zip(ids, counted, strict=True) if yes]) == "so\n"


def test_a_template_runs_no_code(tmp_path):
    bad = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(UserError, match="chat_template: fails at .*unsafe"):
        chat(tmp_path, bad)


def test_a_template_may_be_a_file_of_its_own(tmp_path):
    pytest.importorskip("tokenizers")
    from zerocli.data.chat import find_template

    folder = write_tokenizer(
        tmp_path / "model", [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
    )
    assert find_template(str(folder)) == "y"
    (folder / "chat_template.jinja").write_text("z")
    assert find_template(str(folder)) == "z"


def test_messages_without_a_template_or_transformers_are_refused(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    rows = write_rows(tmp_path / "x.jsonl", [{"messages": TALK}])
    with pytest.raises(UserError, match="need the tokenizer and the chat template") as caught:
        tokenise(rows)
    assert "--set data.tokenizer=FOLDER" in caught.value.hint
    folder = write_tokenizer(tmp_path / "model", "")
    with pytest.raises(UserError, match="model: has no chat template"):
        tokenise(rows, FileEncoder(str(folder / "tokenizer.json")))
    write_tokenizer(tmp_path / "model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="transformers, which is not installed") as caught:
        tokenise(rows, FileEncoder(str(folder / "tokenizer.json")))
    assert caught.value.hint == "pip install 'zerocli[hf]'"


def test_rows_of_two_kinds_are_refused_and_empty_files_too(tmp_path):
    rows = write_rows(tmp_path / "x.jsonl", [{"text": "a b"}, {"prompt": "a", "completion": "b"}])
    with pytest.raises(UserError, match="x.jsonl:2: has prompt/completion, and rows before it have text"):
        tokenise(rows)
    with pytest.raises(UserError, match="x.jsonl: there is no data in it"):
        tokenise(write_rows(tmp_path / "x.jsonl", []))
    with pytest.raises(UserError, match="x.jsonl: its 2 rows are empty"):
        tokenise(write_rows(tmp_path / "x.jsonl", [{"text": ""}, {"text": "a"}]))


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=9), min_size=1, max_size=6), st.data())
def test_counted_tokens_are_found_from_where_counting_begins_and_ends(masks, data):
    flat = np.concatenate(masks)
    changes = np.flatnonzero(np.diff(flat, prepend=False, append=False))
    found = documents.Documents(np.zeros(len(flat)), np.cumsum([len(m) for m in masks]), changes, "text", {})
    start = data.draw(st.integers(0, len(flat)))
    end = data.draw(st.integers(start, len(flat)))
    assert found.counted(start, end).tolist() == flat[start:end].tolist()
    assert found.num_counted == flat.sum()
    places = np.array([start, end])
    assert found.counted_before(places).tolist() == [flat[:start].sum(), flat[:end].sum()]


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_the_tokenizer_of_the_models_folder_is_the_default(tmp_path):
    assert find_tokenizer("", "") == ("bytes", "no tokenizer was given")
    assert find_tokenizer("", str(tmp_path))[0] == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}")
    own = str(tmp_path / "tokenizer.json")
    assert find_tokenizer("", str(tmp_path)) == (own, "of the model's folder")
    assert find_tokenizer("bytes", str(tmp_path)) == ("bytes", "as asked")
    assert find_tokenizer(str(tmp_path), "") == find_tokenizer(own, "/none") == (own, "as asked")
    with pytest.raises(UserError, match="none: no such tokenizer file"):
        find_tokenizer("none", "")


def test_a_folder_with_another_tokenizer_is_not_read_as_bytes(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(UserError, match="has a tokenizer, but no tokenizer.json") as caught:
        find_tokenizer("", str(tmp_path))
    assert "save_pretrained" in caught.value.hint


# -- the cache ---------------------------------------------------------------------------------------------------------


def build(values):
    def write(folder, target):
        build.calls += 1
        writer = cache.Writer(folder, {"a": np.uint16, "b": np.int64, "c": np.int64})
        writer.add("b", values[:2])
        writer.add("a", values)
        writer.add("b", values[2:])
        writer.finish(target, {"n": len(values)})

    build.calls = 0
    return write


def test_a_cache_file_is_made_once_and_read_back(tmp_path):
    write = build([1, 2, 3])
    for _ in range(2):
        reader = Node().cached(str(tmp_path / "x.txt"), "", "x.tokens", write)
        assert reader["a"].tolist() == reader["b"].tolist() == [1, 2, 3] and reader["c"].tolist() == []
        assert reader["a"].dtype == np.uint16 and reader.about == {"n": 3}
    assert build.calls == 1 and os.listdir(tmp_path / ".zerocli-cache") == ["x.tokens"]


@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "footer"])
def test_a_damaged_cache_file_is_made_again(tmp_path, damage, capsys):
    write = build(list(range(100)))
    path = Node().cached(str(tmp_path / "x.txt"), "", "x.tokens", write).path
    content = bytearray(path.read_bytes())
    content[{"flip": 50, "footer": len(content) - 40}.get(damage, 0)] ^= damage in ("flip", "footer")
    path.write_bytes({"cut": content[:-9], "empty": b""}.get(damage, content))
    reader = Node().cached(str(tmp_path / "x.txt"), "", "x.tokens", write)
    assert build.calls == 2 and reader["a"].tolist() == list(range(100))
    assert f"{path}: " in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_leaves_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/.zerocli-cache").touch()  # a folder of this name cannot be made
    write = build([1])
    for _ in range(2):
        reader = Node().cached(str(tmp_path / "data"), "", "x.tokens", write)
        assert reader.path == tmp_path / "home/zerocli/data/x.tokens" and build.calls == 1
    with pytest.raises(UserError, match="the tokens cannot be written: .*data/.zerocli-cache: ") as caught:
        Node().cached("", str(tmp_path / "data/.zerocli-cache"), "x.tokens", write)
    assert "data.cache=DIR" in caught.value.hint


def test_what_a_killed_writer_left_is_removed_and_a_living_ones_file_is_not(tmp_path):
    folder = tmp_path / cache.FOLDER
    folder.mkdir()
    (folder / ".part-dead").write_bytes(b"x" * 100)
    living = cache.Writer(folder, {"a": np.uint8})
    Node().cached(str(tmp_path), "", "x.tokens", build([1]))
    assert len(os.listdir(folder)) == 2 and not (folder / ".part-dead").exists()
    living.close()
    assert os.listdir(folder) == ["x.tokens"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [*some_rows(), {"text": 3}])
    with pytest.raises(UserError, match="x.jsonl:41"):
        tokenise(path)
    assert os.listdir(tmp_path) == ["x.jsonl"]


def test_the_name_of_a_cache_file_follows_data_tokenizer_template_and_mask(tmp_path):
    pytest.importorskip("tokenizers")
    path = write_rows(tmp_path / "x.jsonl", some_rows())
    folder = write_tokenizer(tmp_path / "model")

    def name(encoder=None, mask="auto"):
        encoder = encoder or FileEncoder(str(folder / "tokenizer.json"))
        return documents.cache_name(str(path), "jsonl", [path], encoder, documents.Reading(mask))

    names = [name(), name(Encoder()), name(mask="none")]
    assert name() == names[0]
    write_tokenizer(folder, MARKED)
    names.append(name())
    write_tokenizer(folder, bos=True)
    names.append(name())
    write_rows(path, some_rows(41))
    names.append(name())
    assert len(set(names)) == len(names)
