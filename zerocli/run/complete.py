"""Text generation: one token after the other, through the engine's forward, at any stage and number of ranks.

Every rank runs the same forward on the same ids. Rank 0's choice of the next id counts on all of them, so ranks never
drift apart. A model that has `make_cache` keeps the keys and values of the text, so that each id costs a forward of one
token; others, such as factories' models, run the whole text for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocli.engine.engine import Engine
from zerocli.errors import Refused, UserError
from zerocli.run.evaluate import beside_training

PADDED_TO = 64
"""Without a cache, texts are padded at their end to a multiple of this, so that there are few shapes."""


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
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    window: int,
    ends: frozenset[int] = frozenset(),
    cached: bool = True,
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, up to one of `ends`, which is not yielded. Collective.

    Prompt and text together are at most `window` ids: the caller sees to that. Without `cached`, each id costs a
    forward of the whole text.
    """
    assert len(prompt) + sampling.max_tokens <= window, "more tokens than the model has positions"
    ids = list(prompt)
    random = torch.Generator().manual_seed(sampling.seed)
    model: Any = engine.model
    cache = model.make_cache(len(ids) + sampling.max_tokens) if cached and hasattr(model, "make_cache") else None
    new = ids
    for _ in range(sampling.max_tokens):
        try:
            logits = _next_logits(engine, ids, window) if cache is None else _cached_logits(engine, new, cache)
        except Refused:
            if cache is None or new is not ids:
                raise
            cache = None  # the model keeps its states in some other way
            logits = _next_logits(engine, ids, window)
        mine = torch.tensor([choose(logits, sampling, random)], device=engine.device)
        chosen = int(engine.gather_control(mine).flatten()[0])
        if chosen in ends:
            return
        new = [chosen]
        ids.append(chosen)
        yield chosen


def _cached_logits(engine: Engine, new: Sequence[int], cache: Any) -> torch.Tensor:
    """Return the logits of the id after `new` ids, which follow those in the cache, in fp64 on the CPU. Collective."""
    with beside_training(engine):
        output: torch.Tensor = engine(torch.tensor([new], device=engine.device), cache=cache)
        return output[0, -1].to("cpu", torch.float64)


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
