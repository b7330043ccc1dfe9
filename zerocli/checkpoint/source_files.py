"""The small files of the model folder that a run began from, kept in RUN/model/: so an export has them again.

Config, tokenizer, chat template and generation config; and `names.json`, the names of the tensors in the folder's
files, of a model that transformers builds. Weights are never copied.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import nn

from zerocli.checkpoint.safetensors import Weights
from zerocli.config import Config, hub, quantized
from zerocli.errors import UserError
from zerocli.models.hugging import Mapping
from zerocli.regular_files import own_folder, read_regular, write_text

FOLDER = "model"
NAMES = "names.json"
KEPT = (
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("tokenizer*.json", "tokenizer.model", "*.tiktoken", "spiece.model", "sentencepiece*.model"),
    *("vocab.json", "vocab.txt", "merges.txt"),
)
MAX_NBYTES = 64 << 20
"""Larger files are not copied: the largest tokenizers have about 30 MB."""


def keep(config: Config, model: nn.Module, run_dir: Path) -> None:
    """Copy the model folder's small files to the run's own, and write the names of its tensors; once per run."""
    target = run_dir / FOLDER
    folder = config.model.folder
    if not folder or (target / hub.CONFIG).is_file() or os.path.abspath(folder) == str(target.absolute()):
        return
    own_folder(target)
    copy(folder, target)
    if config.model.code == "transformers":
        names = {
            mapping.ours: list(zip(mapping.theirs, mapping.shapes, strict=True)) for mapping in _names(config, model)
        }
        write_text(target / NAMES, json.dumps(names) + "\n")


def copy(folder: str, target: Path) -> list[str]:
    """Copy the small files of a model folder that are not there yet; return their names. config.json comes last."""
    config = Path(hub.config_path(folder))
    found = {hub.CONFIG: config} if config.is_file() else {}
    if os.path.isdir(folder):
        found |= {
            file.name: file
            for file in sorted(Path(folder).iterdir())
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in KEPT)
        }
    done = []
    for name, file in sorted(found.items(), key=lambda item: item[0] == hub.CONFIG):
        if file.is_file() and file.stat().st_size <= MAX_NBYTES and not (target / name).exists():
            shutil.copyfile(file, target / name)  # a link of the hub's cache is followed
            done.append(name)
    return done


def config_of(folder: Path) -> dict[str, Any] | None:
    """Return the config.json that a run began from, for plain weights; None if it is not there."""
    with contextlib.suppress(OSError, ValueError, UserError):
        values = json.loads(read_regular(folder / hub.CONFIG, 8 << 20))
        if isinstance(values, dict):
            values.pop(quantized.KEY, None)
            return values
    return None


def names_of(folder: Path) -> list[Mapping] | None:
    """Return where each tensor of a transformers model was in the files, None if the run does not know."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, UserError):
        saved = json.loads(read_regular(folder / NAMES, MAX_NBYTES))
        return [
            Mapping(ours, tuple(name for name, _ in parts), shapes=tuple(tuple(shape) for _, shape in parts))
            for ours, parts in saved.items()
        ]
    return None


def with_kept(config: Config, run_dir: str) -> str:
    """Return `model.folder`, or the run's own copy of its small files if the folder is gone."""
    folder, own = config.model.folder, os.path.join(run_dir, FOLDER)
    if folder and not os.path.isfile(hub.config_path(folder)) and os.path.isfile(os.path.join(own, hub.CONFIG)):
        return os.path.abspath(own)
    return folder


def _names(config: Config, model: nn.Module) -> tuple[Mapping, ...]:
    """Return the names in the files that the weights come from; of random ones those that transformers would write."""
    from zerocli.models import transformers_names

    if not config.train.init_from:
        return transformers_names.as_written(model).mappings
    entries = Weights(config.train.init_from).entries
    return transformers_names.in_files(model, {name: entry.shape for name, (_, entry) in entries.items()}).mappings
