"""Events: what an engine does, reported to whoever subscribes: a profiler, torch.profiler's ranges, a test's delays.

An engine has one `Subscribers`, which its parts report to. Two kinds of methods report: those that return a scope (a
context manager) surround something that happens, the others report a moment. With no subscriber an event is one call
that returns a shared object. A subscriber changes no number, but it may be slow, and it may raise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from tiers.events import NOTHING, Scope, TierEvents

if TYPE_CHECKING:
    from tiers.base import Block
    from tiers.transfer import Transfer
    from zerocli.engine.comm import Collectives, Issued, Pending
    from zerocli.engine.unit import Unit

FORWARD, BACKWARD, OPTIMIZER, EXCHANGE = "forward", "backward", "optimizer", "exchange"
"""The phases: a forward of the model, `backward`, `step`, and an exchange of small values between all ranks."""


class Events(TierEvents):
    """Does nothing; a subscriber overrides what it wants to hear of. `transfer` and `copy` are the tiers'."""

    # -- scopes ----------------------------------------------------------------------------------------------------

    def phase(self, name: str) -> Scope:
        """Surround a phase of training; `exchange` also happens within others."""
        return NOTHING

    def unit(self, unit: Unit, phase: str, values: Any) -> Scope:
        """Surround a unit's computation on `values` (args, kwargs); in the phase backward it is a recomputation."""
        return NOTHING

    def gather(self, unit: Unit) -> Scope:
        """Surround the issue of a gather of a unit's parameters, on the stream that it runs on."""
        return NOTHING

    def reduce(self, unit: Unit) -> Scope:
        """Surround the issue of a reduction of a unit's gradients, on the stream that it runs on.

        A unit's gradients may take several; of units that are reduced together this is the last.
        """
        return NOTHING

    def update(self, unit: Unit) -> Scope:
        """Surround the issue of an update of a unit's states, on the stream that it runs on.

        States that are not on the device are updated chunk by chunk, each in a scope of its own.
        """
        return NOTHING

    def wait(self, cause: str) -> Scope:
        """Surround what may hold up the compute: collectives, transfers or the optimizer."""
        return NOTHING

    def collective(self, axis: Collectives, issued: Issued) -> Scope:
        """Surround the issue of a collective; `issued.pending` is there at the end, unless the host waited for it."""
        return NOTHING

    def completion(self, pending: Pending) -> Scope:
        """Surround the host's wait for the end of a collective (gloo)."""
        return NOTHING

    def loss(self) -> Scope:
        """Surround the forward of the chunked loss (models/loss.py), which makes logits, within a unit."""
        return NOTHING

    # -- moments ---------------------------------------------------------------------------------------------------

    def output(self, unit: Unit, value: Any) -> None:
        """Report what a unit has returned, after its scope has ended."""

    def begin(self) -> None:
        """Report that a run's metrics are counted from now on."""

    def step(self) -> None:
        """Report that a step has ended, after its last phase."""

    def start(self, stage: str) -> None:
        """Report a stage of a process's start; only `STARTUP.events` does."""

    def save(self, stage: str) -> None:
        """Report a stage of saving a checkpoint; from the saver's threads."""


SILENT = Events()
"""Nobody has subscribed."""


class Subscribers(Events):
    """Reports every event to all subscribers, in the order in which they came; scopes end in reverse."""

    def __init__(self, subscribers: Events | Iterable[Events] = ()) -> None:
        self._all: tuple[Events, ...] = ()
        self.on = False
        """Whether there is a subscriber."""
        for subscriber in (subscribers,) if isinstance(subscribers, Events) else subscribers:
            self.add(subscriber)

    def add(self, subscriber: Events) -> None:
        """Report to this subscriber too from now on."""
        self._all = (*self._all, subscriber)  # a new tuple: another thread may be going through the old one
        self.on = True

    def remove(self, subscriber: Events) -> None:
        """Report to it no longer; nothing to do if it has not subscribed."""
        self._all = tuple(each for each in self._all if each is not subscriber)
        self.on = bool(self._all)

    @contextlib.contextmanager
    def including(self, subscribers: Iterable[Events]) -> Iterator[None]:
        """Report to these too while the body runs."""
        chosen = tuple(subscribers)
        for subscriber in chosen:
            self.add(subscriber)
        try:
            yield
        finally:
            for subscriber in chosen:
                self.remove(subscriber)

    def phase(self, name: str) -> Scope:
        return _all_of([each.phase(name) for each in self._all]) if self.on else NOTHING

    def unit(self, unit: Unit, phase: str, values: Any) -> Scope:
        return _all_of([each.unit(unit, phase, values) for each in self._all]) if self.on else NOTHING

    def gather(self, unit: Unit) -> Scope:
        return _all_of([each.gather(unit) for each in self._all]) if self.on else NOTHING

    def reduce(self, unit: Unit) -> Scope:
        return _all_of([each.reduce(unit) for each in self._all]) if self.on else NOTHING

    def update(self, unit: Unit) -> Scope:
        return _all_of([each.update(unit) for each in self._all]) if self.on else NOTHING

    def wait(self, cause: str) -> Scope:
        return _all_of([each.wait(cause) for each in self._all]) if self.on else NOTHING

    def collective(self, axis: Collectives, issued: Issued) -> Scope:
        return _all_of([each.collective(axis, issued) for each in self._all]) if self.on else NOTHING

    def completion(self, pending: Pending) -> Scope:
        return _all_of([each.completion(pending) for each in self._all]) if self.on else NOTHING

    def loss(self) -> Scope:
        return _all_of([each.loss() for each in self._all]) if self.on else NOTHING

    def copy(self, direction: str, nbytes: int) -> Scope:
        return _all_of([each.copy(direction, nbytes) for each in self._all]) if self.on else NOTHING

    def transfer(self, block: Block, transfer: Transfer, writes: bool, began: float) -> None:
        for each in self._all:
            each.transfer(block, transfer, writes, began)

    def output(self, unit: Unit, value: Any) -> None:
        for each in self._all:
            each.output(unit, value)

    def begin(self) -> None:
        for each in self._all:
            each.begin()

    def step(self) -> None:
        for each in self._all:
            each.step()

    def start(self, stage: str) -> None:
        for each in self._all:
            each.start(stage)

    def save(self, stage: str) -> None:
        for each in self._all:
            each.save(stage)


def _all_of(scopes: list[Scope]) -> Scope:
    """Return one scope of several."""
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


class Running:
    """The events of the engine one of whose units is computing: what a function without an engine reports to."""

    def __init__(self) -> None:
        self.events = Subscribers()

    @contextlib.contextmanager
    def of(self, events: Subscribers) -> Iterator[None]:
        """Report to these while the body runs."""
        outer, self.events = self.events, events
        try:
            yield
        finally:
            self.events = outer


RUNNING = Running()
"""Set only while the engine has subscribers."""


# -- subscribers for everybody -----------------------------------------------------------------------------------------


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
    """Calls a function with the name of what happens; tests delay, fail and end processes in it.

    Names: `gather`, `reduce` and `optimizer` before each, `forward` after each unit's, `start ...`, `checkpoint ...`.
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

    def output(self, unit: Unit, value: Any) -> None:
        self._act("forward")

    def start(self, stage: str) -> None:
        self._act(f"start {stage}")

    def save(self, stage: str) -> None:
        self._act(f"checkpoint {stage}")
