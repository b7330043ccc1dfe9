"""Formats: what a file is, its rows, and the line and the fact of each that is malformed."""

from __future__ import annotations

import gzip
import sys
import tarfile

import numpy as np
import pytest

from zerocli import config as configs
from zerocli.data.files import find_files, text_pieces
from zerocli.data.prompts import read_prompts
from zerocli.data.rows import parse_columns
from zerocli.data.tables import read_rows
from zerocli.data.tokens import open_source
from zerocli.errors import ConfigError, UserError


def refused(function, *args):
    """Return (message, hint) with which a call is refused."""
    with pytest.raises(UserError) as caught:
        function(*args)
    return str(caught.value), caught.value.hint


def rows_of(file):
    form, files = find_files(str(file))
    return list(read_rows(form, files))


def test_formats_are_known_by_suffix_and_content(tmp_path):
    contents = {"a.jsonl": b'{"text": ""}', "b.json": b' {"text": 1}', "c.dat": b"PAR1", "d.txt": b"{}", "e.bin": b""}
    found = {}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        found[name[0]] = find_files(str(tmp_path / name))[0]
    assert found == {"a": "jsonl", "b": "jsonl", "c": "parquet", "d": "text", "e": ".bin"}
    message, _ = refused(find_files, str(tmp_path))
    assert message == f"{tmp_path}: holds .bin and jsonl and parquet and text files: a run takes one format"


def test_a_readme_beside_rows_is_not_data(tmp_path):
    (tmp_path / "README.md").write_text("about it")
    (tmp_path / "b.jsonl").write_text('{"text": "1"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "0"}\n\n \n{"text": "2", "other": 3}\n')
    assert [(row.place.rpartition("/")[2], row.values["text"]) for row in rows_of(tmp_path)] == [
        ("a.jsonl:1", "0"),
        ("a.jsonl:4", "2"),
        ("b.jsonl:1", "1"),
    ]


def test_packed_files_are_refused_with_the_command_to_unpack_them(tmp_path):
    plain = tmp_path / "x.txt"
    plain.write_text("text " * 100)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "hidden.jsonl").write_bytes(gzip.compress(b"{}"))
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.add(plain, "x.txt")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        tar.add(plain, "x.txt")
    (tmp_path / "x.zip").write_bytes(b"PK\x03\x04")
    for name, command in {
        "x.jsonl.gz": "gunzip -k",
        "hidden.jsonl": "gunzip -k",
        "x.tar": "tar -xf",
        "x.tar.gz": "tar -xzf",
        "x.zip": "unzip",
    }.items():
        message, hint = refused(find_files, str(tmp_path / name))
        assert "is packed" in message and hint == f"{command} {tmp_path / name}"


def test_arrow_files_are_refused_with_their_conversion(tmp_path):
    (tmp_path / "x.arrow").write_bytes(b"ARROW1")
    assert "load_from_disk" in refused(find_files, str(tmp_path / "x.arrow"))[1]


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (b'{"text": "a"', "is not JSON: expecting ',' delimiter at column 13"),
        (b"{'text': 1}", "is not JSON: expecting property name enclosed in double quotes at column 2"),
        (b'{"text": "\xff"}', "is not UTF-8 at offset 10 of the line"),
        (b'{"text": "\0"}', "has a NUL byte at offset 10 of the line: it is a binary file, not jsonl"),
        (b'"text"', "is a string, not an object with text or messages"),
        (b"null", "is null, not an object with text or messages"),
        (b'{"text": 3}', "text is a number, not a string"),
        (b'{"text": null}', "text is null, not a string"),
        (b'{"text": "\\ud800"}', "text has half of a surrogate pair at character 0"),
        (b'{"body": "", "id": 1}', "has neither text, nor messages, nor prompt and completion, nor instruction"),
        (b'{"prompt": "a"}', "has neither text, nor messages, nor prompt and completion, nor instruction"),
        (b'{"prompt": "a", "completion": []}', "completion is a list, not a string"),
        (b'{"messages": []}', "messages is empty, not a list of objects with role and content"),
        (b'{"messages": ["hi"]}', "message 1 is a string, not an object with role and content"),
        (b'{"messages": [{"from": "a"}]}', "message 1 has no value; its keys: from"),
        (b'{"messages": [{"role": "user"}]}', "message 1 has no content; its keys: role"),
        (b"[" * 100_000, "is not JSON: "),
    ],
)
def test_a_malformed_line_is_refused_with_its_number_and_the_fact(tmp_path, line, fact):
    (tmp_path / "x.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "fine"}\n\n' + line + b'\n{"text": ""}\n')
    message, _ = refused(rows_of, tmp_path / "x.jsonl")
    assert message.startswith(f"{tmp_path}/x.jsonl:3: {fact}"), message


TALKS = (
    '{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "s"}',
    '{"messages": [{"role": "Human", "content": "hi"}, {"role": "bot", "content": "yo"}], "system": "s"}',
)


def test_rows_of_sharegpt_alpaca_arrays_and_tables_are_those_of_jsonl(tmp_path):
    """The same rows in every form that people have them in, with the line of each."""
    lines = [*TALKS, '{"instruction": "add", "input": "1 2", "output": "3", "text": "all of it"}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    (tmp_path / "x.json").write_text("\n[" + ",\n".join(lines) + "\n]\n")
    found = {suffix: rows_of(tmp_path / f"x{suffix}") for suffix in (".jsonl", ".json")}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    assert [row.values for row in found[".jsonl"]] == [
        *[{"messages": said, "system": "s"}] * 2,
        {"instruction": "add", "input": "1 2", "output": "3"},
    ]
    assert [row.kind for row in found[".jsonl"]] == ["messages", "messages", "instruction/output"]
    assert [row.values for row in found[".json"]] == [row.values for row in found[".jsonl"]]
    assert [row.place.rpartition(":")[2] for row in found[".json"]] == ["2", "3", "4"]
    cells = '\ufeffprompt,completion,n\n"a, b","two\nlines",1\n\nc,d,2\n'
    (tmp_path / "x.csv").write_text(cells)
    (tmp_path / "x.tsv").write_text("prompt\tcompletion\nc, c\td\n")
    rows = rows_of(tmp_path / "x.csv")
    assert [row.values for row in rows] == [
        {"prompt": "a, b", "completion": "two\nlines"},
        {"prompt": "c", "completion": "d"},
    ]
    assert [row.place.rpartition(":")[2] for row in rows] == ["2", "5"]
    assert rows_of(tmp_path / "x.tsv")[0].values == {"prompt": "c, c", "completion": "d"}


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("x.json", '[\n{"text": "a"},\n{"text": 1}]', ":3: text is a number"),
        ("x.json", '[\n{"text": "a"}\n{"text": "b"}]', ":3: is not JSON: expecting ',' or ']'"),
        ("x.json", '[{"text": "a"},\n]', ":2: is not JSON: expecting value at column 1"),
        ("x.json", '[{"text": "a"}] 3', ": has more after its JSON array"),
        ("x.csv", "text,n\na,1\nb\n", ":3: has 1 cells, and the header has 2 columns"),
        ("x.csv", 'text\na\n"b', ":3: is not a row of a table: unexpected end of data"),
        ("x.csv", "question,answer\na,1\n", ":2: has neither text"),
        ("x.jsonl", '{"chosen": "a", "rejected": "b", "prompt": "c"}', ":1: has chosen and rejected"),
        ("x.jsonl", '{"prompt": "a", "completion": "b", "label": false}', ":1: has a label beside its completion"),
        ("x.jsonl", '{"messages": [{"role": "user", "content": "a"}], "tools": "["}', ":1: tools is not JSON"),
    ],
)
def test_a_malformed_table_array_or_pair_is_refused_with_its_place(tmp_path, name, content, fact):
    (tmp_path / name).write_text(content)
    message, hint = refused(rows_of, tmp_path / name)
    assert message.startswith(f"{tmp_path / name}{fact}"), message
    if "question" in content:
        assert hint == "--set data.columns=question:prompt,answer:completion"
    if "chosen" in content:
        assert "data.columns=prompt:prompt,chosen:completion" in hint and "DPO" in message


def test_content_in_parts_of_text_is_joined(tmp_path):
    file = tmp_path / "parts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}]}\n')
    assert rows_of(file)[0].values["messages"] == [{"role": "user", "content": "ab"}]


def test_columns_have_the_names_that_the_config_gives_them(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "q", "my answer": "a", "text": "not read"}\n{"question": "q"}\n')
    form, files = find_files(str(tmp_path / "x.jsonl"))
    rows = read_rows(form, files, parse_columns("question:prompt,my answer:completion"))
    assert next(rows).values == {"prompt": "q", "completion": "a"}
    message, _ = refused(next, rows)
    assert message == f"{tmp_path}/x.jsonl:2: has no my answer, which data.columns names; its keys: question"
    assert configs.load("tiny", ["data.columns=q:prompt,a:completion"]).data.columns == "q:prompt,a:completion"
    with pytest.raises(ConfigError, match="is not of the form question:prompt,answer:completion"):
        configs.load("tiny", ["data.columns=q:prompts"])


def test_prompts_of_a_file_are_lines_or_rows(tmp_path):
    (tmp_path / "p.txt").write_text("first\n\nsecond \n")
    assert [tuple(each[:2]) for each in read_prompts(None, str(tmp_path / "p.txt"))] == [
        (f"{tmp_path}/p.txt:1", "first"),
        (f"{tmp_path}/p.txt:3", "second "),
    ]
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "a"}}\n"b"\n{TALKS[0]}\n')
    found = read_prompts(None, str(tmp_path / "p.jsonl"))
    assert [each.text for each in found] == ["a", "b", "yo"]
    assert [each["role"] for each in found[2].messages] == ["system", "user", "assistant"]
    assert read_prompts("x", None)[0].text == "x"
    for given in ((None, None), ("x", "y"), (None, str(tmp_path))):
        refused(read_prompts, *given)


def test_parquet_rows_are_those_of_jsonl(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": "a", "prompt": None, "completion": None}, {"text": None, "prompt": "b", "completion": "c"}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    found = rows_of(tmp_path / "x.parquet")
    assert [(row.kind, row.values) for row in found] == [
        ("text", {"text": "a"}),
        ("prompt/completion", {"prompt": "b", "completion": "c"}),
    ]
    assert found[1].place.endswith("x.parquet: row 2")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    assert "is not a whole parquet file" in refused(rows_of, tmp_path / "cut.parquet")[0]
    parquet.write_table(arrow.Table.from_pylist([{"body": 1}]), tmp_path / "y.parquet")
    assert refused(rows_of, tmp_path / "y.parquet")[0].endswith("its columns: body")


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    message, hint = refused(rows_of, tmp_path / "x.parquet")
    assert "pyarrow" in message and hint == "pip install 'zerocli[parquet]'"


def test_binary_files_are_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"text" * 1000 + b"\0more")
    assert refused(open_source, str(tmp_path / "x.txt"))[0].endswith(
        "x.txt: has a NUL byte at offset 4000: it is a binary file, not text"
    )
    (tmp_path / "x.txt").write_bytes("caf\xe9 au lait".encode("latin1"))
    message, hint = refused(open_source, str(tmp_path / "x.txt"))
    assert message.endswith("x.txt: byte 0xe9 at offset 3 is not UTF-8") and "iconv -f latin1" in hint
    (tmp_path / "x.txt").write_bytes("caf\xe9".encode("utf-16"))
    assert "iconv -f utf-16" in refused(open_source, str(tmp_path / "x.txt"))[1]
    (tmp_path / "x.txt").write_bytes("caf\xe9".encode()[:-1])
    assert "byte 0xc3 at offset 3" in refused(open_source, str(tmp_path / "x.txt"))[0]


@pytest.mark.parametrize("nbytes", [1, 3, 7, 1000])
def test_pieces_of_text_are_whole_lines_and_lose_nothing(nbytes):
    text = "a bb\nccc dddd\n\né€𝄞 é\n" + "x y" * 30 + "\nend"
    pieces = list(text_pieces("x", np.frombuffer(text.encode(), np.uint8), nbytes))
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") or piece == pieces[-1] or len(piece) > 16 * nbytes for piece in pieces)


def test_text_that_is_binary_further_on_is_refused_at_its_offset():
    data = np.frombuffer("é".encode() * 10 + b"\xff", np.uint8)
    with pytest.raises(UserError, match="byte 0xff at offset 20 is not UTF-8"):
        list(text_pieces("x", data, 3))
