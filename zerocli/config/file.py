"""Read config sources (bundled names, TOML, Hugging Face JSON, factories) and locate each key in them.

This module does not know which keys exist: a `Document` is nested values and places, checked by `zerocli.config`.
"""

import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    raise _unknown(source, list(names))


def _unknown(source: str, names: list[str]) -> ConfigError:
    if source.endswith((".yaml", ".yml")):
        return _yaml(source)
    if os.path.isdir(source):
        inner = os.path.join(source, "config.json")
        meant = inner if os.path.isfile(inner) else ""
        return ConfigError([Problem(source, "is a folder, not a config file", meant)], hint="zerocli configs ls")
    if os.path.isfile(source):
        return ConfigError([Problem(source, "is neither a .toml nor a .json file")], hint="zerocli configs ls")
    known = f"no bundled config has this name; there are {', '.join(names) or 'none'}"
    return ConfigError([Problem(source or '""', known, closest(source, names))], hint="zerocli configs ls")


def _yaml(path: str) -> ConfigError:
    """Return the error for a YAML file, with its keys as TOML if it is as simple as a config of ours."""
    if not os.path.isfile(path):
        return ConfigError([Problem(path, "no such file; configs are TOML, not YAML")], hint="zerocli configs ls")
    target = f"{path.rpartition('.')[0]}.toml"
    lines = [f"  {line}" for line in as_toml(_read_text(path))]
    fact = f"is YAML, and configs are TOML; as {target} it is:" if lines else "is YAML, and configs are TOML"
    return ConfigError([Problem(path, "\n".join([fact, *lines]))], hint=f"zerocli train {target}")


_YAML_LINE = re.compile(r"( *)([\w-]+) *:(?: +(.*?))? *")


def as_toml(text: str) -> list[str]:
    """Return YAML of sections with plain keys as lines of TOML; nothing if it holds anything else."""
    made: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if not line or line == "---":
            continue
        found = _YAML_LINE.fullmatch(line)
        if found is None:
            return []
        indent, key, value = found.groups()
        if value is None and not indent:
            made.append(f"[{key}]")
        elif value is None:
            return []
        else:
            try:
                tomllib.loads(f"value = {value}")
            except ValueError:
                value = json.dumps(value.strip("'"))
            made.append(f"{key} = {value}")
    return made


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
    if "model_type" not in values and isinstance(values.get("model"), dict):
        return Document(stem, values, places)
    return _from_hugging_face(stem, values, places, path)


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


# Hugging Face key, our key, and the default in Hugging Face's config class: files omit defaults.
_HUGGING_FACE: dict[str, list[tuple[str, str, object]]] = {
    "gpt2": [
        ("vocab_size", "vocab", 50257),
        ("n_layer", "layers", 12),
        ("n_embd", "hidden", 768),
        ("n_head", "heads", 12),
        ("n_inner", "mlp_hidden", 0),
        ("layer_norm_epsilon", "norm_eps", 1e-5),
        ("tie_word_embeddings", "tie", True),
    ],
    "llama": [
        ("vocab_size", "vocab", 32000),
        ("num_hidden_layers", "layers", 32),
        ("hidden_size", "hidden", 4096),
        ("num_attention_heads", "heads", 32),
        ("num_key_value_heads", "kv_heads", 0),
        ("intermediate_size", "mlp_hidden", 11008),
        ("rms_norm_eps", "norm_eps", 1e-6),
        ("tie_word_embeddings", "tie", False),
        ("rope_theta", "rope_theta", 10000.0),
        ("attention_bias", "bias", False),
    ],
}
_POSITIONS = {"gpt2": ("n_positions", 1024), "llama": ("max_position_embeddings", 2048)}


def _from_hugging_face(stem: str, values: dict[str, Any], places: dict[str, str], path: str) -> Document:
    """Return the model's shape without dropout and rope scaling, which change no size."""
    family = values.get("model_type")
    if not isinstance(family, str) or family not in _HUGGING_FACE:
        if family is None:
            fact = "holds neither a model_type (Hugging Face) nor a model section (a run's config.json)"
        else:
            fact = f"model_type {quote(family)} is not built in: gpt2 and llama are"
        place = places.get("model_type", path)
        raise ConfigError([Problem(place, fact)], hint="zerocli train package.module:factory")

    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" not in values:
        values = {**values, "rope_theta": rope.get("rope_theta")}
        places.setdefault("rope_theta", places.get("rope_parameters.rope_theta", path))
    model: dict[str, object] = {"family": family}
    document = Document(re.sub(r"[^\w.-]+", "-", stem).strip("-.") or family, {"model": model})
    document.places["model.family"] = places["model_type"]
    for theirs, ours, default in _HUGGING_FACE[family]:
        given = values.get(theirs)
        model[ours] = default if given is None else given
        document.places[f"model.{ours}"] = places.get(theirs, path)

    name, default_positions = _POSITIONS[family]
    positions = values.get(name, default_positions)
    if isinstance(positions, int) and not isinstance(positions, bool) and positions > 0:
        document.positions = positions
    else:
        document.problems.append(Problem(places.get(name, path), f"{name} {quote(positions)} is not a whole number"))
    document.problems += [
        Problem(places.get(key, path), f"{key} {quote(values[key])} is not what the built-in {family} computes")
        for key, computes in _computes(values, model, family).items()
        if values.get(key) is not None and not computes(values[key])
    ]
    return document


def _computes(values: dict[str, Any], model: dict[str, Any], family: str) -> dict[str, Callable[[object], bool]]:
    if family == "gpt2":
        return {"activation_function": lambda name: str(name).startswith("gelu")}
    hidden, heads = model["hidden"], model["heads"]
    return {
        "hidden_act": lambda name: name in ("silu", "swish"),
        "mlp_bias": lambda bias: bias == values.get("attention_bias", False),
        # The built-in models support only a head size of hidden / heads.
        "head_dim": lambda size: not all(isinstance(n, int) for n in (size, heads, hidden)) or size * heads == hidden,
    }
