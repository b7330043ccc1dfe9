"""The defaults of `zerocli train`: values for keys that nobody gave, each with its reason. No torch.

A run from a folder of weights is a fine-tuning: its learning rate follows from the model's size, the length of a
sequence from the documents, the length of the run is in passes over the data. All ranks choose the same.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from zerocli.config import Config, hub
from zerocli.config.file import read_values
from zerocli.config.hints import unknown_source
from zerocli.config.schema import get
from zerocli.console import quoted
from zerocli.errors import UserError
from zerocli.layout.sizes import count_of, format_count

SAVE_EVERY, SAVE_SHARE = 1000, 0.25
"""Steps between checkpoints of a run from random weights; share of a fine-tuning between two of them."""
EVAL_SHARE, HELD_OUT, MIN_HELD_OUT = 0.1, 0.05, 10
"""Share of a fine-tuning between evaluations, share of the data that is held out, and the fewest documents of it."""
EVAL_TOKENS = 2**16
"""About as many tokens are evaluated at once, as far as nobody says how many."""
LR, LR_PARAMETERS, MAX_LR = 2e-5, 7e9, 3e-4
"""Full fine-tuning of 7B with AdamW; it falls with the fourth root of the parameters (124M: 5e-5, 70B: 1e-5)."""
LORA_LR, MAX_LORA_LR = 2e-4, 1e-3
"""The same for adapters: ten times as much."""
TOO_HIGH_LR = 30.0
"""A learning rate as many times above that rule is said to be high."""
ADAM = ("adamw", "adam")
GLOBAL_BATCH, MIN_STEPS = 64, 50
"""Sequences of a step; fewer where an epoch would have fewer steps than this."""
MICRO_TOKENS = 8192
"""At most as many tokens per rank and micro-step."""
TEXT_SEQ, SEQ_MULTIPLE = 2048, 64
"""Tokens of a sequence of plain text; sequences for documents are a multiple of the second."""


WAIT_SECONDS = 3600.0
"""How long a rank waits for another one that tokenises, before it does so itself."""


class Default(NamedTuple):
    """A value that nobody gave."""

    key: str
    value: Any
    reason: str

    @property
    def text(self) -> str:
        """The value as `--set` takes it."""
        return f"{self.key}={json.dumps(self.value)}"


class Lengths(NamedTuple):
    """What an epoch of a run is, as far as the defaults ask; all are 0 if it is not documents, or not known."""

    documents: int = 0
    tokens: int = 0
    most: int = 0
    """Nearly all documents (99 %) have at most as many tokens."""


class Plan(NamedTuple):
    """What the defaults depend on beside the config: `fits` tells whether a config fits this machine."""

    ranks: int
    checked: bool = False
    """`--check`: a comparison, which saves nothing."""
    auto: bool = False
    """`--auto` chooses the micro-batch."""
    fits: Callable[[Config], bool] = lambda config: True
    writes: bool = True
    """Whether the tokens of the data may be written beside it: not in a dry run."""


def is_fine_tuning(config: Config) -> bool:
    """Return whether a run starts from the weights of a model's own folder."""
    return bool(config.model.folder and config.train.init_from)


def choose(config: Config, given: frozenset[str], plan: Plan) -> list[Default]:
    """Return the values for keys that are not `given`; UserError if the data cannot be read."""
    if not is_fine_tuning(config):
        made = [] if plan.checked else [Default("checkpoint.every", SAVE_EVERY, "and the last step")]
        made += _evaluated(config)
        return [each for each in made if each.key not in given]
    found = list(_of_optimizer(config))
    if plan.writes:
        lengths = measure(config)
    else:
        with tempfile.TemporaryDirectory() as folder:
            lengths = measure(with_values(config, [Default("data.cache", folder, "")]))
    made = shape(config, given, plan, lengths)
    changed = with_values(config, made)
    found += made
    if not {"train.steps", "train.epochs"} & given:
        found.append(Default("train.epochs", 1.0, "one pass over the data"))
    if not plan.checked:
        found.append(Default("checkpoint.every", SAVE_SHARE, "a share of the run; and the last step"))
    found += _held_out(config, given, lengths)
    changed = with_values(changed, found)
    if not 0 < lengths.tokens * changed.data.split <= EVAL_TOKENS:  # else all of it is evaluated
        found += _evaluated(changed)
    return [each for each in found if each.key not in given]


def _of_optimizer(config: Config) -> Iterator[Default]:
    """Yield what recipes of full fine-tuning, or of adapters, have."""
    usual, most = (LORA_LR, MAX_LORA_LR) if config.lora.rank else (LR, MAX_LR)
    if config.optimizer.name.lower() in ADAM:
        numel = sum(hub.stored(config.train.init_from).values())
        rule = f"{usual:g} x (7B / parameters)^(1/4), at most {most:g}"
        if numel:
            rate = min(most, usual * (LR_PARAMETERS / numel) ** 0.25)
            yield Default("optimizer.lr", float(f"{rate:.1e}"), f"{rule}; of {format_count(numel)}")
        yield Default("optimizer.betas", [0.9, 0.999], "as fine-tuning recipes have them")
    yield Default("optimizer.warmup", 0.03, "a share of the run")
    yield Default("optimizer.weight_decay", 0.0, "the weights are trained already")
    if config.lora.rank:
        yield Default("lora.alpha", 2.0 * config.lora.rank, "twice the rank, as most recipes of adapters have it")
        yield Default("lora.targets", list(config.lora.targets), "all linear layers but the output layer")
        yield Default("lora.dropout", config.lora.dropout, "adapters of few parameters seldom need it")


def shape(config: Config, given: frozenset[str], plan: Plan, lengths: Lengths) -> list[Default]:
    """Return length and number of the sequences of a step of a fine-tuning."""
    made = []
    if "train.seq" not in given:
        made.append(_sequence(config, lengths))
        config = with_values(config, made)
    if {"train.accumulate", "train.global_batch"} & given or ("train.batch" in given and plan.auto):
        return made + ([] if plan.auto else _micro_batch(config, given, plan, GLOBAL_BATCH))
    replicas = max(1, plan.ranks // config.parallel.tp)
    windows = lengths.tokens // config.train.seq if config.data.pack else lengths.documents
    enough = 1 << max(0, (windows // MIN_STEPS).bit_length() - 1)
    wanted = min(GLOBAL_BATCH, enough) if lengths.tokens else GLOBAL_BATCH
    made += [] if plan.auto else _micro_batch(config, given, plan, max(1, wanted // replicas))
    each = replicas * (1 if plan.auto else with_values(config, made).train.batch)
    total = max(1, round(wanted / each)) * each
    few = f", as an epoch has {windows} windows" if wanted < GLOBAL_BATCH else ""
    return [*made, Default("train.global_batch", total, f"sequences per step{few}; the rest is accumulated")]


def _sequence(config: Config, lengths: Lengths) -> Default:
    limit = config.model.positions or _positions(config)
    bound = f", at most the model's {limit}" if limit else ""
    if not lengths.documents:
        return Default("train.seq", min(limit or TEXT_SEQ, TEXT_SEQ), f"as for plain text{bound}")
    wanted = -(-lengths.most // SEQ_MULTIPLE) * SEQ_MULTIPLE
    return Default("train.seq", min(limit or wanted, wanted), f"99 % of documents have up to {lengths.most}{bound}")


def _positions(config: Config) -> int:
    values, _, _ = read_values(hub.config_path(config.model.folder))
    return hub.size_of(values, *hub.POSITIONS)


def _micro_batch(config: Config, given: frozenset[str], plan: Plan, most: int) -> list[Default]:
    """Return the sequences per rank and micro-step: a power of two, the largest of at most `MICRO_TOKENS` that fits."""
    if "train.batch" in given:
        return []
    if config.train.global_batch:
        most = max(1, config.train.global_batch // max(1, plan.ranks // config.parallel.tp))
    batch = 1
    while 2 * batch <= most and 2 * batch * config.train.seq <= MICRO_TOKENS:
        batch *= 2
    while config.train.global_batch and most % batch:
        batch //= 2
    why = f"at most {MICRO_TOKENS} tokens per rank and micro-step"
    while batch > 1 and not plan.fits(with_values(config, [Default("train.batch", batch, "")])):
        batch //= 2
        why = "the most that fits"
    return [Default("train.batch", batch, why)]


def _held_out(config: Config, given: frozenset[str], lengths: Lengths) -> list[Default]:
    if {"train.eval_every", "data.split"} & given and not config.data.split:
        return []
    if not config.data.validation and not config.data.split and lengths.documents * HELD_OUT < MIN_HELD_OUT:
        return []
    made = [Default("train.eval_every", EVAL_SHARE, "a share of the run")]
    if not config.data.validation:
        made.append(Default("data.split", HELD_OUT, "held out; data.split=0 trains on all of the data"))
    return made


def _evaluated(config: Config) -> list[Default]:
    """Return how much is evaluated at once, if that is done every some steps."""
    if not config.train.eval_every:
        return []
    number = max(1, EVAL_TOKENS // (config.train.batch * config.train.seq))
    return [Default("train.eval_batches", number, f"about {EVAL_TOKENS:,} tokens; 0 is all held-out data")]


def with_values(config: Config, values: list[Default]) -> Config:
    return config.with_values({key: tuple(value) if isinstance(value, list) else value for key, value, _ in values})


def measure(config: Config) -> Lengths:
    """Return the lengths of the documents that a run trains on; tokenises them, once, as the run itself would."""
    import numpy as np

    from zerocli.data.cache import ALONE
    from zerocli.data.encoder import find_tokenizer, open_encoder
    from zerocli.data.files import DOCUMENTS, find_files, readable
    from zerocli.data.preview import split_weight
    from zerocli.data.sources import cache_name, tokenised

    lengths, documents, tokens = [], 0.0, 0.0
    for path, weight in [split_weight(each) for each in config.data.mix] or [(config.data.path, 1.0)]:
        alone = config.with_values({"data.path": path, "data.mix": ()})
        with readable(path):
            form, files = find_files(path)
            if form not in DOCUMENTS:
                return Lengths()
            encoder = open_encoder(find_tokenizer(config.data.tokenizer, config.model.folder)[0])
            name = cache_name(alone, form, files, encoder)
            if os.environ.get("LOCAL_RANK", "0") != "0":
                _await(alone, name)
            found = tokenised(alone, form, files, encoder, name, ALONE)
        lengths.append(np.diff(found.ends, prepend=found.begin))
        documents, tokens = documents + weight * len(lengths[-1]), tokens + weight * lengths[-1].sum()
    most = np.quantile(np.concatenate(lengths), 0.99, method="higher")
    return Lengths(round(documents), round(tokens), int(most))


def _await(config: Config, name: str) -> None:
    """Wait until the first rank of this node, which torchrun or SLURM started too, has tokenised the data."""
    from zerocli.data import cache

    deadline = time.monotonic() + WAIT_SECONDS
    while cache.find(cache.folders(config.data.path, config.data.cache), name, verify=False)[0] is None:
        if time.monotonic() > deadline:
            return
        time.sleep(0.2)


def refuse_incomplete(config: Config) -> None:
    """Raise UserError if held-out data is not there, or a fine-tuning lacks data, weights or a tokenizer."""
    if config.data.validation and not os.path.exists(config.data.validation):
        raise UserError(
            f"data.validation {config.data.validation}: no such file or folder",
            hint="--set data.validation=FILE; or --set data.split=0.05, which holds out a part of --data",
        )
    if config.train.init_from and not is_fine_tuning(config):
        _refuse_weights(config.train.init_from)
    if not is_fine_tuning(config):
        return
    folder = quoted(os.path.relpath(config.model.folder))
    if missing := hub.missing_files(config.train.init_from):
        raise UserError(
            f"{folder}: its index names files of weights that are not there: {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else ""),
            hint=f"hf download OWNER/NAME --local-dir {folder}, which gets what is missing",
        )
    if not config.data.path:
        raise UserError(
            f"{folder}: which data? A model from a folder is trained on examples of your own",
            hint=f"zerocli train {folder} --data FILE (.jsonl, .parquet, text or token ids; docs/data.md)",
        )
    from zerocli.data.encoder import find_tokenizer, open_encoder
    from zerocli.data.files import TOKENS, find_files, readable
    from zerocli.data.preview import known_vocab

    with readable(config.data.path):
        form, _ = find_files(config.data.path)
    if form in TOKENS:
        return
    tokenizer, _ = find_tokenizer(config.data.tokenizer, config.model.folder)
    size, vocab = open_encoder(tokenizer).size, known_vocab(config)
    if 0 < vocab < size:
        raise UserError(
            f"{tokenizer}: has {size} token ids, and the model in {folder} has weights for {vocab}",
            hint="the tokenizer.json that belongs to the model: --set data.tokenizer=PATH",
        )
    refuse_bytes(config.data.tokenizer, config.model.folder)


def _refuse_weights(folder: str) -> None:
    """Raise UserError if `--init-from` names no folder with safetensors of a whole model."""
    if not os.path.isdir(folder):
        fact = "is a file, not a folder" if os.path.exists(folder) else "no such folder"
        raise UserError(
            f"--init-from {folder}: {fact}", hint="--init-from with a folder of .safetensors, such as an export"
        )
    if os.path.isfile(os.path.join(folder, "adapter_config.json")):
        error = unknown_source(folder, ())
        raise UserError(f"--init-from {error}", hint=error.hint)
    if not hub.has_weights(folder):
        raise UserError(
            f"--init-from {folder}: has no .safetensors",
            hint=f"zerocli export {quoted(folder)} OUT, then --init-from OUT, if it is a run",
        )


def refuse_bytes(asked: str, folder: str) -> None:
    """Raise UserError if a model's folder has no tokenizer and nobody asks for one: its text would become bytes."""
    from zerocli.data.encoder import BYTES, find_tokenizer

    if not asked and find_tokenizer(asked, folder)[0] == BYTES:
        raise UserError(
            f"{quoted(os.path.relpath(folder))}: has no tokenizer.json, so the text cannot become the tokens that this "
            "model knows",
            hint="copy the model's tokenizer.json to the folder, or --set data.tokenizer=PATH\n"
            "--set data.tokenizer=bytes, if it was trained on bytes",
        )


def refuse_both(flags: Mapping[str, Any], sets: Sequence[str]) -> None:
    """Raise UserError for two keys of which each says what the other says too."""
    if flags["train.epochs"] == 0:
        raise UserError("--epochs 0: nothing would be trained", hint="--epochs 1, or --steps N")
    given = {key for key, value in flags.items() if value is not None}
    given |= {text.partition("=")[0].strip() for text in sets if text.partition("=")[2].strip() not in ("0", "0.0")}
    for first, second, why in (
        ("train.steps", "train.epochs", "both are the length of the run"),
        ("train.accumulate", "train.global_batch", "one follows from the other, --batch and --ranks"),
    ):
        if {first, second} <= given:
            names = [f"--{key.partition('.')[2]}" if flags.get(key) is not None else key for key in (first, second)]
            raise UserError(f"{' and '.join(names)}: {why}", hint=f"the same without {' or without '.join(names)}")


def notes(config: Config, given: frozenset[str]) -> list[str]:
    """Return what is to be said of given values that are probably not meant."""
    optimizer, found = config.optimizer, []
    usual = next((each.value for each in _of_optimizer(config) if each.key == "optimizer.lr"), 0.0)
    if optimizer.lr == 0:
        found.append("lr 0: no parameter will change")
    elif is_fine_tuning(config) and usual and optimizer.lr >= TOO_HIGH_LR * usual and "optimizer.lr" in given:
        found.append(f"lr {optimizer.lr:g} is {optimizer.lr / usual:,.0f} times the {usual:g} of a model of this size")
    if optimizer.warmup >= 1 and not config.train.epochs and optimizer.warmup > 2 * config.train.steps:
        share = config.train.steps / optimizer.warmup
        found.append(
            f"warmup {optimizer.warmup} and {config.train.steps} steps: the learning rate reaches {share:.2g} of lr "
            "(optimizer.warmup=0.03 is a share of the run)"
        )
    blocks = sum(map(int, re.findall(r":(\d+)", config.activations.policy)))
    if not config.model.external and blocks > config.model.layers:
        found.append(
            f"activations.policy={config.activations.policy}: the model has {count_of(config.model.layers, 'block')}"
        )
    return found


def table(config: Config, chosen: list[Default], given: frozenset[str]) -> str:
    """Return the settings of a run as lines: each value, and the reason or who gave it."""
    reasons = {each.key: each.reason for each in chosen} | dict.fromkeys(given, "given")
    shown = [(key, _shown(get(config, key))) for key in _SHOWN if _is_set(config, key)]
    wide = max(len(key) for key, _ in shown)
    far = max(len(value) for _, value in shown)
    lines = [f"  {key:<{wide}}  {value:<{far}}  {reasons.get(key, 'default')}" for key, value in shown]
    return "\n".join(["settings (flags and --set change them):", *lines])


_SHOWN = (
    *("lora.rank", "lora.rank_pattern", "lora.alpha", "lora.alpha_pattern", "lora.targets", "lora.dropout"),
    *("lora.save_modules", "lora.start"),
    *("optimizer.name", "optimizer.lr", "optimizer.warmup", "optimizer.schedule", "optimizer.min_lr"),
    *("optimizer.weight_decay", "optimizer.betas", "train.clip", "train.seq", "train.epochs", "train.steps"),
    *("train.batch", "train.accumulate", "train.global_batch", "checkpoint.every", "train.eval_every"),
    *("data.validation", "data.split", "train.eval_batches"),
)


def _is_set(config: Config, key: str) -> bool:
    """Return whether a key says something about this run: one of steps and epochs, accumulate and global_batch does."""
    if key == "train.steps":
        return not config.train.epochs
    if key == "train.accumulate":
        return not config.train.global_batch
    if key.startswith("lora."):
        return config.lora.rank > 0 and (bool(get(config, key)) or key == "lora.dropout")
    return bool(get(config, key)) or key.startswith("optimizer.")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
