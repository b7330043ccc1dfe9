"""Text generation: one token after the other, through the engine's forward, at any stage and number of ranks.

Every rank runs the same forward on the same ids. Rank 0's choice of the next id counts on all of them, so ranks never
drift apart. Each id costs a forward of the whole text: there is no cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zerocli.engine.engine import Engine
from zerocli.errors import UserError
from zerocli.run.evaluate import beside_training

PADDED_TO = 64
"""Texts are padded at their end to a multiple of this, so that there are few shapes; attention is causal."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; a pure function of the logits and the seed."""

    max_tokens: int = 64
    temperature: float = 0.0
    """0 = the most likely token, always."""
    top_k: int = 0
    """Choose among this many of the most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Choose among the most likely tokens whose probabilities sum to at least this."""
    seed: int = 0


def complete(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, window: int, ends: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, up to one of `ends`, which is not yielded. Collective.

    Of a text longer than `window` the model sees the last `window` ids.
    """
    ids = list(prompt)
    random = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.max_tokens):
        logits = _next_logits(engine, ids[-window:], window)
        mine = torch.tensor([choose(logits, sampling, random)], device=engine.device)
        chosen = int(engine.gather_control(mine).flatten()[0])
        if chosen in ends:
            return
        ids.append(chosen)
        yield chosen


def _next_logits(engine: Engine, ids: Sequence[int], window: int) -> torch.Tensor:
    """Return the logits of the id after `ids`, in fp64 on the CPU. Collective."""
    tokens = torch.zeros((1, min(window, -(-len(ids) // PADDED_TO) * PADDED_TO)), dtype=torch.int64)
    tokens[0, : len(ids)] = torch.tensor(ids)
    with beside_training(engine):
        try:
            output = engine(tokens.to(engine.device))
        except TypeError as error:
            raise UserError(f"the model gives no logits without targets: {error}") from error
        logits: torch.Tensor = getattr(output, "logits", output)
        return logits[0, len(ids) - 1].to("cpu", torch.float64)


def choose(logits: torch.Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """Return the next id, given its logits: of equal ones the lowest id is taken first."""
    if not torch.isfinite(logits).any():
        raise UserError("the model's logits are not finite")
    if sampling.temperature == 0:
        return int(logits.argmax())
    # One random number per token, whatever the cuts: changing top_k does not shift the later ones.
    drawn = torch.rand((), generator=random, dtype=torch.float64)
    ordered, ids = torch.sort(logits, descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[: sampling.top_k], ids[: sampling.top_k]
    shares = torch.softmax(ordered / sampling.temperature, dim=0)
    sums = shares.cumsum(0)
    if sampling.top_p < 1:
        sums = sums[: int((sums < sampling.top_p).sum()) + 1]
    place = int(torch.searchsorted(sums, drawn * sums[-1], right=True))
    return int(ids[min(place, len(sums) - 1)])
