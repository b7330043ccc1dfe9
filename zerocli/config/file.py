"""Read config sources (bundled names, TOML, YAML, Hugging Face folders, JSON, factories) and locate each key in them.

This module does not know which keys exist: a `Document` is nested values and places, checked by `zerocli.config`.
"""

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerocli.config import hub, hugging, quantized
from zerocli.config.hints import other_json, unknown_source
from zerocli.config.yaml import SUFFIXES as YAML
from zerocli.config.yaml import read_yaml
from zerocli.errors import ConfigError, Problem, closest, quote
from zerocli.regular_files import MAX_CONFIG_NBYTES

FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

# One token of TOML or JSON: strings of four kinds, a comment, a line end, punctuation, a bare word.
_TOKEN = re.compile(
    r'"{3}(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\''
    r'|\#[^\n]*|\n|[\[\]{}=:,.]|[^\s\[\]{}=:,."\'\#]+',
    re.DOTALL,
)


@dataclass
class Document:
    """The contents of a source: `values` by section and key, `places` by dotted key (`model.layers` -> `my.toml:3`)."""

    name: str
    values: Mapping[str, object]
    places: dict[str, str] = field(default_factory=dict)
    positions: int = 0  # the longest sequence the model supports; 0 = unknown
    problems: list[Problem] = field(default_factory=list)
    hint: str = ""
    """The next command, if there are problems."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log."""
    unsupported: list[Problem] = field(default_factory=list)
    """What our own code does not compute of a Hugging Face config; the code of `transformers` may."""
    other: "Document | None" = None
    """Of a Hugging Face config: the same for the code of `transformers`, which may build it instead of ours."""


def read(source: str) -> Document:
    """Return the document of `source`; raise ConfigError, with the place, if it cannot be read."""
    if source.endswith(".toml"):
        return read_toml(source)
    if source.endswith(".json"):
        return read_json(source)
    names = {name: path for name, _, path in bundled()}
    if source in names:
        return read_toml(names[source], shown=f"{source}.toml")
    if FACTORY.fullmatch(source):
        document = Document(source.rpartition(":")[2], {"model": {"factory": source}})
        document.places["model.factory"] = source
        return document
    if os.path.isfile(os.path.join(source, hub.CONFIG)):
        return read_folder(source)
    if source.endswith(YAML) and os.path.isfile(source):
        values, places = read_yaml(source, _read_text(source))
        return Document(os.path.basename(source).rpartition(".")[0], values, places)
    raise unknown_source(source, list(names))


def bundled() -> list[tuple[str, str, str]]:
    """Return (name, first sentence, path) of each bundled config, by name."""
    try:
        # Located by path, not imported: the working directory may contain a package of the same name.
        folder = Path(__file__).parents[2] / "configs"
        files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    except OSError:
        return []
    return [(file.name.removesuffix(".toml"), _first_sentence(file.read_text("utf-8")), str(file)) for file in files]


def _first_sentence(text: str) -> str:
    # In the opening comment the first line is the command to run; the rest describes the config.
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("#").strip())
    said = " ".join(comment[1:] or comment).strip()
    return re.split(r"(?<=[.!?])\s", said, maxsplit=1)[0]


def _read_text(path: str) -> str:
    """Return the text of a regular UTF-8 file; raise ConfigError with the reason if it cannot be read."""

    def refuse(fact: str, meant: str = "") -> ConfigError:
        return ConfigError([Problem(path, fact, meant)], hint="zerocli configs ls")

    if os.path.isdir(path):
        raise refuse("is a folder, not a config file")
    if not os.path.exists(path):
        stem = os.path.basename(path).rpartition(".")[0]
        raise refuse("no such file", closest(stem, [name for name, _, _ in bundled()]))
    if not os.path.isfile(path):
        raise refuse("is not a regular file")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_NBYTES + 1)
    except OSError as error:
        raise refuse(f"cannot be read ({error.strerror})") from None
    if len(data) > MAX_CONFIG_NBYTES:
        raise refuse(f"has {os.path.getsize(path)} bytes; no config has more than {MAX_CONFIG_NBYTES}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem(f"{path}:{line}", f"is not UTF-8: byte {data[error.start]:#04x}")]) from None


def read_toml(path: str, shown: str = "") -> Document:
    """Return the tables of a TOML file; errors name it as `shown`."""
    shown = shown or path
    text = _read_text(path)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fact, place = str(error), f"{shown}:{len(text.splitlines()) or 1}"
        if found := re.search(r" \(at line (\d+), column (\d+)\)$", fact):
            fact, place = fact[: found.start()], f"{shown}:{found[1]}:{found[2]}"
        raise ConfigError([Problem(place, f"TOML syntax: {fact}")]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(shown, f"cannot be read as TOML: {_reason(error)}")]) from None
    stem = os.path.basename(path).removesuffix(".toml")
    return Document(stem, values, _places(text, "=", shown))


def read_json(path: str) -> Document:
    """Return the sections of a run's config.json, or a Hugging Face config.json as a model section."""
    values, places, stem = read_values(path)
    if refused := other_json(path, values):
        raise refused
    if _is_of_run(values):
        return Document(stem, values, places)
    return _either_code(stem, values, places, path)


def read_folder(folder: str) -> Document:
    """Return the model of a Hugging Face folder; training starts from the weights in it."""
    path = os.path.join(folder, hub.CONFIG)
    values, places, stem = read_values(path)
    if _is_of_run(values):
        fact = "is the folder of a run, not of a model"
        raise ConfigError([Problem(folder, fact, path)], hint=f"zerocli train --resume --run-dir {folder}")
    if hub.has_weights(folder):
        quantized.refuse(folder, values)
    document = _either_code(stem, values, places, path)
    if not hub.has_weights(folder):
        fact = "has a config.json and no weights (.safetensors)"
        raise ConfigError([Problem(folder, fact)], hint=f"{path} as CONFIG starts from random weights")
    for each in (document, document.other):
        if each is not None:
            each.values = {**each.values, "train": {"init_from": os.path.abspath(folder)}}
            each.places["train.init_from"] = folder
    return document


def _is_of_run(values: dict[str, Any]) -> bool:
    sections = ("model", "train", "data", "optimizer", "zero")
    return "model_type" not in values and any(isinstance(values.get(name), dict) for name in sections)


def _either_code(stem: str, values: dict[str, Any], places: dict[str, str], path: str) -> Document:
    """Return a Hugging Face config for our own code, with why that does not cover it, and for transformers' code."""
    try:
        document = _from_hugging_face(stem, dict(values), dict(places), path)
    except ConfigError as error:
        if not isinstance(values.get("model_type"), str):
            raise
        document = Document(stem, {"model": {}}, unsupported=list(error.problems), hint=error.hint)
    folder = {"folder": hub.folder_of(path)}
    document.values = {**document.values, "model": {**document.values.get("model", {}), **folder}}  # type: ignore[dict-item]
    vocab = hub.size_of(values, "vocab_size")
    model: dict[str, object] = {**folder, "code": "transformers", **({"vocab": vocab} if vocab else {})}
    name = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or str(values["model_type"])
    document.other = Document(name, {"model": model}, {f"model.{key}": path for key in model})
    document.other.positions = hub.size_of(values, *hub.POSITIONS)
    return document


def for_code(document: Document, asked: str) -> Document:
    """Return the document for `model.code`: our own code where `auto` finds that it covers the config exactly.

    So a command gives the same numbers whether or not transformers is installed. Raises ConfigError if the code that
    is asked for cannot build the model.
    """
    if document.other is None or asked not in ("auto", "zerocli", "transformers"):
        return document
    covered = not document.unsupported
    if asked == "zerocli" or covered and asked == "auto":
        if not covered:
            raise ConfigError(document.problems + document.unsupported, hint=document.hint)
        model: Any = document.values["model"]
        document.values = {**document.values, "model": {**model, "code": "zerocli"}}
        return document
    if not hub.installed():
        place = document.places.get("model.family", document.name)
        problems = document.unsupported or [Problem(place, "model.code=transformers, which is not installed")]
        raise ConfigError(problems, hint="pip install 'zerocli[hf]': transformers has code for other models")
    return document.other


def read_values(path: str) -> tuple[dict[str, Any], dict[str, str], str]:
    """Return the object in a JSON file, the places of its keys, and the name of its folder."""
    text = _read_text(path)
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([Problem(f"{path}:{error.lineno}:{error.colno}", f"JSON syntax: {error.msg}")]) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(path, f"cannot be read as JSON: {_reason(error)}")]) from None
    if not isinstance(values, dict):
        raise ConfigError([Problem(path, "holds no JSON object")])
    places = _places(text, ":", path)
    return values, places, os.path.basename(os.path.dirname(os.path.abspath(path)))


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def _places(text: str, separator: str, shown: str) -> dict[str, str]:
    return {".".join(key): f"{shown}:{line}" for key, line in key_lines(text, separator).items()}


def key_lines(text: str, separator: str = "=") -> dict[tuple[str, ...], int]:
    """Return the line of every key and table of a valid TOML (`=`) or JSON (`:`) text, nested ones too."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    current: tuple[str, ...] = ()  # the key whose value is being read
    frames: list[tuple[str, tuple[str, ...]]] = []  # open brackets of that value, each with its path
    key: list[str] | None = [] if separator == "=" else None  # the parts of the key being read; None within a value
    header = False
    line = start = 1
    for token in _TOKEN.findall(text):
        if token == "\n" and not frames and separator == "=":
            key, header = [], False
        elif token == "[" and key == [] and not frames:
            header = True
        elif token == "]" and header:
            table = tuple(key or ())
            found.setdefault(table, start)
        elif token in ("[", "{"):
            frames.append((token, current))
            key = [] if token == "{" else None
        elif token in ("]", "}"):
            if frames:
                frames.pop()
            key = None
        elif token == separator and key is not None:
            current = (frames[-1][1] if frames else table) + tuple(key)
            found.setdefault(current, start)
            key = None
        elif token == "," and frames and frames[-1][0] == "{":
            key = []
        elif key is not None and token[0] not in "#\n=:,.":
            start = start if key else line
            key.append(_unquote(token))
        line += token.count("\n")
    return found


def _unquote(token: str) -> str:
    if token[0] == '"':
        try:
            return str(json.loads(token))
        except ValueError:
            return token.strip('"')
    return token.strip("'")


def parse_set(text: str) -> tuple[str, object, str]:
    """Return (dotted key, value, the value's text) of `section.key=value`; raise ValueError without a `=`.

    The value is parsed as TOML (`3`, `true`, `[0.9, 0.95]`); anything else is taken as plain text.
    """
    key, equals, raw = text.partition("=")
    if not equals:
        raise ValueError("has no value: write section.key=value")
    key, raw = key.strip(), raw.strip()
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return key, raw, raw
    # A line end in the text could add further keys.
    return key, parsed["value"] if len(parsed) == 1 else raw, raw


def _from_hugging_face(stem: str, values: dict[str, Any], places: dict[str, str], path: str) -> Document:
    """Return the model of a config.json of a built-in family; `zerocli.config.hugging` says what becomes of a key."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in hugging.TYPES:
        if family is None:
            fact = "holds neither a model_type (Hugging Face) nor a model section (a run's config.json)"
        else:
            fact = f"model_type {quote(family)} is not built in: {', '.join(hugging.TYPES)} are"
        place = places.get("model_type", path)
        raise ConfigError([Problem(place, fact)], hint="zerocli train package.module:factory")
    made = hugging.translate(values, places, path)
    document = Document(re.sub(r"[^\w.-]+", "-", stem).strip("-.") or family, {"model": made.model}, made.places)
    document.positions = made.positions
    document.problems, document.unsupported = made.problems, made.unsupported
    if made.unsupported:
        document.hint = "--set model.code=transformers, which runs the model with the code of transformers"
    if made.unknown:
        document.notes.append(f"{path}: not known, and not used: {', '.join(made.unknown)}")
    return document
