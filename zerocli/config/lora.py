"""What `--lora` says: a rank, a rank and targets, or a folder of adapters to go on from. (No torch.)"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from zerocli.config.schema import ALL_LINEAR, MAX_LORA_RANK, LoraConfig
from zerocli.errors import UserError, quote
from zerocli.regular_files import MAX_CONFIG_NBYTES, read_regular

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_EXAMPLE = "--lora 16, or --lora 16:q_proj,v_proj, or a folder with an adapter_config.json"
PROJECTION_NAMES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "wq"),
    "k": ("k_proj", "wk"),
    "v": ("v_proj", "wv"),
    "qkv": ("c_attn", "qkv_proj", "query_key_value"),
    "out": ("o_proj", "out_proj", "attn.c_proj", "self_attention.dense", "attention.dense", "wo"),
    "gate": ("gate_proj",),
    "up": ("up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h"),
    "gate_up": ("gate_up_proj",),
    "down": ("down_proj", "mlp.c_proj", "fc2", "fc_out", "dense_4h_to_h"),
}
"""What the projections of a decoder are called in models, by the short names that are targets too."""
# What peft can do and we do not: by key, the values that change nothing.
_UNUSED: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "layers_to_transform": (None, []),
    "exclude_modules": (None, [], ""),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
    "velora_config": (None, {}),
    # Others change the base's own weights too, which the folder does not hold.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


def read_lora(text: str) -> dict[str, object]:
    """Return the keys that `--lora TEXT` sets; ValueError if it says none."""
    if os.path.isdir(text) or os.sep in text:
        return _of_folder(text)
    rank, colon, names = text.partition(":")
    if not rank.strip().isdigit() or not 1 <= int(rank) <= MAX_LORA_RANK:
        raise ValueError(f"{quote(rank)} is not a rank from 1 to {MAX_LORA_RANK}: {_EXAMPLE}")
    targets = [name.strip() for name in names.split(",") if name.strip()]
    if colon and not targets:
        raise ValueError(f"{quote(text)} names no layers after the colon: {_EXAMPLE}")
    return {"lora.rank": int(rank)} | ({"lora.targets": targets} if targets else {})


def _of_folder(folder: str) -> dict[str, object]:
    """Return the keys of a folder of adapters; ValueError if there is none that can be gone on from."""
    try:
        values = json.loads(read_regular(os.path.join(folder, ADAPTER_CONFIG), MAX_CONFIG_NBYTES))
    except (OSError, UserError):
        raise ValueError(f"{folder}: has no {ADAPTER_CONFIG}: {_EXAMPLE}") from None
    except ValueError:
        raise ValueError(f"{folder}: its {ADAPTER_CONFIG} is not JSON") from None
    if not isinstance(values, Mapping) or values.get("peft_type", "LORA") != "LORA":
        kind = quote(values.get("peft_type")) if isinstance(values, Mapping) else "no table"
        raise ValueError(f"{folder}: its adapters are {kind}, and LORA is what can be gone on from")
    for key, plain in _UNUSED.items():
        if values.get(key) not in plain:
            raise ValueError(f"{folder}: {key} {quote(values[key])} is not supported")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(values.get(key) or {}, Mapping):
            raise ValueError(f"{folder}: {key} {quote(values[key])} is no table")
    packed = sorted(values.get("target_parameters") or ())
    targets = values.get("target_modules") or ([] if packed else ALL_LINEAR)
    return {
        "lora.rank": values.get("r", 8),
        "lora.targets": [*([targets] if isinstance(targets, str) else sorted(targets)), *packed],
        "lora.alpha": values.get("lora_alpha", 8),
        "lora.rank_pattern": _patterns(values.get("rank_pattern")),
        "lora.alpha_pattern": _patterns(values.get("alpha_pattern")),
        "lora.dropout": values.get("lora_dropout", 0.0),
        "lora.rslora": bool(values.get("use_rslora")),
        "lora.dora": bool(values.get("use_dora")),
        "lora.save_modules": values.get("modules_to_save") or [],
        "lora.start": os.path.abspath(folder),
    }


def _patterns(found: Mapping[str, Any] | None) -> list[str]:
    return [f"{pattern}={number}" for pattern, number in (found or {}).items()]


def table_of(patterns: Sequence[str]) -> dict[str, float]:
    """Return what `rank_pattern` or `alpha_pattern` says as peft has it: by pattern, the rank or alpha."""
    split = (each.rpartition("=") for each in patterns)
    return {pattern: int(number) if number.isdigit() else float(number) for pattern, _, number in split}


def pattern_problem(key: str, patterns: Sequence[str]) -> str:
    """Return what is wrong with `rank_pattern` or `alpha_pattern`; empty if nothing is."""
    for each in patterns:
        pattern, _, number = each.rpartition("=")
        try:
            re.compile(pattern)
            valid = 1 <= int(number) <= MAX_LORA_RANK if key == "rank_pattern" else 0 < float(number) < math.inf
        except re.error as error:
            return f"{key}: {quote(pattern)} is not a regular expression: {error}"
        except ValueError:
            valid = False
        if not pattern or not valid:
            return f"{key}: {quote(each)} is not NAME={'RANK' if key == 'rank_pattern' else 'ALPHA'}"
    return ""


def fitting(patterns: Sequence[str], name: str) -> str:
    """Return the first of the patterns that fits a layer of this name, as peft decides it; empty if none does."""
    return next((each for each in table_of(patterns) if re.match(rf"(.*\.)?({each})$", name)), "")


def rank_of(asked: LoraConfig, name: str) -> int:
    """Return the rank of the adapters of a layer, or of a packed tensor, by peft's name of it."""
    return int(table_of(asked.rank_pattern).get(fitting(asked.rank_pattern, name), asked.rank))


def factor_of(asked: LoraConfig, name: str) -> float:
    """Return the factor of what these adapters add."""
    alpha = table_of(asked.alpha_pattern).get(fitting(asked.alpha_pattern, name), asked.alpha or 2 * asked.rank)
    rank = rank_of(asked, name)
    return alpha / (rank**0.5 if asked.rslora else rank)


def matches(targets: tuple[str, ...], *names: str) -> bool:
    """Return whether a layer that has these names is a target: by the end of a name, or by a regular expression."""
    for target in targets:
        if target == ALL_LINEAR:
            return True
        plain = re.fullmatch(r"[\w.]+", target)
        ends = (target, *PROJECTION_NAMES.get(target, ()))
        for name in names:
            if any(name == end or name.endswith(f".{end}") for end in ends) if plain else re.fullmatch(target, name):
                return True
    return False
