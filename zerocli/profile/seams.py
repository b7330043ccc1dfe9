"""Seams: where a profile looks into the engine. All are methods replaced on the engine's own parts while it is
profiled; an engine that is not profiled runs none of this."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tiers.base import Block, Tier
from tiers.copies import Copier
from tiers.transfer import Transfer
from zerocli.engine.comm import Collectives, Pending
from zerocli.engine.engine import Engine
from zerocli.engine.unit import Flat, Unit
from zerocli.models import loss as loss_module
from zerocli.profile import clock as clocks
from zerocli.profile.clock import Clock
from zerocli.profile.places import pieces, unit_name


class Seams:
    """Feeds a clock from an engine, and tells `entered` which (phase, unit) is under way; `close` takes all back."""

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
        self._undo = contextlib.ExitStack()
        self._subject = ""
        self._watched: set[int] = set()
        self._names: dict[int, str] = {}
        self._last: list[weakref.ref[torch.Tensor]] = []
        """Outputs of the unit that ended last: whose gradient is the next unit's to announce."""
        self.in_loss = False
        """Whether our loss is at work, so that what is made is logits."""
        self.in_collective = False
        """Whether a collective is being issued: what turns up then is its own memory."""
        self._uncut = False
        """Whether a step has ended that the clock has not been told of."""
        self._wrap_phases()
        self._wrap_waits()
        self._wrap_collectives()
        self._wrap_updater()
        self._wrap_loss()
        self.refresh()

    def close(self) -> None:
        self._cut()
        self._undo.close()

    def _cut(self) -> None:
        if self._uncut:
            self._uncut = False
            self._clock.cut()

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `make(the method)` in the place of a method of one object."""
        before = owner.__dict__.get(name)
        setattr(owner, name, make(getattr(owner, name)))
        undo = (lambda: setattr(owner, name, before)) if before is not None else (lambda: delattr(owner, name))
        self._undo.callback(undo)

    # -- phases and units ------------------------------------------------------------------------------------------

    def _push(self, label: tuple[str, str]) -> None:
        self._clock.push(label)
        self._entered(label)

    def _pop(self) -> None:
        self._clock.pop()
        self._entered(self._clock.label)

    def _turn(self, label: tuple[str, str]) -> None:
        if self._clock.label[0] == "backward":
            self._clock.turn(label)
            self._entered(label)

    def _wrap_phases(self) -> None:
        engine = self._engine

        def run_unit(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(unit: Unit, body: Any, args: Any, kwargs: Any) -> Any:
                if unit.index == 0:
                    self._cut()
                    self._clock.begin()
                    self._inputs((args, kwargs))
                name, parent = unit_name(unit.name), self._clock.label[1]
                phase = "backward" if engine.reducer.active else "forward"  # backward: a recomputation
                if torch.is_grad_enabled():
                    self._announce((args, kwargs), ("backward", parent), inputs=True)
                self._push((phase, name))
                try:
                    output = original(unit, body, args, kwargs)
                finally:
                    self._pop()
                if torch.is_grad_enabled():
                    self._announce(output, ("backward", name), inputs=False)
                return output

            return run

        def phase(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
                def run(*args: Any, **kwargs: Any) -> Any:
                    self._push((name, ""))
                    try:
                        return original(*args, **kwargs)
                    finally:
                        self._pop()

                return run

            return wrap

        def stepping(original: Callable[..., Any]) -> Callable[..., Any]:
            def step() -> Any:
                result = original()
                self._uncut = True
                self._stepped()
                return result

            return step

        self._replace(engine.hooks, "run_unit", run_unit)
        self._replace(engine, "backward", phase("backward"))
        self._replace(engine, "step", phase("optimizer"))
        self._replace(engine, "step", stepping)

    def _announce(self, values: Any, label: tuple[str, str], inputs: bool) -> None:
        """Ask autograd to say when backward comes to the gradients of these values.

        A unit's input that is the output of the unit before it is left to that unit.
        """
        tensors = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor) and v.requires_grad and v.grad_fn]
        if inputs:
            tensors = [v for v in tensors if not any(ref() is v for ref in self._last)]
        else:
            self._last = [weakref.ref(v) for v in tensors]
        for value in tensors:
            value.register_hook(lambda grad: self._turn(label))

    def _wrap_loss(self) -> None:
        function = loss_module._LinearCrossEntropy

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                self.in_loss = True
                try:
                    return original(*args)
                finally:
                    self.in_loss = False

            return run

        before = function.__dict__["forward"]
        function.forward = staticmethod(wrap(function.forward))  # type: ignore[method-assign]
        self._undo.callback(lambda: setattr(function, "forward", before))

    # -- waits -----------------------------------------------------------------------------------------------------

    def _wrap_waits(self) -> None:
        waits = self._engine.waits

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @contextlib.contextmanager
            def waiting(cause: str) -> Iterator[None]:
                self._clock.push((clocks.WAIT, cause))
                try:
                    with original(cause):
                        yield
                finally:
                    self._clock.pop()

            return waiting

        def control(original: Callable[..., Any]) -> Callable[..., Any]:
            def gather(tensor: torch.Tensor) -> torch.Tensor:
                with waits.waiting("collectives"):
                    everyone = original(tensor)
                self._cut()  # a step's metrics end where the ranks have told each other of it, and so does the step
                return everyone

            return gather

        def take(original: Callable[..., Any]) -> Callable[..., Any]:
            def taken() -> Any:
                self._clock.begin()  # where whoever keeps the metrics begins to count
                return original()

            return taken

        self._replace(waits, "waiting", wrap)
        self._replace(waits, "take", take)
        self._replace(self._engine, "gather_control", control)

    # -- lanes -----------------------------------------------------------------------------------------------------

    def _about(self, owner: Any, name: str) -> None:
        """While this method runs, what is issued is about the unit of its first argument."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(subject: Flat | Unit, *args: Any) -> Any:
                unit = subject.unit if isinstance(subject, Flat) else subject
                outer, self._subject = self._subject, unit_name(unit.name)
                try:
                    return original(subject, *args)
                finally:
                    self._subject = outer

            return run

        self._replace(owner, name, wrap)

    def _wrap_collectives(self) -> None:
        engine = self._engine
        self._about(engine.gatherer, "_fill")
        self._about(engine.gatherer, "refresh")
        self._about(engine.reducer, "_launch")

        def timed(axis: Collectives, lane: str, times: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
                def run(*args: Any) -> Pending:
                    begin, name = self._clock.stamp(), self._subject
                    self.in_collective = True
                    try:
                        pending: Pending = original(*args)
                    finally:
                        self.in_collective = False
                    if axis.world > 1:
                        nbytes = times * max(each.nbytes for each in args if isinstance(each, torch.Tensor))
                        self._end_with(pending, lane, name, begin, nbytes)
                    return pending

                return run

            return wrap

        for axis in (engine.collectives, engine.tensor_parallel):
            self._replace(axis, "all_gather", timed(axis, clocks.GATHER, 1))
            self._replace(axis, "reduce_scatter", timed(axis, clocks.REDUCE, 1))
            self._replace(axis, "all_reduce", timed(axis, clocks.REDUCE, 2))

    def _end_with(self, pending: Pending, lane: str, name: str, begin: Any, nbytes: int) -> None:
        """Note a collective's span: on a GPU up to this point of its stream, on a CPU when its future is there."""
        work = pending._work
        if work is None:
            self._clock.add(lane, name, begin, self._clock.stamp(), nbytes)
            return
        clock = self._clock
        try:
            work.get_future().add_done_callback(lambda _: clock.add(lane, name, begin, time.perf_counter(), nbytes))
            return
        except RuntimeError:  # gloo has no future of a reduce-scatter: it is over when somebody has waited for it
            wait, left = pending.wait, [None]

        def waited() -> None:
            self.in_collective = True  # its own copy of all that is reduced shows when it is cut into parts
            try:
                wait()
            finally:
                self.in_collective = False
            if left:
                left.pop()
                clock.add(lane, name, begin, time.perf_counter(), nbytes, bounded=True)

        pending.wait = waited  # type: ignore[method-assign]

    def _wrap_updater(self) -> None:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def update(job: Any, slot: Any) -> None:
                begin = self._clock.stamp()
                original(job, slot)
                self._clock.add(clocks.UPDATE, unit_name(job.flat.unit.name), begin, self._clock.stamp())

            return update

        self._replace(self._engine.updater, "_update", wrap)

    # -- tiers -----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Look at the tiers anew: some are opened, and blocks taken, when they are first needed."""
        self._names = {id(piece.block): piece.name for piece in pieces(self._engine)}
        for tier in self._engine.tiers._open.values():
            if id(tier) not in self._watched and tier.name in ("dram", "nvme"):
                self._watched.add(id(tier))
                self._watch_tier(tier)

    def _watch_tier(self, tier: Tier) -> None:
        disk = tier.name == "nvme"
        lanes = {"read": clocks.DISK_READ if disk else clocks.UP, "write": clocks.DISK_WRITE if disk else clocks.DOWN}

        def timed(lane: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
                def move(block: Block, tensor: torch.Tensor, offset: int = 0) -> Transfer:
                    begin = time.perf_counter()
                    transfer: Transfer = original(block, tensor, offset)
                    name = self._names.get(id(block), self._subject)
                    if transfer._future is not None:
                        add, nbytes = self._clock.add, tensor.nbytes
                        transfer._future.add_done_callback(
                            lambda _: add(lane, name, begin, time.perf_counter(), nbytes)
                        )
                    elif transfer.event is None:
                        self._clock.add(lane, name, begin, time.perf_counter(), tensor.nbytes)
                    return transfer

                return move

            return wrap

        for verb, lane in lanes.items():
            self._replace(tier, verb, timed(lane))
        copier = getattr(tier, "_copier", None)
        if isinstance(copier, Copier):
            self._replace(copier, "watch", lambda _: self._watch_copy)

    @contextlib.contextmanager
    def _watch_copy(self, direction: str, nbytes: int) -> Iterator[None]:
        """Time one copy on the stream that it runs on."""
        begin = self._clock.stamp()
        yield
        lane = clocks.DOWN if direction == "down" else clocks.UP
        self._clock.add(lane, self._subject, begin, self._clock.stamp(), nbytes)
