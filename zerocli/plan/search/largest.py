"""The largest model, batch or sequence that fits a machine: `zerocli fit --max model|batch|seq`. Needs no torch.

Memory grows with each of the three, so bisections over plans find the largest: first with the placements of a table,
then, from there on, with all that `--auto` tries. `MARGIN` of GPU and host memory stays free, as under
`activations.policy=auto`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from offload.placement import HBM, Placement
from zerocli.config import AUTO
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.plan.models.counted import Counted
from zerocli.plan.models.model import Model
from zerocli.plan.search import candidates as table
from zerocli.plan.search.auto import choose, with_budgets
from zerocli.plan.search.candidates import Candidate, best_of, lightest_setups, states_fit, weigh
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import Hardware

KINDS = ("model", "batch", "seq")
LEAST_LAYERS = 2
"""A model of the family's proportions has at least this many blocks; if that does not fit, nothing does."""
MOST_LAYERS = 4096
MOST_BATCH = 1 << 20
SEQ_STEP = 64
MOST_SEQ = 1 << 24


@dataclass(frozen=True)
class Search:
    """Where the largest is searched: the setup asked for, the machine, and the placements."""

    setup: Setup
    hardware: Hardware
    room: Hardware
    """The machine's memory that may be used."""
    stages: Sequence[int]
    offload: Placement | None
    """None: all placements of each stage."""

    def weigh(self, model: Model, setup: Setup) -> list[Candidate]:
        """Return the candidates of a table, and one that is not in it if that is faster, or the only one that fits."""
        tried = table.setups(setup, self.stages, self.offload)
        found = self._in_room(table.weigh_each(model, tried, self.hardware))  # `auto` leaves the margin itself
        if self.offload is None and model.whole:
            found += self._in_room(with_budgets(model, setup, self.hardware, self.stages, best_of(found)))
        return found if best_of(found) is not None else [*found, *_fitting(model, setup, self)]

    def _in_room(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [replace(each, hardware=self.room) for each in candidates]

    def nearest(self, model: Model, setup: Setup) -> Candidate:
        """Return the candidate that exceeds the machine least."""
        tried = lightest_setups(setup, self.stages, self.offload)
        return table.nearest(table.weigh_each(model, tried, self.room))

    @property
    def has_more(self) -> bool:
        """Whether more can be tried than the placements of a table."""
        return self.offload is None or self.setup.recompute == AUTO

    def placed(self, model: Model, setup: Setup) -> Candidate | None:
        """Return a candidate that fits: with budgets, or activation checkpoints off the device too."""
        if self.offload is not None:
            return best_of(self.weigh(model, setup))
        try:
            return choose(model, setup, self.hardware, self.stages, shown=1).best
        except UserError:
            return None


@dataclass(frozen=True)
class Largest:
    """The largest that fits, its candidates, and the next larger one, which does not fit."""

    kind: str
    value: int
    """Parameters, sequences per rank and micro-step, or tokens per sequence; 0: nothing fits."""
    model: Model
    """The model that `value` is or was found with; the smallest that was tried if nothing fits."""
    count: int
    """The largest parameter count by model states alone, without a margin: the paper's analysis."""
    candidates: list[Candidate]
    next_value: int = 0
    """0: there is none; `end` says why."""
    next_model: Model | None = None
    next: Candidate | None = None
    """The candidate of the next value that exceeds the machine least."""
    end: str = ""

    @property
    def best(self) -> Candidate | None:
        return best_of(self.candidates) if self.value else None

    @property
    def dimensions(self) -> dict[str, int] | None:
        """The layers, hidden size and heads of the model; None if nothing fits, or if they are not known."""
        return self.model.dimensions if self.value else None


At = Callable[[int, Setup], tuple[Model, Setup]]
"""The model and the setup with a number of blocks, a batch or a sequence."""


def find(kind: str, model: Model, search: Search, count: int, *, whole: int = 0) -> Largest:
    """Return the largest model of the family's proportions, the largest batch or the longest sequence.

    Without a shape, the largest model is that by model states alone. `whole` is the global batch that micro-batches
    divide (0: any batch). UserError for a batch or sequence of a model that has no other.
    """
    setup = search.setup
    if not model.resizable:
        if kind != "model":
            raise model.fixed(kind)
        least = Counted(max(1, count))
        return Largest(kind, count, least, count, search.weigh(least, setup))
    if kind == "model":
        shown = largest_size(model, search)
        width = _width(shown or model.sized(setup, LEAST_LAYERS))  # the smallest model shows why nothing fits
        end = "deeper ones are not searched"
        values: Sequence[int] = range(LEAST_LAYERS, MOST_LAYERS + 1)
    else:
        values, end = _batches(setup, whole) if kind == "batch" else model.sequences(SEQ_STEP, MOST_SEQ)

    def at(value: int, setup: Setup = setup) -> tuple[Model, Setup]:
        if kind == "model":
            return model.sized(setup, value, width), setup
        if kind == "seq":
            return model.with_seq(value), replace(setup, seq=value)
        again = whole // (value * setup.dp) if whole else setup.accumulate
        return model, replace(setup, batch=value, accumulate=again)

    def number(index: int) -> int:
        return at(values[index])[0].numel if kind == "model" else values[index]

    if kind == "model":
        found = shown.blocks - LEAST_LAYERS if shown is not None else -1
    else:
        found = _largest_number(at, search, values)
    most = len(values) - 1
    while found < most and (over := search.nearest(*at(values[found + 1]))).fits:
        found += 1  # fragmentation has no order: the next may fit where one before did not
    model, setup = at(values[max(found, 0)])
    about = kind, number(found) if found >= 0 else 0, model, count, search.weigh(model, setup)
    if found == most:
        return Largest(*about, end=end)
    return Largest(*about, number(found + 1), at(values[found + 1])[0], over)


# -- batch and sequence ------------------------------------------------------------------------------------------------


def _batches(setup: Setup, whole: int) -> tuple[Sequence[int], str]:
    """Return the batches to choose from, and what ends them."""
    if not whole:
        return range(1, MOST_BATCH + 1), "larger ones are not searched"
    each = max(1, whole // setup.dp)
    found = [number for number in range(1, each + 1) if whole % (number * setup.dp) == 0]
    return found, f"train.global_batch={whole} is no more for {setup.dp} data-parallel ranks"


def _largest_number(at: At, search: Search, values: Sequence[int]) -> int:
    """Return the position of the largest of the values with which any setup fits; -1 if none does."""
    tried = list(lightest_setups(search.setup, sorted(search.stages), search.offload))

    def fits(setup: Setup, index: int) -> bool:
        try:
            return weigh(*at(values[index], setup), search.room).fits
        except UserError as error:
            if error.exit_code != DOES_NOT_FIT and len(tried) == 1:
                raise
            return False

    most, found = len(values) - 1, -1
    for each in reversed(tried):  # those that need the least memory first, so that the others are tried once
        if found < most and fits(each, found + 1):
            found = most if fits(each, most) else _last(functools.partial(fits, each), found + 1, most)

    def placed(index: int) -> Candidate | None:
        return search.placed(*at(values[index], search.setup))

    if search.has_more and found < most and (other := placed(found + 1)) is not None:
        found += 1
        lighter = table.lightest(_without_budgets(replace(other.setup, recompute=search.setup.recompute)))
        if found < most and fits(lighter, found + 1):  # quicker to try than all that `--auto` tries
            found = _last(functools.partial(fits, lighter), found + 1, most)
        if found < most and placed(found + 1) is not None:
            found = _last(lambda index: placed(index) is not None, found + 1, most)
    return found


def _without_budgets(setup: Setup) -> Setup:
    """Return the setup with nothing on the device of the kinds that are partly off it."""
    shares = {kind: tuple(each for each in tiers if each.tier != HBM) for kind, tiers in setup.offload.shares.items()}
    return replace(setup, offload=Placement(shares))


# -- models ------------------------------------------------------------------------------------------------------------


def largest_count(setup: Setup, hardware: Hardware, stages: Sequence[int], offload: Placement | None) -> int:
    """Return the largest parameter count whose model states alone fit: the paper's analysis."""
    search = Search(replace(setup, checkpoints=0), hardware, hardware, stages, offload)

    def fits(count: int) -> bool:
        return any(_fitting(Counted(count), search.setup, search))

    return _largest(fits, 1, 1 << 50)


def _width(model: Model) -> int:
    assert model.dimensions is not None
    return model.dimensions["hidden"]


def largest_size(model: Model, search: Search) -> Model | None:
    """Return the largest model of the family's proportions that fits: as wide as it can be, then as deep."""
    setup = search.setup

    def fits(each: Model) -> bool:
        return any(_fitting(each, setup, search))

    def placed(each: Model) -> bool:
        return search.placed(each, setup) is not None

    def largest(make: Callable[[int], Model], least: int, most: int) -> int:
        found = _largest(lambda n: fits(make(n)), least, most)
        if search.has_more and found < most and placed(make(max(least, found + 1))):
            found = _last(lambda n: placed(make(n)), max(least, found + 1), most)
        return found

    layers = largest(lambda n: model.sized(setup, n), LEAST_LAYERS, MOST_LAYERS)
    if not layers:
        return None
    width = _width(model.sized(setup, layers))
    deeper = largest(lambda n: model.sized(setup, n, width), layers, MOST_LAYERS)
    return model.sized(setup, max(layers, deeper), width)


def _fitting(model: Model, setup: Setup, search: Search) -> Iterator[Candidate]:
    """Yield the candidates of the lightest setups that fit, from those that need least memory."""
    stages, offload = search.stages, search.offload
    for each in reversed([*lightest_setups(setup, sorted(stages), offload)]):
        try:
            if states_fit(model, each, search.room) and (found := weigh(model, each, search.room)).fits:
                yield found
        except UserError as error:
            if error.exit_code != DOES_NOT_FIT and offload is not None and len(stages) == 1:
                raise


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Return the largest number that fits, 0 if `least` does not; every smaller number fits too."""
    return _last(fits, least, most) if fits(least) else 0


def _last(fits: Callable[[int], bool], least: int, most: int) -> int:
    """Return the largest number up to `most` that fits; `least` does, and every smaller number than one that fits."""
    low, step = least, max(1, least)
    while low < most and fits(min(low + step, most)):
        low, step = min(low + step, most), 2 * step
    high = min(low + step, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
