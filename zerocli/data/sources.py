"""From a config to its batches: the format, the tokenizer, the cache; and what the run says about its data."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

from zerocli.config import Config
from zerocli.data import documents, packing
from zerocli.data.batches import Batches, DocumentBatches, steps_of_epochs
from zerocli.data.caching import Node, this_node
from zerocli.data.encoder import BYTES, Encoder, find_tokenizer, open_encoder, refuse_vocabulary
from zerocli.data.files import DOCUMENTS, TOKENS, find_files, unreadable
from zerocli.data.held_out import split_share, training_part
from zerocli.data.preview import known_vocab
from zerocli.data.tokens import open_source
from zerocli.errors import UserError
from zerocli.layout.sizes import count_of

LIBRARY = "Python's standard library"


def open_batches(config: Config, check: bool = True) -> Batches:
    """Return the batches of a run; raise UserError if its data cannot be used. Collective where it is tokenised.

    With `check`, all of it is read once to find ids outside the vocabulary, or bytes that are no text.
    """
    data, train = config.data, config.train
    vocab = known_vocab(config)
    node = this_node()
    try:
        form, files = find_files(data.path) if data.path else ("text", [])
    except OSError as error:
        raise unreadable(error, data.path) from None
    if form in DOCUMENTS:
        return _open_documents(config, form, files, vocab, node)
    tokenizer, reason = (BYTES, "") if form in TOKENS else find_tokenizer(data.tokenizer, config.model.folder)
    source = open_source(data.path, tokenizer, data.dtype, vocab, train.seq, check, data.cache, node)
    source = training_part(source, config)  # what is held out for evaluation is never trained on
    batches = Batches(source, train.batch, train.seq, train.accumulate, train.seed)
    described = "token ids" if form in TOKENS else "text"
    batches.lines = [f"data: {data.path or LIBRARY} ({described}): {len(source):,} tokens, all count for the loss"]
    if form not in TOKENS:
        batches.lines.append(f"tokenizer: {tokenizer} ({reason})")
    return batches


def _open_documents(config: Config, form: str, files: list[Path], vocab: int, node: Node) -> Batches:
    data = config.data
    tokenizer, reason = find_tokenizer(data.tokenizer, config.model.folder)
    encoder = open_encoder(tokenizer)
    refuse_vocabulary(encoder.name, encoder.size, vocab)
    try:
        name = documents.cache_name(data.path, form, files, encoder, data.mask)

        def tokenise(folder: Path, target: Path) -> None:
            with node.progress(f"tokenising {data.path}", sum(file.stat().st_size for file in files)) as moved:
                documents.write_documents(folder, target, form, files, encoder, data.mask, moved)

        found = documents.Documents.of(node.cached(data.path, data.cache, name, tokenise))
        trained, held = split_documents(found, split_share(config), data.path)
        batches = _pack(config, trained, name, encoder, node)
        batches.left_out = _pack(config, held, name, encoder, node) if len(held) else None
    except OSError as error:
        raise unreadable(error, data.path) from None
    batches.lines = _describe(config, form, trained, batches.windows, f"tokenizer: {tokenizer} ({reason})", encoder)
    return batches


def split_documents(
    found: documents.Documents, share: float, path: str
) -> tuple[documents.Documents, documents.Documents]:
    """Return (documents to train on, documents that are held out): the last `share` of them."""
    held = round(len(found) * share)
    if share and not 0 < held < len(found):
        raise UserError(
            f"{path}: {count_of(len(found), 'document')} are too few to hold out {share:g} of them",
            hint="--set data.validation=FILE, or another --set data.split=...",
        )
    return found.part(0, len(found) - held), found.part(len(found) - held, len(found))


def _pack(config: Config, found: documents.Documents, name: str, encoder: Encoder, node: Node) -> DocumentBatches:
    """Return the batches of documents of the cache file `name`. Collective."""
    data, train = config.data, config.train
    long = data.long if data.long != "auto" else "split" if found.kind == "text" else "truncate"
    pack: tuple[Any, ...] = (found, train.seq, data.pack, long, train.seed if data.pack else 0)

    def fill(folder: Path, target: Path) -> None:
        packing.write_windows(folder, target, *pack)

    target = f"{Path(data.path).name}-{packing.cache_key(name, *pack)}.windows"
    windows = packing.open_windows(node.cached(data.path, data.cache, target, fill), found, train.seq, encoder.eos or 0)
    if not len(windows):
        raise UserError(
            f"{data.path}: nothing in it counts for the loss: {count_of(len(found), 'document')} of {found.kind}, "
            f"{found.num_counted} counted tokens, none of them within the first {train.seq} of its document",
            hint="a longer --seq, or --set data.mask=none",
        )
    return DocumentBatches(windows, train.batch, train.seq, train.accumulate, train.seed, positions=data.pack)


def _describe(
    config: Config,
    form: str,
    found: documents.Documents,
    windows: packing.Windows,
    tokenizer: str,
    encoder: Encoder,
) -> list[str]:
    """Return the lines that say what the data is, what counts, and what was cut."""
    share = f"{100 * windows.num_places / (len(windows) * windows.seq):.1f} % full"
    how = "packed" if config.data.pack else "one document each"
    cut = windows.about
    lines = [
        f"data: {config.data.path} ({form}, {found.kind}): {count_of(len(found), 'document')}, "
        f"{found.num_tokens:,} tokens, {found.num_counted:,} of them count for the loss",
        f"{tokenizer}; end of a document: {'none' if encoder.eos is None else f'id {encoder.eos}'}",
        f"windows: {len(windows):,} of {windows.seq} tokens, {how}, {share}",
    ]
    said = [
        (cut["split"], f"longer than that, split (the longest needs {cut['longest']:,})"),
        (
            cut["truncated"],
            f"longer than that, truncated: {cut['dropped']:,} tokens dropped (the longest needs {cut['longest']:,}; "
            "data.long=split keeps all)",
        ),
        (found.about["empty"], "empty, left out"),
        (
            found.about["apart"],
            "in which a token would span the prompt and the answer: the two are tokenised apart, as generate does",
        ),
        (found.about["last_only"], "of several turns of which only the last counts: the template changes earlier ones"),
    ]
    cuts = [f"{count_of(number, 'document')} {what}" for number, what in said if number]
    if cut["blank"]:
        cuts.append(f"{count_of(cut['blank'], 'piece')} without a token that counts, left out")
    return [*lines, *(f"data: {text}" for text in cuts)]


def samples_per_step(config: Config, world: int) -> int:
    """Return the sequences of a step on all of `world` ranks."""
    return config.train.batch * config.train.accumulate * (world // config.parallel.tp)


def with_epochs(config: Config, batches: Batches, world: int) -> Config:
    """Return the config with the steps that `train.epochs` asks for; unchanged if it is 0."""
    if not config.train.epochs:
        return config
    per_step = samples_per_step(config, world)
    steps = steps_of_epochs(config.train.epochs, batches.num_windows, per_step, batches.begun)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def epochs_line(config: Config, batches: Batches, world: int) -> str:
    """Return how often the run's steps go through its data."""
    per_step = samples_per_step(config, world)
    steps, seen = batches.begun
    epochs = (seen + (config.train.steps - steps) * per_step) / batches.num_windows
    return (
        f"epochs: {epochs:.3g} by step {config.train.steps}: {count_of(per_step, 'window')} per step, "
        f"{batches.num_windows:,} in the data"
    )


def refuse_without_positions(config: Config, positions: bool, model: Any) -> None:
    """Raise UserError if batches have positions, as documents share windows, and the model does not take them."""
    if not positions:
        return
    parameters = inspect.signature(model.forward).parameters.values()
    if any(each.name == "positions" or each.kind is each.VAR_POSITIONAL for each in parameters):
        return
    raise UserError(
        f"{config.model.factory or config.model.family}: forward(tokens, targets, positions) is needed for packed "
        "documents, and this model takes no positions: attention would cross from one document into another",
        hint="--set data.pack=false trains one document per window",
    )


def check_data(config: Config) -> list[str]:
    """Return what a dry run says about the data: it reads a first part, tokenises that and writes nothing."""
    data = config.data
    try:
        form, files = find_files(data.path) if data.path else ("text", [])
        tokenizer, reason = (BYTES, "") if form in TOKENS else find_tokenizer(data.tokenizer, config.model.folder)
        if form not in DOCUMENTS and tokenizer == BYTES:
            return open_batches(config).lines
        encoder = open_encoder(tokenizer)
        refuse_vocabulary(encoder.name, encoder.size, known_vocab(config))
        lines = [f"data: {data.path or LIBRARY} ({form}), not tokenised", f"tokenizer: {tokenizer} ({reason})"]
        if form in DOCUMENTS:
            kind, number = documents.try_first(form, files, encoder, data.mask)
            if not kind:
                raise UserError(f"{data.path}: there is no data in it", hint="--data PATH")
            lines.append(f"data: rows of {kind}; the first {number} were tokenised")
    except OSError as error:
        raise unreadable(error, data.path) from None
    return lines
