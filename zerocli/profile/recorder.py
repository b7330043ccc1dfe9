"""`EventRecorder`: the profiler's subscriber. It feeds a clock from an engine's events while subscribed."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tiers.base import Block
from tiers.events import NOTHING, Scope
from tiers.transfer import Transfer
from zerocli.engine.comm import Collectives, Pending
from zerocli.engine.engine import Engine
from zerocli.engine.events import BACKWARD, EXCHANGE, OPTIMIZER, Events
from zerocli.engine.units.unit import Unit
from zerocli.profile import clock as clocks
from zerocli.profile.clock import Clock
from zerocli.profile.places import pieces
from zerocli.ranks.issued import Issued

_COLLECTIVES = {"all_gather": clocks.GATHER, "reduce_scatter": clocks.REDUCE, "all_reduce": clocks.REDUCE}
_TRANSFERS = {
    ("dram", False): clocks.UP,
    ("dram", True): clocks.DOWN,
    ("nvme", False): clocks.DISK_READ,
    ("nvme", True): clocks.DISK_WRITE,
}
"""The lane of a transfer, by (tier, whether it writes to the tier)."""


class EventRecorder(Events):
    """Feeds a clock from an engine, and calls `entered` with the current (phase, unit); `close` unsubscribes."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        entered: Callable[[tuple[str, str]], None],
        inputs: Callable[[Any], None],
        stepped: Callable[[], None],
    ) -> None:
        self._engine, self._clock = engine, clock
        self._entered, self._inputs, self._stepped = entered, inputs, stepped
        self._subject = ""
        """The unit for which work is issued now."""
        self._names: dict[int, str] = {}
        self._last: list[weakref.ref[torch.Tensor]] = []
        """Outputs of the unit that ended last; as inputs of the next unit they need no second hook."""
        self._unended: dict[Pending, Callable[[], None]] = {}
        """Collectives whose end is known only after a wait, each with the function that records it."""
        self._copied = threading.local()
        """`stamps` of the last copy that this thread issued, on its stream; its transfer is reported next."""
        self.in_loss = False
        """Whether our loss is running: memory made now is logits."""
        self.in_collective = False
        """Whether a collective is being issued: unseen memory then belongs to it."""
        self._uncut = False
        """Whether a step has ended that is not yet cut in the clock."""
        self._name_blocks()
        engine.events.add(self)

    def close(self) -> None:
        self._engine.events.remove(self)
        self._unended.clear()
        self._cut()

    def _cut(self) -> None:
        if self._uncut:
            self._uncut = False
            self._clock.cut()

    def _name_blocks(self) -> None:
        """Read the blocks of the tiers again: some are allocated on first use."""
        self._names = {id(piece.block): piece.name for piece in pieces(self._engine)}

    # -- phases and units ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _under_way(self, label: tuple[str, str]) -> Iterator[None]:
        self._clock.push(label)
        self._entered(label)
        try:
            yield
        finally:
            self._clock.pop()
            self._entered(self._clock.label)

    def phase(self, name: str) -> Scope:
        if name == EXCHANGE:
            return self._exchange()
        return self._under_way((name, "")) if name in (BACKWARD, OPTIMIZER) else NOTHING  # forward: unit by unit

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        with self.wait("collectives"):
            yield
        self._cut()  # a step, like its metrics, ends after the ranks' exchange

    @contextlib.contextmanager
    def unit(self, unit: Unit, phase: str, values: Any) -> Iterator[None]:
        if unit.index == 0:
            self._cut()
            self._clock.begin()
            self._inputs(values)
        if torch.is_grad_enabled():
            self._announce(values, ("backward", self._clock.label[1]), inputs=True)
        with self._under_way((phase, unit.title)):
            yield

    def output(self, unit: Unit, value: Any) -> None:
        if torch.is_grad_enabled():
            self._announce(value, ("backward", unit.title), inputs=False)

    def _announce(self, values: Any, label: tuple[str, str], inputs: bool) -> None:
        """Register autograd hooks that mark when backward reaches the gradients of these values.

        An input that is the output of the previous unit already has that unit's hook.
        """
        tensors = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.requires_grad and v.grad_fn]
        if inputs:
            tensors = [v for v in tensors if not any(ref() is v for ref in self._last)]
        else:
            self._last = [weakref.ref(v) for v in tensors]
        for value in tensors:
            value.register_hook(lambda grad: self._turn(label))

    def _turn(self, label: tuple[str, str]) -> None:
        if self._clock.label[0] == "backward":
            self._clock.turn(label)
            self._entered(label)

    @contextlib.contextmanager
    def _having(self, name: str, value: Any) -> Iterator[None]:
        """Give an attribute another value while the body runs."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def loss(self) -> Scope:
        return self._having("in_loss", True)

    def begin(self) -> None:
        self._clock.begin()

    def step(self) -> None:
        self._uncut = True
        self._name_blocks()
        self._stepped()

    @contextlib.contextmanager
    def wait(self, cause: str) -> Iterator[None]:
        self._clock.push((clocks.WAIT, cause))
        try:
            yield
        finally:
            self._clock.pop()

    # -- lanes -----------------------------------------------------------------------------------------------------

    def gather(self, unit: Unit) -> Scope:
        return self._having("_subject", unit.title)

    def reduce(self, unit: Unit) -> Scope:
        return self._having("_subject", unit.title)

    @contextlib.contextmanager
    def update(self, unit: Unit) -> Iterator[None]:
        begin = self._clock.stamp()
        with self._having("_subject", unit.title):
            yield
        self._clock.add(clocks.UPDATE, unit.title, begin, self._clock.stamp())

    @contextlib.contextmanager
    def collective(self, axis: Collectives, issued: Issued) -> Iterator[None]:
        if not issued.nbytes:  # control values
            yield
            return
        begin, name = self._clock.stamp(), self._subject
        with self._having("in_collective", True):
            yield
        if issued.pending is not None:
            self._end_with(issued.pending, _COLLECTIVES[issued.kind], name, begin, issued.nbytes)

    def _end_with(self, pending: Pending, lane: str, name: str, begin: Any, nbytes: int) -> None:
        """Record a collective's span: on a GPU up to this point of its stream, on a CPU when its future completes."""
        work, clock = pending.work, self._clock
        if work is None:
            clock.add(lane, name, begin, clock.stamp(), nbytes)
            return
        try:
            work.get_future().add_done_callback(lambda _: clock.add(lane, name, begin, time.perf_counter(), nbytes))
        except RuntimeError:  # gloo gives no future for a reduce-scatter: its end is known only after a wait
            self._unended[pending] = lambda: clock.add(lane, name, begin, time.perf_counter(), nbytes, bounded=True)

    def completion(self, pending: Pending) -> Scope:
        return self._completion(pending) if pending in self._unended else NOTHING

    @contextlib.contextmanager
    def _completion(self, pending: Pending) -> Iterator[None]:
        with self._having("in_collective", True):  # gloo's own copy of the input appears when it is split
            yield
        if (note := self._unended.pop(pending, None)) is not None:
            note()

    # -- tiers -----------------------------------------------------------------------------------------------------

    def transfer(self, block: Block, transfer: Transfer, writes: bool, began: float) -> None:
        lane = _TRANSFERS.get((block.tier.name, writes))
        if lane is None:
            return
        add, name, nbytes = self._clock.add, self._names.get(id(block), self._subject), transfer.nbytes
        stamps = vars(self._copied).pop("stamps", None)
        if transfer.future is not None:
            transfer.future.add_done_callback(lambda _: add(lane, name, began, time.perf_counter(), nbytes))
        elif transfer.event is None:
            add(lane, name, began, time.perf_counter(), nbytes)
        elif stamps is not None:
            add(lane, name, stamps[0], stamps[1], nbytes)

    @contextlib.contextmanager
    def copy(self, direction: str, nbytes: int) -> Iterator[None]:
        begin = self._clock.stamp()
        yield
        self._copied.stamps = begin, self._clock.stamp()
