"""Placement: which tiers hold which kind of training state, with budgets.

`cpu`, `nvme` or the name of any other tier is a policy for all states; the long form places each kind:
`params=cpu,optimizer=hbm:20GiB+cpu:95GiB+nvme`. Spaces around `,`, `=`, `+` and `:` are ignored.
Spill is deterministic and monotone: pieces go to the first tier until one does not fit its budget, then to the next,
and never back.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tiers.registry import ALIASES, TIERS, available

HBM = "hbm"
KINDS = ("parameters", "gradients", "optimizer")
ACTIVATIONS = "activations"
"""The checkpoints of recomputed blocks: no stage partitions them, and any of them may be offloaded."""
_KIND_WORDS = {"params": "parameters", "parameters": "parameters", "grads": "gradients", "gradients": "gradients"} | {
    "optimizer": "optimizer",
    "optim": "optimizer",
    ACTIVATIONS: ACTIVATIONS,
}
_SHORT_NAMES = {"parameters": "params", "gradients": "grads", "dram": "cpu"}
_UNITS = {"TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3}


class PlacementError(ValueError):
    """An invalid placement: its text, what is wrong with it, and a `hint` if somebody knows what to try."""

    hint = ""

    def __init__(self, text: str, fact: str) -> None:
        super().__init__(text, fact)
        self.text, self.fact = text if len(text) <= 200 else f"{text[:197]}...", fact

    def __str__(self) -> str:
        return f"placement {self.text!r}: {self.fact}"


@dataclass(frozen=True)
class Share:
    """A tier, and how many bytes of one kind it may hold; None: no bound."""

    tier: str
    budget: int | None = None

    def __str__(self) -> str:
        word = _SHORT_NAMES.get(self.tier, self.tier)
        return word if self.budget is None else f"{word}:{_size(self.budget)}"


@dataclass(frozen=True)
class Placement:
    """A map from kind to its tiers in order of preference; `str` is the inverse of `parse_placement`."""

    shares: Mapping[str, tuple[Share, ...]] = field(default_factory=dict)
    policy: str = ""
    """The single tier of all states that a stage partitions; `resolve` turns it into shares for a given stage."""

    def __str__(self) -> str:
        if self.policy:
            return _SHORT_NAMES.get(self.policy, self.policy)
        return ",".join(f"{_SHORT_NAMES.get(k, k)}={'+'.join(map(str, shares))}" for k, shares in self.shares.items())

    def __bool__(self) -> bool:
        return bool(self.policy or self.shares)

    def __hash__(self) -> int:
        return hash((frozenset(self.shares.items()), self.policy))

    def of(self, kind: str) -> tuple[Share, ...]:
        """Return the tiers of a kind, in order; a policy must be resolved first."""
        assert not self.policy or kind == ACTIVATIONS, f"{self} is not resolved"
        return self.shares.get(kind, (Share(HBM),))

    @property
    def tiers(self) -> tuple[str, ...]:
        """The tiers other than the device that anything may go to."""
        names = [share.tier for kind in (*KINDS, ACTIVATIONS) for share in self.of(kind) if share.tier != HBM]
        return tuple(dict.fromkeys(names))

    def resolve(self, partitioned: Collection[str]) -> Placement:
        """Return the tiers of each kind at a stage; PlacementError if the stage does not allow them.

        `partitioned` are the model states that may be offloaded: replicated states stay on the device.
        """
        if self.policy:
            if not partitioned:
                fact = "stage 0 partitions nothing, so nothing can leave the device: choose stage 1, 2 or 3"
                raise PlacementError(str(self), fact)
            # Gradients are written and read once per step: on nvme they would only wear out the disk.
            near = "dram" if self.policy == "nvme" else self.policy
            return Placement({kind: (Share(near if kind == "gradients" else self.policy),) for kind in partitioned})
        for kind, shares in self.shares.items():
            if kind not in (*partitioned, ACTIVATIONS) and any(share.tier != HBM for share in shares):
                fact = f"this stage does not partition {kind}, so every rank needs them on its device"
                raise PlacementError(str(self), fact)
        return self


def parse_placement(text: str, parse_bytes: Callable[[str], int]) -> Placement:
    """Return the placement that `text` asks for; PlacementError says what is wrong with it.

    Any tier that is registered, or that an installed package offers, may be named. `Placement.resolve` checks
    whether a stage allows the placement.
    """
    text = text.strip()
    if text in ("", "none", HBM):
        return Placement()
    if _is_tier(text):
        return Placement(policy=ALIASES.get(text, text))
    shares: dict[str, tuple[Share, ...]] = {}
    for part in text.split(","):
        word, equals, places = (each.strip() for each in part.partition("="))
        if not equals and _is_tier(word):
            fact = f"{word!r} places all states, and stands alone: to place something beside it, name each kind"
            raise PlacementError(text, f"{fact}, such as optimizer={word}")
        if not equals:
            raise PlacementError(text, f"{word!r} is neither a policy (cpu, nvme) nor kind=tier")
        kind = _KIND_WORDS.get(word)
        if kind is None:
            raise PlacementError(text, f"there is no kind {word!r}{_meant(word, _KIND_WORDS)}")
        if kind in shares:
            raise PlacementError(text, f"{kind} is placed twice")
        shares[kind] = tuple(_share(text, place, parse_bytes) for place in places.split("+"))
    return Placement(shares)


def _is_tier(word: str) -> bool:
    """Whether a word names a tier; other packages are searched only if it is not one of ours."""
    return word in ALIASES or word in TIERS or word in available()


def _share(text: str, place: str, parse_bytes: Callable[[str], int]) -> Share:
    word, colon, size = (each.strip() for each in place.partition(":"))
    if not _is_tier(word):
        raise PlacementError(text, f"there is no tier {word!r}{_meant(word, [*available(), *ALIASES])}")
    tier = ALIASES.get(word, word)
    if not colon:
        return Share(tier)
    try:
        return Share(tier, parse_bytes(size))
    except ValueError as error:
        raise PlacementError(text, f"budget {size!r} of {word}: {error}") from error


def _meant(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word[:100], list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(set(known)))}"


def _size(nbytes: int) -> str:
    """Return a budget as text: exact, in the largest unit of which it is a multiple."""
    units = [unit for unit, scale in _UNITS.items() if nbytes and nbytes % scale == 0]
    return f"{nbytes // _UNITS[units[0]]}{units[0]}" if units else f"{nbytes}B"


class Spill:
    """Assigns tiers to the pieces of one kind, in order."""

    def __init__(self, kind: str, shares: tuple[Share, ...]) -> None:
        self._kind, self._shares = kind, shares
        self._at = 0
        self._used = 0

    def place(self, nbytes: int) -> str:
        """Return the tier of the next piece; ValueError when the last budget is used up."""
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

    def room(self, nbytes: int) -> int | None:
        """Return how often `nbytes` more fit the tier of the last piece; None: always."""
        budget = self._shares[self._at].budget
        return None if budget is None else (budget - self._used) // nbytes

    def repeat(self, nbytes: int) -> str:
        """Count `nbytes` more, for which there is room, in the tier of the last piece, and return its name."""
        self._used += nbytes
        return self._shares[self._at].tier


def per_rank(placement: Placement, ranks_per_node: int) -> Placement:
    """Return the placement with the budgets of shared tiers divided among a node's ranks; hbm is not shared."""
    divided = {
        kind: tuple(
            Share(s.tier, s.budget if s.budget is None or s.tier == HBM else s.budget // ranks_per_node) for s in shares
        )
        for kind, shares in placement.shares.items()
    }
    return Placement(divided, placement.policy)
