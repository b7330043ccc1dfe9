"""Events: reports of what an engine does to subscribers: a profiler, torch.profiler ranges, a test that adds delays.

An engine has one `Subscribers`, which its parts report to. Methods that return a scope (a context manager) surround an
operation; the others report a moment. With no subscriber an event is one call that returns a shared object. A
subscriber must not change results, but it may be slow, and it may raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tiers.events import NOTHING, Scope, TierEvents

if TYPE_CHECKING:
    from zerocli.engine.comm import Collectives, Pending
    from zerocli.engine.units.unit import Unit
    from zerocli.ranks.issued import Issued

FORWARD, BACKWARD, OPTIMIZER, EXCHANGE = "forward", "backward", "optimizer", "exchange"
"""The phases: a forward of the model, `backward`, `step`, and an exchange of small values between all ranks."""


class Events(TierEvents):
    """Ignores all events; a subscriber overrides those it needs. `transfer` and `copy` come from the tiers."""

    # -- scopes ----------------------------------------------------------------------------------------------------

    def phase(self, name: str) -> Scope:
        """Surround a phase of training; `exchange` may be nested in others."""
        return NOTHING

    def unit(self, unit: Unit, phase: str, values: Any) -> Scope:
        """Surround a unit's forward on `values` (args, kwargs); in the backward phase it is a recomputation."""
        return NOTHING

    def gather(self, unit: Unit) -> Scope:
        """Surround the issue of a gather of a unit's parameters, on the stream that it runs on."""
        return NOTHING

    def reduce(self, unit: Unit) -> Scope:
        """Surround the issue of a reduction of a unit's gradients, on the stream that it runs on.

        A unit's gradients may take several reductions; if units are reduced together, `unit` is the last of them.
        """
        return NOTHING

    def update(self, unit: Unit) -> Scope:
        """Surround the issue of an update of a unit's states, on the stream that it runs on.

        Offloaded states are updated chunk by chunk, each in its own scope.
        """
        return NOTHING

    def move(self, unit: Unit) -> Scope:
        """Surround the move of a piece of a unit's states to another tier, between two steps."""
        return NOTHING

    def wait(self, cause: str) -> Scope:
        """Surround a wait that may delay compute; `cause` is collectives, transfers or optimizer."""
        return NOTHING

    def collective(self, axis: Collectives, issued: Issued) -> Scope:
        """Surround the issue of a collective; `issued.pending` is set at the end, unless the host waited for it."""
        return NOTHING

    def completion(self, pending: Pending) -> Scope:
        """Surround the host's wait for a collective to complete (gloo)."""
        return NOTHING

    def loss(self) -> Scope:
        """Surround the forward of the chunked loss (models/loss.py), which computes logits, within a unit."""
        return NOTHING

    # -- moments ---------------------------------------------------------------------------------------------------

    def output(self, unit: Unit, value: Any) -> None:
        """Report a unit's output, after its scope has ended."""

    def begin(self) -> None:
        """Report that a run's metrics are counted from now on."""

    def step(self) -> None:
        """Report that a step has ended, after its last phase."""

    def start(self, stage: str) -> None:
        """Report a stage of process startup; only `STARTUP` does."""

    def save(self, stage: str) -> None:
        """Report a stage of saving a checkpoint; called from the saver's threads."""


SILENT = Events()
"""Events without a subscriber."""


class Subscribers(Events):
    """Reports every event to all subscribers, in the order of subscription; scopes end in reverse order."""

    def __init__(self, subscribers: Events | Iterable[Events] = ()) -> None:
        self._all: tuple[Events, ...] = ()
        self.on = False
        """Whether there is a subscriber."""
        for subscriber in (subscribers,) if isinstance(subscribers, Events) else subscribers:
            self.add(subscriber)

    def add(self, subscriber: Events) -> None:
        """Add a subscriber."""
        self._all = (*self._all, subscriber)  # a new tuple: another thread may be iterating over the old one
        self.on = True

    def remove(self, subscriber: Events) -> None:
        """Remove a subscriber; does nothing if it has not subscribed."""
        self._all = tuple(each for each in self._all if each is not subscriber)
        self.on = bool(self._all)


def _all_of(scopes: list[Scope]) -> Scope:
    """Return one scope that enters all of these."""
    heard = [scope for scope in scopes if scope is not NOTHING]
    if len(heard) > 1:
        return _several(heard)
    return heard[0] if heard else NOTHING


@contextlib.contextmanager
def _several(scopes: list[Scope]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope)
        yield


def _reported(name: str, has_scope: bool) -> Callable[..., Scope | None]:
    """Return the method of `Subscribers` that reports the event of this name to all of them."""

    def scope(self: Subscribers, *about: Any) -> Scope:
        return _all_of([getattr(each, name)(*about) for each in self._all]) if self.on else NOTHING

    def moment(self: Subscribers, *about: Any) -> None:
        for each in self._all:
            getattr(each, name)(*about)

    return scope if has_scope else moment


for _name, _event in (*vars(TierEvents).items(), *vars(Events).items()):
    if not _name.startswith("_"):
        setattr(Subscribers, _name, _reported(_name, _event.__annotations__["return"] == "Scope"))


class Running:
    """The events of the engine that is computing a unit, for functions that have no reference to an engine."""

    def __init__(self) -> None:
        self.events = Subscribers()

    @contextlib.contextmanager
    def of(self, events: Subscribers) -> Iterator[None]:
        """Set these as the running engine's events while the body runs."""
        outer, self.events = self.events, events
        try:
            yield
        finally:
            self.events = outer


RUNNING = Running()
"""Set only while the engine has subscribers."""


# -- ready-made subscribers --------------------------------------------------------------------------------------------


class ProfilerRanges(Events):
    """Opens a `torch.profiler.record_function` range for each phase, unit, gather, reduction and update.

    torch.profiler shows them in its trace; under `torch.autograd.profiler.emit_nvtx()` they are NVTX ranges.
    """

    def phase(self, name: str) -> Scope:
        return torch.profiler.record_function(f"zerocli {name}")

    def unit(self, unit: Unit, phase: str, values: Any) -> Scope:
        return torch.profiler.record_function(f"zerocli {phase} {unit.title}")

    def gather(self, unit: Unit) -> Scope:
        return torch.profiler.record_function(f"zerocli gather {unit.title}")

    def reduce(self, unit: Unit) -> Scope:
        return torch.profiler.record_function(f"zerocli reduce {unit.title}")

    def update(self, unit: Unit) -> Scope:
        return torch.profiler.record_function(f"zerocli update {unit.title}")


class Probe(Events):
    """Calls a function with the name of each event; tests use it to delay, raise and kill processes.

    Names: `gather`, `reduce`, `move` and `optimizer` before each, `forward` after each unit, `start ...`,
    `checkpoint ...`.
    """

    def __init__(self, act: Callable[[str], Any]) -> None:
        self._act = act

    def phase(self, name: str) -> Scope:
        if name == OPTIMIZER:
            self._act("optimizer")
        return NOTHING

    def gather(self, unit: Unit) -> Scope:
        self._act("gather")
        return NOTHING

    def reduce(self, unit: Unit) -> Scope:
        self._act("reduce")
        return NOTHING

    def move(self, unit: Unit) -> Scope:
        self._act("move")
        return NOTHING

    def output(self, unit: Unit, value: Any) -> None:
        self._act("forward")

    def start(self, stage: str) -> None:
        self._act(f"start {stage}")

    def save(self, stage: str) -> None:
        self._act(f"checkpoint {stage}")
