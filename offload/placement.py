"""Placement: which tiers hold which kind of training state, with budgets.

`cpu` and `nvme` are whole policies; the long form places each kind: `params=cpu,optimizer=hbm:20GiB+cpu:95GiB+nvme`.
Spill is deterministic and monotone: pieces go to the first tier until one does not fit its budget, then to the next,
and never back.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

HBM = "hbm"
KINDS = ("parameters", "gradients", "optimizer")
ACTIVATIONS = "activations"
"""The checkpoints of blocks that are recomputed: no stage partitions them, and any may leave the device."""
_KIND_WORDS = {"params": "parameters", "parameters": "parameters", "grads": "gradients", "gradients": "gradients"} | {
    "optimizer": "optimizer",
    "optim": "optimizer",
    ACTIVATIONS: ACTIVATIONS,
}
_TIER_WORDS = {"cpu": "dram"}


@dataclass(frozen=True)
class Share:
    """A tier, and how many bytes of one kind it may hold; None is no bound of ours."""

    tier: str
    budget: int | None = None


@dataclass(frozen=True)
class Placement:
    """A map from kind to its tiers in order of preference."""

    shares: Mapping[str, tuple[Share, ...]] = field(default_factory=dict)

    def of(self, kind: str) -> tuple[Share, ...]:
        return self.shares.get(kind, (Share(HBM),))

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers other than the device that anything may go to."""
        names = [share.tier for kind in (*KINDS, ACTIVATIONS) for share in self.of(kind) if share.tier != HBM]
        return tuple(dict.fromkeys(names))


def parse_placement(
    text: str, partitioned: Collection[str], known_tiers: Collection[str], parse_bytes: Callable[[str], int]
) -> Placement:
    """Return the placement that `text` asks for; ValueError says what is wrong with it.

    `partitioned` are the model states that may leave the device: what every rank holds whole stays where it computes.
    """
    text = text.strip()
    if text in ("", "none", HBM):
        return Placement()
    if text in ("cpu", "dram", "nvme") or (text in known_tiers and "=" not in text):
        return Placement(_policy(_TIER_WORDS.get(text, text), partitioned))
    shares: dict[str, tuple[Share, ...]] = {}
    for part in text.split(","):
        word, equals, places = part.strip().partition("=")
        if not equals:
            raise ValueError(f"--offload {text!r}: {part.strip()!r} is neither a policy (cpu, nvme) nor kind=tier")
        kind = _KIND_WORDS.get(word)
        if kind is None:
            raise ValueError(f"--offload {text!r}: there is no kind {word!r}{_meant(word, _KIND_WORDS)}")
        if kind in shares:
            raise ValueError(f"--offload {text!r}: {kind} is placed twice")
        shares[kind] = tuple(_share(text, place, known_tiers, parse_bytes) for place in places.split("+"))
        if kind not in (*partitioned, ACTIVATIONS) and any(share.tier != HBM for share in shares[kind]):
            raise ValueError(
                f"--offload {text!r}: this stage does not partition {kind}, so every rank needs them on its device"
            )
    return Placement(shares)


def _policy(tier: str, partitioned: Collection[str]) -> dict[str, tuple[Share, ...]]:
    if not partitioned:
        raise ValueError("stage 0 partitions nothing, so nothing can leave the device: choose stage 1, 2 or 3")
    # Gradients are written once and read once a step: on nvme they would only wear it.
    return {kind: (Share("dram" if tier == "nvme" and kind == "gradients" else tier),) for kind in partitioned}


def _share(text: str, place: str, known_tiers: Collection[str], parse_bytes: Callable[[str], int]) -> Share:
    word, colon, size = place.strip().partition(":")
    tier = _TIER_WORDS.get(word, word)
    if tier not in known_tiers:
        raise ValueError(f"--offload {text!r}: there is no tier {word!r}{_meant(word, [*known_tiers, 'cpu'])}")
    if not colon:
        return Share(tier)
    try:
        return Share(tier, parse_bytes(size))
    except ValueError as error:
        raise ValueError(f"--offload {text!r}: budget {size!r} of {word}: {error}") from error


def _meant(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(set(known)))}"


class Spill:
    """Hands out places for the pieces of one kind, in order."""

    def __init__(self, kind: str, shares: tuple[Share, ...]) -> None:
        self._kind, self._shares = kind, shares
        self._at = 0
        self._used = 0

    def place(self, nbytes: int) -> str:
        """Return the tier of the next piece; ValueError when the last budget is spent."""
        while True:
            share = self._shares[self._at]
            if share.budget is None or self._used + nbytes <= share.budget:
                self._used += nbytes
                return share.tier
            if self._at + 1 == len(self._shares):
                raise ValueError(
                    f"{self._kind}: a piece of {nbytes} bytes has no place left: {share.tier} has "
                    f"{share.budget - self._used} of its {share.budget} bytes free, and no tier follows it"
                )
            self._at, self._used = self._at + 1, 0


def per_rank(placement: Placement, ranks_per_node: int) -> Placement:
    """Return the placement with the budgets of shared tiers divided among a node's ranks; hbm is a rank's own."""
    divided = {
        kind: tuple(
            Share(s.tier, s.budget if s.budget is None or s.tier == HBM else s.budget // ranks_per_node) for s in shares
        )
        for kind, shares in placement.shares.items()
    }
    return Placement(divided)
