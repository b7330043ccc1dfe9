"""Checks of a config whose types are right: ranges, and relations between keys."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from zerocli.config.lora import pattern_problem
from zerocli.config.rope import broken_rope
from zerocli.config.schema import FIELDS, Config, LoraConfig, get, short
from zerocli.errors import Problem, WrongValue, closest, quote
from zerocli.layout.ranges import parse_ranges
from zerocli.layout.shards import check_shard_ranks, nearest_divisor

_Found = tuple[tuple[str, ...], *tuple[str, ...]]
"""Keys, and the fact, what was probably meant and the hint of their `Problem`; the last two may be left out."""


def violations(config: Config) -> Iterator[tuple[tuple[str, ...], Problem]]:
    """Yield (the keys involved, the problem) for a config whose types are right: ranges and cross checks."""
    bad = set()
    for key, field in FIELDS.items():
        fact, meant = _law_broken(field, get(config, key))
        if fact:
            bad.add(key)
            yield (key,), Problem(key, f"{short(key)} {fact}", meant)
    sizes = (_cross_checks(config, bad), _tp_checks(config, bad), _shard_checks(config, bad))
    checks = (*sizes, _loop_checks(config), _lora_checks(config))
    for keys, *about in itertools.chain(*checks):
        yield keys, Problem(keys[0], *about)


def _law_broken(field: dataclasses.Field[Any], value: Any) -> tuple[str, str]:
    """Return (the fact, what was probably meant); both are empty if the value obeys the field's law."""
    law = field.metadata
    choices = law.get("choices")
    if choices and value not in choices:
        known = [quote(c).strip('"') for c in choices if c != ""]
        meant = law.get("meant", {}).get(value) or closest(value, known) if isinstance(value, str) else ""
        return f"{quote(value)} is not one of {', '.join(known)}", meant
    if "form" in law and value != field.default and not law["form"].fullmatch(value):
        return f"{quote(value)} is not of the form {law['example']}", ""
    if wrong := [name for name in value if name not in law["each"]] if "each" in law else []:
        return f"{quote(wrong[0])} is not one of {', '.join(law['each'])}", closest(wrong[0], law["each"])
    if field.name == "nvme_path" and "" in value:
        return "has an empty path in it", ""
    for number in value if isinstance(value, tuple) else (value,):
        if "least" in law and number < law["least"]:
            return f"{quote(number)} is below {law['least']}", ""
        if "above" in law and number <= law["above"]:
            return f"{quote(number)} is not above {law['above']}", ""
        if "below" in law and number >= law["below"]:
            return f"{quote(number)} is not below {law['below']}", ""
        if "most" in law and number > law["most"]:
            return f"{quote(number)} is above {law['most']}", ""
    return "", ""


def _cross_checks(config: Config, bad: set[str]) -> Iterator[_Found]:
    """Yield (keys, fact) of each broken relation between keys; keys that are already bad are skipped."""
    model = config.model
    kv_heads = model.kv_heads or model.heads

    def sound(*names: str) -> bool:
        return not bad.intersection(names)

    if model.code == "transformers" and sound("parallel.tp", "model.code"):
        if not model.folder:
            yield ("model.code",), "code transformers needs a Hugging Face folder or config.json as CONFIG"
        if config.parallel.tp > 1:
            yield ("parallel.tp",), f"tp {config.parallel.tp}: models of transformers are not split over ranks"
    if model.external:
        return  # the factory, or the folder's config.json, determines the shape
    if sound("model.heads", "model.hidden", "model.head_dim"):
        size = model.head_dim or model.hidden // model.heads
        if not model.head_dim and model.hidden % model.heads:
            yield ("model.heads", "model.hidden"), f"heads {model.heads} does not divide hidden {model.hidden}"
        elif model.family == "llama" and size % 2:
            rule = "head_dim" if model.head_dim else "hidden / heads"
            fact = f"heads of {size} ({rule}) are odd: rotary embeddings turn pairs"
            yield ("model.heads", "model.hidden", "model.head_dim"), fact
    if sound("model.heads", "model.kv_heads") and model.heads % kv_heads:
        yield ("model.kv_heads", "model.heads"), f"kv_heads {kv_heads} does not divide heads {model.heads}"
    if sound("model.positions", "train.seq") and 0 < model.positions < config.train.seq:
        fact = f"seq {config.train.seq} is beyond the {model.positions} positions the model was made for"
        yield ("train.seq", "model.positions"), fact, "", f"--seq {model.positions}"
    if fact := broken_rope(model.rope_scaling):
        yield ("model.rope_scaling",), f"rope_scaling {fact}"
    if sound("model.window_layers", "model.layers") and model.window_layers:
        last = max(parse_ranges(model.window_layers))
        if last >= model.layers:
            yield ("model.window_layers", "model.layers"), f"window_layers {last} is not one of {model.layers} layers"
    if model.family == "gpt2":
        for key in ("head_dim", "qkv_bias", "out_bias", "mlp_bias", "qk_norm", "window", "rope_scaling"):
            if getattr(model, key):
                yield (f"model.{key}", "model.family"), f"{key} is a key of llama: the built-in gpt2 has none"


def _tp_checks(config: Config, bad: set[str]) -> Iterator[_Found]:
    """Yield (keys, fact, nearest valid degree, hint) for each number that the tensor-parallel degree fails to divide.

    The model checks its derived widths itself, when it is split.
    """
    model, tp = config.model, config.parallel.tp
    numbers = {"parallel.ranks": config.parallel.ranks}
    if not model.external:  # else its own code decides the shape
        numbers["model.kv_heads" if model.kv_heads else "model.heads"] = model.kv_heads or model.heads
        numbers["model.mlp_hidden"] = model.mlp_hidden
    numbers = {key: number for key, number in numbers.items() if number and key not in bad}
    if "parallel.tp" not in bad:
        for key, number in numbers.items():
            if number % tp:
                nearest = nearest_divisor(tp, math.gcd(*numbers.values()))
                more = f", or --ranks {-(-number // tp) * tp}" if key == "parallel.ranks" else ""
                fact = f"tp {tp} does not divide {short(key)} {number}"
                yield ("parallel.tp", key), fact, f"tp {nearest}", f"--tp {nearest}{more}"


def _shard_checks(config: Config, bad: set[str]) -> Iterator[_Found]:
    """Yield (keys, fact, nearest number, hint) if groups of ranks do not tile the data-parallel ranks."""
    ranks, tp, shard_ranks = config.parallel.ranks, config.parallel.tp, config.parallel.shard_ranks
    if not bad.intersection(("parallel.ranks", "parallel.tp", "parallel.shard_ranks")) and ranks and ranks % tp == 0:
        try:
            check_shard_ranks(shard_ranks, ranks // tp)
        except WrongValue as error:
            yield ("parallel.shard_ranks", "parallel.ranks"), str(error), "", error.hint


def _lora_checks(config: Config) -> Iterator[_Found]:
    """Yield (keys, fact, what was probably meant) for each key that adapters, or their absence, contradict."""
    lora, default = config.lora, LoraConfig()
    if not lora.rank:
        for name in (each.name for each in dataclasses.fields(LoraConfig)):
            if getattr(lora, name) != getattr(default, name):
                fact = f"{name} is of adapters, and lora.rank is 0: there are none"
                yield (f"lora.{name}",), fact, "--lora 16 beside it"
        return
    for name in ("rank_pattern", "alpha_pattern"):
        if problem := pattern_problem(name, getattr(lora, name)):
            yield (f"lora.{name}",), problem, "", f"--set lora.{name}=down_proj=4"
    if config.parallel.tp > 1:
        fact = f"tp {config.parallel.tp}: adapters are not split over ranks"
        yield ("parallel.tp", "lora.rank"), fact, "tp 1", "--tp 1"
    if config.optimizer.name.lower() == "muon":
        yield ("optimizer.name",), "muon is for whole matrices, not for adapters of low rank", "adamw"
    if config.train.freeze:
        yield ("train.freeze",), "freeze: beside adapters all else is frozen anyway", "one of the two"


def _loop_checks(config: Config) -> Iterator[_Found]:
    """Yield (keys, fact, what was probably meant) for each key of the loop that another key contradicts."""
    train, data = config.train, config.data
    if data.validation and data.split:
        keys = ("data.split", "data.validation")
        yield keys, f"split {data.split:g} and a validation file: the held-out data is one or the other", ""
    for key, value in (("train.patience", train.patience), ("checkpoint.best", config.checkpoint.best)):
        if value and not train.eval_every:
            yield (key, "train.eval_every"), f"{short(key)} needs evaluations", "--eval-every 100 beside it"
    every, keep_every = config.checkpoint.every, config.checkpoint.keep_every
    if keep_every and every != int(every):
        fact = f"keep_every {keep_every} counts steps, and every {every:g} is a share of the run"
        yield ("checkpoint.every", "checkpoint.keep_every"), fact, "every as a number of steps"
    if config.optimizer.schedule == "wsd" and config.optimizer.decay > 1 and config.optimizer.decay % 1:
        yield ("optimizer.decay",), f"decay {config.optimizer.decay:g} is neither a share nor whole steps", ""
