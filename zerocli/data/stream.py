"""Text as one stream of tokens, tokenised once into a cache file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zerocli.data import cache
from zerocli.data.documents import Moved
from zerocli.data.encoder import FileEncoder
from zerocli.data.files import text_pieces
from zerocli.ranks.startup import STARTUP

VERSION = 1


def cache_name(path: str, files: Sequence[Path], encoder: FileEncoder) -> str:
    """Return the name of the cache file: it differs wherever the tokens may."""
    key = cache.fingerprint(VERSION, "text", cache.identity(files), encoder.identity)
    return f"{Path(path).name or 'library'}-{key}.tokens"


def write_stream(
    folder: Path, target: Path, texts: Sequence[tuple[str, np.ndarray]], encoder: FileEncoder, moved: Moved
) -> None:
    """Tokenise (name, bytes) of each file into a cache file, about a MiB at a time."""
    writer = cache.Writer(folder, {"ids": encoder.dtype, "ends": np.int64})
    try:
        for name, data in texts:
            for piece in text_pieces(name, data):
                writer.add("ids", encoder.encode_stream(piece))
                moved(len(piece))
                STARTUP.move()
            writer.add("ends", [writer.numels["ids"]])
        writer.finish(target, {})
    finally:
        writer.close()
