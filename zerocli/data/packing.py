"""Documents into windows of `seq` tokens: each document predicts within itself only, and every window trains something.

[Note: pieces] A document of n tokens makes n - 1 predictions: tokens 0..n-2 are inputs, 1..n-1 the targets, so its last
token takes no place in a window. A piece is at most `seq` of these places, one after the other. A longer document is
split into several pieces or truncated to one. The target of a piece's last place is the token after it, so splitting
loses no prediction. Pieces without a target that counts for the loss are left out: a mean over none has no value.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerocli.data import cache
from zerocli.data.documents import Documents
from zerocli.ranks.startup import STARTUP

VERSION = 2
IGNORED = -100
"""A target that counts for no loss (zerocli.models.loss.IGNORED)."""
_ODD = np.uint64(0xD6E8FEB86659FD93)

CUTS = {"split": "split", "truncate": "truncated", "drop": "left_out"}
"""Values of `data.long`, and what documents are called that it was done to."""


@dataclass(frozen=True)
class Windows:
    """The windows of an epoch, before their order is permuted; memory-mapped."""

    documents: Documents
    seq: int
    first: np.ndarray
    """Window w has pieces first[w] to first[w + 1] - 1."""
    starts: np.ndarray
    """First token of each piece."""
    lengths: np.ndarray
    """Places that each piece takes."""
    counts: np.ndarray
    """Targets of each window that count for the loss."""
    about: dict[str, int]
    """What was cut: documents `split`, `truncated` or `left_out`, tokens `dropped`, pieces without a target (`blank`);
    and how many places the `longest` document needs."""
    pad: int = 0

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_places(self) -> int:
        """Places of all windows that hold a token of a document."""
        return int(self.lengths.sum(dtype=np.int64))

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tokens, targets, positions) of a window, int64 of length `seq`; what is left of it is padding.

        Positions restart at 0 with each piece, and with the padding.
        """
        tokens = np.full(self.seq, self.pad, np.int64)
        targets = np.full(self.seq, IGNORED, np.int64)
        positions = np.empty(self.seq, np.int64)
        at = 0
        for piece in range(int(self.first[index]), int(self.first[index + 1])):
            start, length = int(self.starts[piece]), int(self.lengths[piece])
            ids = self.documents.ids[start : start + length + 1].astype(np.int64)
            counted = self.documents.counted(start + 1, start + length + 1)
            tokens[at : at + length] = ids[:-1]
            targets[at : at + length][counted] = ids[1:][counted]
            positions[at : at + length] = np.arange(length)
            at += length
        positions[at:] = np.arange(self.seq - at)
        return tokens, targets, positions


def cache_key(tokens: str, documents: Documents, seq: int, pack: bool, long: str, seed: int) -> str:
    """Return what tells the windows of these documents of a cache file of tokens from others."""
    return cache.fingerprint(VERSION, tokens, documents.begin, len(documents), seq, pack, long, seed)


def open_windows(reader: cache.Reader, documents: Documents, seq: int, pad: int = 0) -> Windows:
    """Return the windows of a file that `write_windows` wrote."""
    first, starts, lengths, counts = (reader[name] for name in ("first", "starts", "lengths", "counts"))
    return Windows(documents, seq, first, starts, lengths, counts, reader.about["cut"], pad)


def write_windows(folder: Path, target: Path, documents: Documents, seq: int, pack: bool, long: str, seed: int) -> None:
    """Write the windows of documents to a cache file, a pure function of the arguments."""
    starts, lengths, counts, cut = cut_pieces(documents, seq, long)
    if pack:
        # Longest first, those of equal length in an order that the seed decides.
        order = np.lexsort((_keys(len(starts), seed), -lengths))
        bins, num_windows = fill_windows(lengths[order], seq)
        order = order[np.argsort(bins, kind="stable")]
        first = np.searchsorted(np.sort(bins), np.arange(num_windows + 1))
    else:
        order, first = np.arange(len(starts)), np.arange(len(starts) + 1)
    STARTUP.move()
    sums = np.add.reduceat(counts[order], first[:-1]) if len(order) else counts
    kinds = {"first": np.int64, "starts": np.int64, "lengths": np.int32, "counts": np.int32}
    writer = cache.Writer(folder, kinds)
    try:
        for name, values in zip(kinds, (first, starts[order], lengths[order], sums), strict=True):
            writer.add(name, values)
        writer.finish(target, {"cut": cut})
    finally:
        writer.close()


def cut_pieces(documents: Documents, seq: int, long: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
    """Return the first token, the places and the counted targets of each piece, and what was cut: [Note: pieces]."""
    ends = np.asarray(documents.ends)
    starts = np.concatenate([[documents.begin], ends[:-1]]).astype(np.int64) if len(ends) else ends
    places = ends - starts - 1
    longer = int((places > seq).sum())
    dropped = 0
    if long == "split":
        numbers = -(-places // seq)
        within = np.arange(int(numbers.sum())) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        lasts = np.repeat(ends - 1, numbers)
        starts = np.repeat(starts, numbers) + within * seq
        lengths = np.minimum(seq, lasts - starts)
    elif long == "drop":
        dropped = int((places + 1)[places > seq].sum())
        starts, lengths = starts[places <= seq], places[places <= seq]
    else:
        lengths = np.minimum(places, seq)
        dropped = int((places - lengths).sum())
    counts = documents.counted_before(starts + lengths + 1) - documents.counted_before(starts + 1)
    kept = counts > 0
    cut = {
        **{name: longer if long == how else 0 for how, name in CUTS.items()},
        "dropped": dropped,
        "longest": int(places.max(initial=0)),
        "blank": int((~kept).sum()),
    }
    return starts[kept], lengths[kept], counts[kept], cut


def fill_windows(lengths: np.ndarray, seq: int) -> tuple[np.ndarray, int]:
    """Return the window of each length and the number of windows; `lengths` are sorted, the largest first.

    Each goes to the window with the least room that still holds it. Equal lengths are placed at once, so that the time
    depends on how many different lengths there are.
    """
    windows = np.empty(len(lengths), np.int64)
    pools: dict[int, list[np.ndarray]] = {}
    rooms: list[int] = []
    num_windows = at = 0

    def put(room: int, ids: np.ndarray) -> None:
        if room and len(ids):
            if room not in pools:
                pools[room] = []
                bisect.insort(rooms, room)
            pools[room].append(ids)

    values, counts = np.unique(lengths, return_counts=True)
    for length, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            place = bisect.bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms.pop(place)
                ids = np.concatenate(pools.pop(room))
            else:
                room = seq
                ids = np.arange(num_windows, num_windows - (-left // (seq // length)))
                num_windows += len(ids)
            each = room // length
            used = min(len(ids), -(-left // each))
            put(room, ids[used:])
            placed = min(left, used * each)
            windows[at : at + placed] = np.repeat(ids[:used], each)[:placed]
            whole, more = divmod(placed, each)
            put(room - each * length, ids[:whole])
            put(room - more * length, ids[whole:used])
            at, left = at + placed, left - placed
        STARTUP.move()
    return windows, num_windows


def _keys(number: int, seed: int) -> np.ndarray:
    """Return `number` pseudo-random uint64, a pure function of the seed and of nothing else."""
    keys = np.arange(1, number + 1, dtype=np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15) % 2**64)
    for _ in range(3):
        keys = (keys ^ (keys >> np.uint64(32))) * _ODD
    return keys ^ (keys >> np.uint64(32))
