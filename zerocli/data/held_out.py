"""Held-out data: which part of the data is never trained on, and its batches in order, each token once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from zerocli.config import Config
from zerocli.data.tokens import TokenSource
from zerocli.errors import UserError
from zerocli.layout.sizes import count_of

if TYPE_CHECKING:
    import torch

    from zerocli.data.batches import Batches, DocumentBatches

DEFAULT_SPLIT = 0.05
"""Share that is held out if evaluations are asked for and no data is named for them."""


def split_share(config: Config) -> float:
    """Return the share of `data.path` that is held out."""
    if config.data.validation or config.data.split:
        return config.data.split
    return DEFAULT_SPLIT if config.train.eval_every else 0.0


def training_part(source: TokenSource, config: Config) -> TokenSource:
    """Return the tokens to train on: all, or those before the held-out share; raise UserError if either is too short.

    Where the data is cut is a pure function of the config, so a resumed run never trains on what was held out.
    """
    share, seq = split_share(config), config.train.seq
    if not share:
        return source
    held = round(len(source) * share)
    if held < 2 or len(source) - held < seq + 1:
        raise UserError(
            f"{config.data.path or 'the data'}: {len(source)} tokens are too few to hold out {share:g} of them: "
            f"{len(source) - held} are left to train on, {held} to evaluate; one sequence needs {seq + 1} (seq + 1)",
            hint="--set data.validation=FILE, or another --set data.split=...",
        )
    return source.part(0, len(source) - held)


def describe(config: Config, held_out: HeldOut) -> str:
    """Return the line that says what is held out, and when it is evaluated."""
    data, train = config.data, config.train
    what = data.validation or f"the last {data.split:.4g} of the data (data.split), which is not trained on"
    when = f"every {train.eval_every} steps and at the end" if train.eval_every else "at the end"
    batches = min(held_out.num_batches, train.eval_batches or held_out.num_batches)
    sequences = f"{batches} x {count_of(train.batch, 'sequence')} of {train.seq} tokens"
    return f"evaluation {when}: {what}; {sequences}"


class TokenPass:
    """A token source in consecutive windows of `seq` targets; the remainder is a last, shorter batch of its own."""

    def __init__(self, source: TokenSource, batch: int, seq: int) -> None:
        self._source, self._batch, self._seq = source, batch, seq
        self._whole = (len(source) - 1) // seq
        self._rest = len(source) - 1 - self._whole * seq
        self.num_batches = -(-self._whole // batch) + (self._rest > 0)
        self.positions = False
        """Whether batches have positions."""

    def batch(self, index: int) -> tuple[torch.Tensor, ...]:
        """Return batch `index`, (tokens, targets) in int64; together the batches have each target once."""
        import torch

        first = index * self._batch
        if first >= self._whole:
            windows = self._source.slice(self._whole * self._seq, self._rest + 1)[None]
        else:
            last = min(first + self._batch, self._whole)
            windows = np.stack([self._source.slice(at * self._seq, self._seq + 1) for at in range(first, last)])
        return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


class SamplePass:
    """One pass over samples 0..num_windows-1: (tokens, targets) of documents, with positions where they are packed."""

    def __init__(self, samples: DocumentBatches, batch: int) -> None:
        self._samples, self._batch = samples, batch
        self.num_batches = -(-samples.num_windows // batch)
        self.positions = samples.positions

    def batch(self, index: int) -> tuple[torch.Tensor, ...]:
        first = index * self._batch
        return self._samples.take(range(first, min(first + self._batch, self._samples.num_windows)))


HeldOut = TokenPass | SamplePass


def open_held_out(
    config: Config, batches: Batches, open_batches: Callable[[Config, bool], Batches], check: bool = True
) -> HeldOut | None:
    """Return the batches to evaluate on: of `data.validation`, or the part of the data that `batches` leaves out."""
    if not (config.data.validation or split_share(config)):
        return None
    train = config.train
    if not config.data.validation:
        return batches.held_out(train.batch)
    alone = {"data.path": config.data.validation, "data.mix": (), "data.validation": "", "data.split": 0.0}
    return open_batches(config.with_values(alone | {"train.eval_every": 0}), check).one_pass(train.batch)
