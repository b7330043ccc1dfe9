"""Documents: their tokens, where each ends, and which tokens count for the loss; tokenised once into a cache file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerocli.data import cache
from zerocli.data.chat import Chat, find_template
from zerocli.data.encoder import Encoded, Encoder
from zerocli.data.prompts import with_system
from zerocli.data.rows import INSTRUCTION, MESSAGES, Row, parse_columns
from zerocli.data.tables import read_rows
from zerocli.errors import UserError
from zerocli.ranks.startup import STARTUP

VERSION = 3
"""Counts changes of what a cache file holds."""
BATCH_NBYTES = 2**18
"""Text that is tokenised at once."""

ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt of an instruction where there is no chat template, as Stanford's Alpaca has it."""


@dataclass(frozen=True)
class Reading:
    """How rows are read and rendered; what of them counts for the loss."""

    mask: str = "auto"
    columns: str = ""
    """As `data.columns`."""
    system: str = ""
    """The system prompt of conversations that have none."""


Document = tuple[np.ndarray, np.ndarray]
"""The ids of one row, and which of them count for the loss."""


@dataclass(frozen=True)
class Documents:
    """Tokenised documents, memory-mapped."""

    ids: np.ndarray
    """All tokens, one document after the other."""
    ends: np.ndarray
    """ends[d] is the number of tokens up to and including document d."""
    flips: np.ndarray
    """Tokens, by their index, at which counting for the loss begins, ends, begins again and so on."""
    kind: str
    """What the rows have: text, prompt/completion or messages."""
    about: dict[str, Any]
    begin: int = 0
    """First token of the first document."""

    @classmethod
    def of(cls, reader: cache.Reader) -> Documents:
        return cls(reader["ids"], reader["ends"], reader["flips"], reader.about["kind"], reader.about)

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1]) - self.begin if len(self) else 0

    @property
    def num_counted(self) -> int:
        """Tokens that count for the loss."""
        before, after = self.counted_before(np.array([self.begin, self.begin + self.num_tokens]))
        return int(after - before)

    def part(self, first: int, last: int) -> Documents:
        """Return documents first..last-1."""
        return replace(self, ends=self.ends[first:last], begin=int(self.ends[first - 1]) if first else self.begin)

    def counted(self, start: int, end: int) -> np.ndarray:
        """Return, for tokens start..end-1, whether each counts for the loss."""
        first = int(np.searchsorted(self.flips, start, side="right"))
        last = int(np.searchsorted(self.flips, end, side="left"))
        edges = np.concatenate([[start], self.flips[first:last], [end]])
        states = (np.arange(len(edges) - 1) + first) % 2 == 1
        return np.repeat(states, np.diff(edges))

    def counted_before(self, places: np.ndarray) -> np.ndarray:
        """Return how many of the tokens before each place count for the loss."""
        flips = np.asarray(self.flips)
        sums = np.concatenate([[0], np.cumsum(flips[1::2] - flips[::2])])
        passed = np.searchsorted(flips, places, side="right")
        whole = sums[passed // 2]
        inside = np.where(passed % 2, places - flips[np.maximum(passed - 1, 0)], 0) if len(flips) else 0
        return np.asarray(whole + inside)


def cache_name(path: str, form: str, files: Sequence[Path], encoder: Encoder, reading: Reading) -> str:
    """Return the name of the cache file: it differs wherever the tokens may."""
    template = find_template(encoder.folder)
    key = cache.fingerprint(VERSION, form, cache.identity(files), encoder.identity, template, astuple(reading))
    return f"{Path(path).name or 'data'}-{key}.tokens"


def write_documents(
    folder: Path, target: Path, form: str, files: Sequence[Path], encoder: Encoder, reading: Reading, moved: cache.Moved
) -> None:
    """Tokenise the rows of files into a cache file, `BATCH_NBYTES` of text at a time."""
    writer = cache.Writer(folder, {"ids": encoder.dtype, "ends": np.int64, "flips": np.int64})
    kind, end, empty, state = "", 0, 0, False
    silent: list[str] = []
    """Rows of which nothing counts for the loss."""
    try:
        tokenise = _Tokeniser(encoder, reading)
        for rows in _batches(read_rows(form, files, parse_columns(reading.columns))):
            for row in rows:
                kind = kind or row.kind
                if row.kind != kind:
                    raise UserError(
                        f"{row.place}: has {row.kind}, and rows before it have {kind}: a run takes one kind"
                    )
            for row, (ids, counted) in zip(rows, tokenise(rows), strict=True):
                if len(ids) < 2:
                    empty += 1
                    continue
                counted = counted.copy()
                counted[0] = False  # nothing comes before it that could predict it
                if not counted.any():
                    silent.append(row.place)
                changes = np.flatnonzero(np.diff(counted, prepend=state))
                state = bool(counted[-1])
                writer.add("ids", ids)
                writer.add("flips", changes + end)
                end += len(ids)
                writer.add("ends", [end])
            moved(sum(row.nbytes for row in rows))
            STARTUP.move()
        if not end:
            fact = f"its {empty} rows are empty" if empty else "there is no data in it"
            raise UserError(f"{', '.join(map(str, files[:3]))}: {fact}", hint="--data PATH")
        if state:
            writer.add("flips", [end])
        last_only = tokenise.chat.last_only if tokenise.chat else 0
        about = {
            "kind": kind,
            "documents": writer.numels["ends"],
            "empty": empty,
            "last_only": last_only,
            "apart": tokenise.apart,
            "silent": len(silent),
            "silent_at": "".join(silent[:1]),
            "as": tokenise.described,
        }
        writer.finish(target, about)
    finally:
        writer.close()


def try_first(form: str, files: Sequence[Path], encoder: Encoder, reading: Reading) -> tuple[str, int]:
    """Tokenise the first rows and keep nothing; return their kind and how many they are, "" and 0 if there are none."""
    rows = next(_batches(read_rows(form, files, parse_columns(reading.columns))), [])
    if not rows:
        return "", 0
    return rows[0].kind, len(list(_Tokeniser(encoder, reading)([row for row in rows if row.kind == rows[0].kind])))


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    held: list[Row] = []
    nbytes = 0
    for row in rows:
        held.append(row)
        nbytes += row.nbytes
        if nbytes >= BATCH_NBYTES:
            yield held
            held, nbytes = [], 0
    if held:
        yield held


class _Tokeniser:
    """Rows of one kind to documents."""

    def __init__(self, encoder: Encoder, reading: Reading) -> None:
        self._encoder, self._masked, self._system = encoder, reading.mask == "auto", reading.system
        self.chat: Chat | None = None
        self.described = ""
        """How instructions were rendered."""
        self._apart = 0

    @property
    def apart(self) -> int:
        """Documents in which a token would span a prompt and its answer, so that the two were tokenised apart."""
        return self._apart + (self.chat.apart if self.chat else 0)

    def __call__(self, rows: Sequence[Row]) -> Iterator[Document]:
        kind = rows[0].kind
        if kind == INSTRUCTION:
            templated = bool(find_template(self._encoder.folder))
            self.described = "by the chat template" if templated else "as Alpaca's text: there is no chat template"
            rows = [_instruction(row, templated, self._system) for row in rows]
            kind = rows[0].kind
        if kind == MESSAGES:
            self.chat = self.chat or Chat(self._encoder, self._masked)
            yield from self.chat.encode([self._conversation(row) for row in rows])
            return
        if kind == "text":
            for row, encoded in zip(rows, self._whole([row.values["text"] for row in rows]), strict=True):
                yield self._document(encoded.ids, 0, bool(row.values["text"]))
            return
        pairs = [(row.values["prompt"], row.values["completion"]) for row in rows]
        given = self._encoder.encode_prompts([prompt for prompt, _ in pairs])
        for pair, prompt, encoded in zip(pairs, given, self._whole(["".join(pair) for pair in pairs]), strict=True):
            ids = self._joined(pair, prompt, encoded)
            yield self._document(ids, len(prompt) if self._masked else 0, any(pair))

    def _conversation(self, row: Row) -> tuple[str, dict[str, Any]]:
        messages = with_system(row.values["messages"], row.values.get("system", "") or self._system)
        return row.place, {"messages": messages, "tools": row.values.get("tools")}

    def _whole(self, texts: list[str]) -> list[Encoded]:
        return self._encoder.encode(texts, special=True, places=False)

    def _joined(self, pair: tuple[str, str], prompt: np.ndarray, whole: Encoded) -> np.ndarray:
        """Return the ids of a prompt and its answer; they begin with those that the prompt has at generation."""
        if np.array_equal(whole.ids[: len(prompt)], prompt) and len(prompt) <= len(whole.ids) - whole.after:
            return whole.ids
        self._apart += 1
        answer = self._encoder.encode_next(prompt, *pair)
        return np.concatenate([prompt, answer, whole.ids[len(whole.ids) - whole.after :]])

    def _document(self, ids: np.ndarray, prompt: int, filled: bool) -> Document:
        """Return a text with its end-of-sequence token; its first `prompt` ids do not count."""
        counted, eos = np.arange(len(ids)) >= prompt, self._encoder.eos
        if not filled:
            return ids[:0], counted[:0]
        if eos is not None and (not len(ids) or int(ids[-1]) != eos):
            ids, counted = np.append(ids, ids.dtype.type(eos)), np.append(counted, True)
        elif eos is not None:
            counted[-1] = True
        return ids, counted


def _instruction(row: Row, templated: bool, system: str) -> Row:
    """Return a row of instruction and output as a conversation, or where there is no template as prompt/completion."""
    values, output = row.values, row.values["output"]
    if not templated:
        before = values.get("system", "") or system
        prompt = alpaca_prompt(values)
        pair = {"prompt": f"{before}\n\n{prompt}" if before else prompt, "completion": output}
        return Row(row.place, "prompt/completion", pair, row.nbytes)
    asked = "\n".join(values[key] for key in ("instruction", "input") if values.get(key))
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    return Row(row.place, MESSAGES, {"messages": messages, "system": values.get("system", "")}, row.nbytes)


def alpaca_prompt(values: Mapping[str, str]) -> str:
    """Return the text before the answer to an instruction, where there is no chat template."""
    given = values.get("input", "")
    paired = ", paired with an input that provides further context" if given else ""
    return ALPACA.format(
        instruction=values["instruction"], paired=paired, input=f"### Input:\n{given}\n\n" if given else ""
    )
