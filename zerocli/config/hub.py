"""Hugging Face folders and configs, as data: what lies in a folder, and a `config.json` as `transformers` reads it.

No code outside the installed packages runs, and nothing is downloaded: keys that name code, kernels or other files
(`HELD_BACK`) are left out, and the hub is offline while a config is read or a model is built. (No torch.)
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerocli.config import quantized
from zerocli.console import quoted
from zerocli.errors import ConfigError, Problem, UserError, closest, quote
from zerocli.regular_files import MAX_CONFIG_NBYTES

HELD_BACK = (
    *("auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "transformers_version"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    *("quantization_config", "use_pretrained_backbone", "use_kernels", "dtype", "torch_dtype"),
)
"""Keys that are not given to transformers: they name code or files, or say how weights are stored."""
MAX_SIZE = 2**40
"""Upper bound of every dimension; a larger value is a mistake."""
MAX_HEADER_NBYTES = 100 << 20
"""No header of a safetensors file is larger."""
MAX_LAYERS = 100_000
CONFIG = "config.json"
OTHER_NAMES: dict[str, dict[str, str]] = {
    **dict.fromkeys(
        ("gpt2", "gptj", "codegen"),
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
    "bloom": {"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    "falcon": {"n_embed": "hidden_size"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
    **dict.fromkeys(("gpt_oss", "mixtral"), {"num_experts": "num_local_experts"}),
    "qwen3_moe": {"num_local_experts": "num_experts"},
}
"""By family: other names that transformers takes for a field, and the field."""
REINSTALL = "pip uninstall -y transformers && pip install 'zerocli[hf]'"
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "max_seq_len")


def installed() -> bool:
    """Return whether `transformers` is installed; does not import it, so it may still be broken (see `offline`)."""
    return importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True)
class ConfigFile:
    """The values of a `config.json` and the places of its keys."""

    values: Mapping[str, Any]
    places: Mapping[str, str]
    path: str


def config_path(folder: str) -> str:
    """Return the config file of `model.folder`, which names the file itself if it is not called config.json."""
    return os.path.join(folder, CONFIG) if os.path.isdir(folder) or not folder.endswith(".json") else folder


def folder_of(path: str) -> str:
    """Return `model.folder` of a config file: the folder that holds a config.json, or a file of another name."""
    path = os.path.abspath(path)
    return os.path.dirname(path) if os.path.basename(path) == CONFIG else path


def is_model(folder: str) -> bool:
    """Return whether a folder holds a Hugging Face config.json; a run's config.json has no model_type."""
    try:
        with open(os.path.join(folder, CONFIG), encoding="utf-8-sig") as file:
            return "model_type" in json.loads(file.read(MAX_CONFIG_NBYTES))
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def has_weights(folder: str) -> bool:
    """Return whether a folder holds safetensors; raise ConfigError if it holds only weights of another format."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise ConfigError([Problem(folder, f"cannot be read ({error.strerror})")]) from None
    if any(name.endswith(".safetensors") for name in names):
        return True
    old = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt")) and name != "training_args.bin"]
    if old:
        raise ConfigError(
            [Problem(folder, f"has no .safetensors; {old[0]} may hold code and is not loaded")],
            hint=conversion(folder),
        )
    return False


def stored(folder: str) -> dict[str, int]:
    """Return the parameters in a folder's safetensors by dtype (`BF16`); of unreadable files none."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(filter(Path.is_file, Path(folder).glob("*.safetensors"))):  # reading a pipe would wait
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size)) if size <= MAX_HEADER_NBYTES else {}
            for name, entry in header.items():
                if name != "__metadata__":
                    found[name] = (str(entry["dtype"]), tuple(map(int, entry["shape"])))
    return quantized.parameters(found)


def missing_files(folder: str) -> list[str]:
    """Return the files of weights that a folder's index names and that are not there."""
    return [name for name in _indexed(folder) if not os.path.isfile(os.path.join(folder, name))]


def weight_files(folder: str) -> list[Path]:
    """Return the files that a folder's weights are read from: those of its index, or else the one file, or else all."""
    names = _indexed(folder) or ["model.safetensors"]
    found = [path for path in (Path(folder, name) for name in names) if path.is_file()]
    return found or sorted(filter(Path.is_file, Path(folder).glob("*.safetensors")))


def _indexed(folder: str) -> list[str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        with open(os.path.join(folder, "model.safetensors.index.json"), "rb") as file:
            return sorted({str(place) for place in json.loads(file.read(MAX_HEADER_NBYTES))["weight_map"].values()})
    return []


def conversion(folder: str) -> str:
    """Return the command that writes a folder's weights as safetensors."""
    out = os.path.abspath(folder).rstrip("/") + "-safetensors"
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; i, o = sys.argv[1:]; "
        "M.from_pretrained(i, dtype='auto').save_pretrained(o); T.from_pretrained(i).save_pretrained(o)"
    )
    return f'python -c "{code}" {quoted(folder)} {quoted(out)}'


def by_own_names(values: Mapping[str, Any], places: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a config's values and their places by the own names of its family's fields.

    As in transformers, a value under another name replaces the one under the own name.
    """
    family = values.get("model_type")
    known = OTHER_NAMES.get(family, {}) if isinstance(family, str) else {}
    own, found = dict(values), dict(places)
    for other, name in known.items():
        if own.get(other) is not None:
            own[name] = own.pop(other)
            found[name] = found.get(other, found.get(name, ""))
    return own, {name: place for name, place in found.items() if place}


def size_of(values: Mapping[str, Any], *names: str) -> int:
    """Return the first of these whole numbers that a config has, in its text part too; 0 if there is none."""
    inner = values.get("text_config")
    for table in (values, inner if isinstance(inner, Mapping) else {}):
        for name in names:
            number = table.get(name)
            if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= MAX_SIZE:
                return number
    return 0


def read_config(file: ConfigFile) -> Any:
    """Return the config of a file as transformers reads it; ConfigError if it knows no such family."""
    values, places, path = file.values, file.places, file.path
    family = values.get("model_type")
    place = places.get("model_type", path)
    with offline():
        with importing():
            from transformers import CONFIG_MAPPING, AutoConfig

        known = list(CONFIG_MAPPING.keys())
        if family not in known:
            fact = f"model_type {quote(family)} is not one of the {len(known)} that transformers has"
            if "auto_map" in values:
                fact += "; auto_map names code that comes with the model, which is not run"
            hint = "zerocli fit package.module:factory --trace, with a function that builds the model"
            meant = closest(family, known) if isinstance(family, str) else ""
            raise ConfigError([Problem(place, fact, meant)], hint=hint)
        kept = _kept(values)
        if problems := list(_too_large(kept, places, path)):
            raise ConfigError(problems)
        kept.pop("model_type")
        try:
            return AutoConfig.for_model(family, **kept)
        except Exception as error:  # of any kind: the family's own checks
            raise ConfigError([Problem(path, f"transformers refuses it: {first_line(error)}")]) from error


def max_positions(config: Any) -> int:
    """Return the longest sequence that the model supports; 0 if its config does not say."""
    number = getattr(config.get_text_config(), "max_position_embeddings", 0)
    return number if isinstance(number, int) and number > 0 else 0


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without `HELD_BACK`, at any depth."""
    return {
        key: _kept(value) if isinstance(value, dict) else value for key, value in values.items() if key not in HELD_BACK
    }


def _too_large(values: Mapping[str, Any], places: Mapping[str, str], path: str) -> Iterator[Problem]:
    """Yield a problem for each size that no model has: its modules would never be built."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _too_large(value, places, path)
        elif isinstance(value, int) and not isinstance(value, bool):
            most = MAX_LAYERS if "layer" in key or "experts" in key else MAX_SIZE
            if value > most and "token" not in key:
                yield Problem(places.get(key, path), f"{key} {quote(value)} is more than {most}")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """While the body runs, the Hugging Face hub is not asked, and transformers prints no warnings.

    UserError if transformers is installed but cannot be imported.
    """
    with importing():
        constants: Any = importlib.import_module("huggingface_hub.constants")
        logging: Any = importlib.import_module("transformers.utils.logging")
    before, level = constants.HF_HUB_OFFLINE, logging.get_verbosity()
    constants.HF_HUB_OFFLINE = True
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        logging.set_verbosity(level)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """While the body imports transformers, whatever the import raises becomes a UserError."""
    try:
        yield
    except Exception as error:  # of any kind: a package of another version, a broken file
        spec = importlib.util.find_spec("transformers")
        place = f" ({os.path.dirname(spec.origin)})" if spec and spec.origin else ""
        fact = f"transformers is installed{place} but cannot be imported: {type(error).__name__}: {first_line(error)}"
        raise UserError(fact, hint=REINSTALL) from error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
