"""From a config to its batches: the format, the tokenizer, the cache; and what the run says about its data."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from zerocli.config import Config
from zerocli.data import documents, packing
from zerocli.data.batches import Batches, DocumentBatches, steps_of_epochs
from zerocli.data.cache import Node, this_node
from zerocli.data.encoder import BYTES, Encoder, find_tokenizer, open_encoder
from zerocli.data.files import DOCUMENTS, TOKENS, find_files, readable
from zerocli.data.held_out import split_share, training_part
from zerocli.data.preview import has_documents, known_vocab, split_weight
from zerocli.data.tokens import open_source
from zerocli.errors import UserError
from zerocli.layout.sizes import count_of

LIBRARY = "Python's standard library"


def with_packing(config: Config) -> tuple[Config, str]:
    """Return the config without packing if its model cannot keep documents apart, and a line that says so.

    Only models of transformers are asked; one of a factory is refused by `refuse_without_positions`.
    """
    if not config.data.pack or config.model.code != "transformers" or not has_documents(config):
        return config, ""
    from zerocli.models import transformers_model

    why = transformers_model.unpackable(transformers_model.build(config.model.folder, config.train.seq))
    if not why:
        return config, ""
    line = f"packing: off (data.pack=false), one document per window: {why}"
    return config.with_values({"data.pack": False}), line


def open_batches(config: Config, check: bool = True, node: Node | None = None) -> Batches:
    """Return the batches of a run; raise UserError if its data cannot be used. Collective where it is tokenised.

    With `check`, all of it is read once to find ids outside the vocabulary, or bytes that are no text. `node` says
    which rank tokenises; None: the first rank of each node.
    """
    data, train = config.data, config.train
    node = node or this_node()
    if data.mix:
        return _open_mix(config, node)
    with readable(data.path):
        form, files = find_files(data.path) if data.path else ("text", [])
    if form in DOCUMENTS:
        return _open_documents(config, form, files, node)
    tokenizer, reason = (BYTES, "") if form in TOKENS else find_tokenizer(data.tokenizer, config.model.folder)
    source = open_source(data.path, tokenizer, data.dtype, known_vocab(config), train.seq, check, data.cache, node)
    source = training_part(source, config)  # what is held out for evaluation is never trained on
    batches = Batches(source, train.batch, train.seq, train.accumulate, train.seed)
    described = "token ids" if form in TOKENS else "text"
    batches.lines = [f"data: {data.path or LIBRARY} ({described}): {len(source):,} tokens, all count for the loss"]
    if form not in TOKENS:
        batches.lines.append(f"tokenizer: {tokenizer} ({reason})")
    return batches


def _open_mix(config: Config, node: Node) -> Batches:
    """Return the batches of several files, each as often as its weight says: see [Note: weights of files]."""
    train, opened, takes = config.train, [], []
    for path, weight in map(split_weight, config.data.mix):
        alone = config.with_values({"data.path": path, "data.mix": ()})
        with readable(path):
            form, files = find_files(path)
        if form not in DOCUMENTS:
            raise UserError(
                f"{path}: is {form}, and several files are mixed only if all are documents (.jsonl, .csv, .parquet)",
                hint='one --data, or rows of text: {"text": ...}',
            )
        found = _open_documents(alone, form, files, node)
        takes.append(max(1, round(weight * found.num_windows)))
        times = f"{takes[-1]:,} windows per epoch (weight {weight:g})"
        found.lines.append(f"data: {path}: {times}")
        opened.append(found)
    shape = (train.batch, train.seq, train.accumulate, train.seed)
    windows = [each.parts[0] for each in opened]
    batches = DocumentBatches(windows, *shape, positions=config.data.pack, takes=takes)
    held = [each.left_out.parts[0] for each in opened if each.left_out is not None]
    if held:
        batches.left_out = DocumentBatches(held, *shape, positions=config.data.pack)
    batches.lines = list(dict.fromkeys(line for each in opened for line in each.lines))
    batches.notes = [note for each in opened for note in each.notes]
    return batches


def reading_of(config: Config) -> documents.Reading:
    """Return how the rows of a run are read."""
    data = config.data
    return documents.Reading("none" if config.train.on_inputs else data.mask, data.columns, data.system)


def _open_documents(config: Config, form: str, files: list[Path], node: Node) -> DocumentBatches:
    """Return the documents of one file or folder in windows, with those that are held out."""
    data = config.data
    tokenizer, reason = find_tokenizer(data.tokenizer, config.model.folder)
    encoder = open_encoder(tokenizer, known_vocab(config))
    with readable(data.path):
        name = cache_name(config, form, files, encoder)
        found = tokenised(config, form, files, encoder, name, node)
        trained, held = split_documents(found, split_share(config), data.path)
        batches = _pack(config, trained, name, encoder, node)
        batches.left_out = _pack(config, held, name, encoder, node) if len(held) else None
    end = "none" if encoder.eos is None else f"id {encoder.eos}"
    said = f"tokenizer: {tokenizer} ({reason}); end of a document: {end}"
    batches.lines, batches.notes = _describe(config, form, trained, batches.parts[0], said)
    return batches


def cache_name(config: Config, form: str, files: list[Path], encoder: Encoder) -> str:
    """Return the name of a run's tokenised documents in the cache."""
    return documents.cache_name(config.data.path, form, files, encoder, reading_of(config))


def tokenised(
    config: Config, form: str, files: list[Path], encoder: Encoder, name: str, node: Node
) -> documents.Documents:
    """Return the documents of a run as tokens, from the cache if they are there by this name."""
    data = config.data

    def tokenise(folder: Path, target: Path) -> None:
        with node.progress(f"tokenising {data.path}", sum(file.stat().st_size for file in files)) as moved:
            documents.write_documents(folder, target, form, files, encoder, reading_of(config), moved)

    return documents.Documents.of(node.cached(data.path, data.cache, name, tokenise))


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
        left, longest = windows.about["left_out"], windows.about["longest"]
        where = f"none of them within the first {train.seq} of its document"
        if left:
            where = f"and {left} are longer than {train.seq} tokens and left out (the longest needs {longest:,})"
        raise UserError(
            f"{data.path}: nothing in it counts for the loss: {count_of(len(found), 'document')} of {found.kind}, "
            f"{found.num_counted} counted tokens, {where}",
            hint="a longer --seq, or --set train.on_inputs=true",
        )
    return DocumentBatches(windows, train.batch, train.seq, train.accumulate, train.seed, positions=data.pack)


def _describe(
    config: Config, form: str, found: documents.Documents, windows: packing.Windows, tokenizer: str
) -> tuple[list[str], list[str]]:
    """Return the lines that say what the data is and what counts, with what was cut; and the latter alone."""
    share = f"{100 * windows.num_places / (len(windows) * windows.seq):.1f} % full"
    how = "packed" if config.data.pack else "one document each"
    rendered = f", rendered {found.about['as']}" if found.about["as"] else ""
    lines = [
        f"data: {config.data.path} ({form}, {found.kind}): {count_of(len(found), 'document')}, "
        f"{found.num_tokens:,} tokens, {found.num_counted:,} of them count for the loss{rendered}",
        tokenizer,
        f"windows: {len(windows):,} of {windows.seq} tokens, {how}, {share}",
    ]
    cut, about = windows.about, found.about
    longest = f"the longest needs {cut['longest']:,}"
    notes = [
        (cut["split"], f"longer than {windows.seq} tokens, split ({longest})"),
        (
            cut["truncated"],
            f"longer than {windows.seq} tokens, truncated: {cut['dropped']:,} tokens dropped ({longest}; "
            "data.long=split keeps all, drop leaves them out)",
        ),
        (cut["left_out"], f"longer than {windows.seq} tokens, left out with {cut['dropped']:,} tokens ({longest})"),
        (about["empty"], "empty, left out"),
        (about["silent"], f"without anything that counts for the loss, left out (the first: {about['silent_at']})"),
    ]
    said = [
        (
            about["apart"],
            "in which a token would span the prompt and the answer: the two are tokenised apart, as generate does",
        ),
        (
            len(found) if found.kind != "text" and 0 < found.num_counted <= len(found) else 0,
            "of which at most the end counts for the loss: are the answers empty?",
        ),
        (about["last_only"], "of several turns of which only the last counts: the template changes earlier ones"),
    ]
    cuts, others = (
        [f"{count_of(number, 'document')} {what}" for number, what in each if number] for each in (notes, said)
    )
    blank = cut["blank"] - about["silent"] if len(found) == about["documents"] else 0
    if blank > 0:
        cuts.append(f"{count_of(blank, 'piece')} of them without a token that counts, left out")
    cuts = [f"data: {text}" for text in cuts]
    return [*lines, *cuts, *(f"data: {text}" for text in others)], cuts


def samples_per_step(config: Config, world: int) -> int:
    """Return the sequences of a step on all of `world` ranks."""
    return config.train.batch * config.train.accumulate * (world // config.parallel.tp)


def with_epochs(config: Config, batches: Batches, world: int) -> Config:
    """Return the config with the steps that `train.epochs` asks for; unchanged if it is 0."""
    if not config.train.epochs:
        return config
    per_step = samples_per_step(config, world)
    steps = steps_of_epochs(config.train.epochs, batches.num_windows, per_step, batches.begun)
    return config.with_values({"train.steps": steps})


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
    with readable(data.path):
        form, files = find_files(data.path) if data.path else ("text", [])
        tokenizer, reason = (BYTES, "") if form in TOKENS else find_tokenizer(data.tokenizer, config.model.folder)
        if data.mix or (form not in DOCUMENTS and tokenizer == BYTES):
            return open_batches(config).lines
        encoder = open_encoder(tokenizer, known_vocab(config))
        lines = [f"data: {data.path or LIBRARY} ({form}), not tokenised", f"tokenizer: {tokenizer} ({reason})"]
        if form in DOCUMENTS:
            kind, number = documents.try_first(form, files, encoder, reading_of(config))
            if not kind:
                raise UserError(f"{data.path}: there is no data in it", hint="--data PATH")
            lines.append(f"data: rows of {kind}; the first {number} were tokenised")
    return lines
