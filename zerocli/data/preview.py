"""What can be said about a run's data before its ranks start, from its first bytes. No torch."""

from __future__ import annotations

from zerocli.config import Config, hub
from zerocli.config.file import read_values
from zerocli.data.encoder import BYTES, find_tokenizer, open_encoder, refuse_vocabulary
from zerocli.data.files import DOCUMENTS, TOKENS, TextCheck, find_files, unreadable
from zerocli.data.rows import read_rows

HEAD_NBYTES = 2**16


def known_vocab(config: Config) -> int:
    """Return the token ids that the model knows, 0 if nobody says."""
    if config.model.code != "transformers":
        return 0 if config.model.factory else config.model.vocab
    values, _, _ = read_values(hub.config_path(config.model.folder))
    return hub.size_of(values, "vocab_size")


def refuse_data(config: Config) -> None:
    """Raise UserError if the format, the first row, the first bytes of each text or the tokenizer cannot be used."""
    path = config.data.path
    try:
        form, files = find_files(path) if path else ("text", [])
        if form in TOKENS:
            return
        tokenizer, _ = find_tokenizer(config.data.tokenizer, config.model.folder)
        if tokenizer != BYTES or form in DOCUMENTS:
            encoder = open_encoder(tokenizer)
            refuse_vocabulary(encoder.name, encoder.size, known_vocab(config))
        if form in DOCUMENTS:
            next(read_rows(form, files), None)
            return
        for file in files:
            with open(file, "rb") as opened:
                TextCheck(str(file)).decode(opened.read(HEAD_NBYTES))
    except OSError as error:
        raise unreadable(error, path) from None
