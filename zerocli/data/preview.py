"""What is said about a run's data before its ranks start: what cannot be used is refused. No torch."""

from __future__ import annotations

import math
import os

from zerocli.config import Config, hub
from zerocli.config.file import read_values
from zerocli.data.encoder import BYTES, find_tokenizer, open_encoder
from zerocli.data.files import DOCUMENTS, TOKENS, TextCheck, find_files, readable
from zerocli.errors import UserError

HEAD_NBYTES = 2**16


def known_vocab(config: Config) -> int:
    """Return the token ids that the model knows, 0 if nobody says."""
    if config.model.code != "transformers":
        return 0 if config.model.factory else config.model.vocab
    values, _, _ = read_values(hub.config_path(config.model.folder))
    return hub.size_of(values, "vocab_size")


def split_weight(text: str) -> tuple[str, float]:
    """Return (path, weight) of PATH or PATH:WEIGHT; the weight is 1 if there is none, or if such a file exists."""
    path, colon, number = text.rpartition(":")
    if not colon or os.path.exists(text):
        return text, 1.0
    try:
        weight = float(number)
    except ValueError:
        return text, 1.0
    if not 0 < weight < math.inf:
        raise UserError(f"{text}: a weight is a number above 0", hint=f"--data {path}:1")
    return path, weight


def has_documents(config: Config) -> bool:
    """Return whether a run's data is documents."""
    return bool(config.data.mix) or bool(config.data.path and find_files(config.data.path)[0] in DOCUMENTS)


def refuse_data(config: Config) -> None:
    """Raise UserError if the data of a run cannot be used. Documents are tokenised here, once, into the cache."""
    _refuse(config)
    if config.data.validation:
        path = config.data.validation
        try:
            find_files(path)
        except UserError as error:
            raise UserError(f"data.validation: {error}", hint="--set data.validation=FILE") from None
        _refuse(config.with_values({"data.path": path, "data.mix": (), "data.split": 0.0}))


def _refuse(config: Config) -> None:
    path = config.data.path
    with readable(path):
        if config.data.mix or (path and has_documents(config)):
            from zerocli.data.cache import ALONE
            from zerocli.data.sources import open_batches

            open_batches(config, check=False, node=ALONE)
            return
        form, files = find_files(path) if path else ("text", [])
        if form in TOKENS:
            from zerocli.data.tokens import open_source

            open_source(path, dtype=config.data.dtype, vocab=known_vocab(config), seq=config.train.seq)
            return
        tokenizer, _ = find_tokenizer(config.data.tokenizer, config.model.folder)
        if tokenizer != BYTES:
            open_encoder(tokenizer, known_vocab(config))
        if path and not files:
            raise UserError(f"{path}: there is no data in it", hint="--data PATH")
        for file in files:
            with open(file, "rb") as opened:
                TextCheck(str(file)).decode(opened.read(HEAD_NBYTES))
