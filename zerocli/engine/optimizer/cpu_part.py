"""The CPU's part of the update of offloaded states: a thread makes it while the device makes the rest.

States in host memory cross the link twice in an update. The CPU changes a part of them where they are, so that the link
carries less and both work at once. It takes the first chunks of each flat, in the order of the next forward; gradients
and parameters that are on the device are copied through a few buffers, which are filled while the CPU works on others.
Its kernel rounds as the device's does: which of them updates a parameter changes no bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import torch

from tiers.pages import Pages, Registrar
from zerocli.engine.optimizer.chunk import Chunk
from zerocli.engine.optimizer.compiled_update import VALUES, Call, CompiledAdam, Values
from zerocli.engine.streams import Readback, SideStream, SleepEvent, StreamEvent
from zerocli.engine.units.master import REMAINDER
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.layout.buffers import CPU_COPIES, cpu_copies
from zerocli.layout.constants import CPU_GROUP
from zerocli.layout.flats import Sizing

POLL_SECONDS = 0.0005
"""How long the host waits for the CPU's part before it looks for other work."""


class Copies:
    """A buffer of host memory for what a group of chunks has on the device."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.pages = Pages(nbytes)
        if device.type == "cuda":
            self.pages.pin(Registrar())
        self.arrived: StreamEvent | None = None
        self.left: StreamEvent | None = None


@dataclass(eq=False)
class Group:
    """Up to `CPU_GROUP` chunks of a flat, which the kernel updates in one call."""

    flat: Flat
    chunks: list[Chunk]
    last: bool
    """Whether no group of the flat follows."""
    copies: Copies | None
    brought: dict[str, list[tuple[torch.Tensor, slice]]] = field(default_factory=dict)
    """Of its gradients and its parameters, if they are on the device: their memory among the copies, and their places
    in the flat."""
    calls: list[Call] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of each call: the row of its values."""


class CpuPart:
    """Updates the chunks that are given to it, one step's after another's."""

    def __init__(self, kernel: CompiledAdam, device: torch.device, sizing: Sizing, threads: int) -> None:
        self._kernel, self._device, self._sizing, self._threads = kernel, device, sizing, threads
        self._down, self._up = SideStream(device), SideStream(device)
        # Neither thread may hold this object while it is idle: an engine can be dropped without being closed.
        self._worker = ThreadPoolExecutor(1, "cpu-update", _use_device, (device,))
        self._kernels = ThreadPoolExecutor(1, "cpu-update-kernel")
        """Runs kernels only: what comes before and after one happens while it runs another."""
        self._copies: list[Copies] = []
        self._chunks: list[Chunk] = []
        self._groups: list[Group] = []
        """Those of `_chunks`; made anew if other ones are given."""
        self.copied: StreamEvent | None = None
        """The end of the last copy of new parameters to the device. What is fetched later must wait for it: a link that
        is never idle would carry the fetches first, and the next group waits for this one's memory."""
        self._jobs: dict[int, Future[StreamEvent | None]] = {}
        """By flat's id; each ends with the event after which the device has its parameters, if they are kept there."""

    def holdings(self) -> list[tuple[str, str, torch.Tensor]]:
        """Return (category, name, tensor) of its host memory."""
        return [("buffers", CPU_COPIES, each.pages.bytes) for each in self._copies]

    def close(self) -> None:
        """End the threads, once they have done what they were given, and free the host memory."""
        self._worker.shutdown()
        self._kernels.shutdown()
        self._release()

    def _release(self) -> None:
        self._chunks, self._groups = [], []
        for each in self._copies:
            each.pages.release()
        self._copies = []

    def _prepare(self, flats: Iterable[Flat]) -> None:
        """Make the buffers that any of these flats may need, unless they are there."""
        sizes = [spec.nbytes for spec in cpu_copies([flat.spec for flat in flats], self._sizing)]
        if sum(sizes) > sum(copies.pages.nbytes for copies in self._copies):
            self._release()
            self._copies = [Copies(nbytes, self._device) for nbytes in sizes]

    def start(
        self,
        flats: Iterable[Flat],
        chunks: list[Chunk],
        table: torch.Tensor,
        factor: torch.Tensor,
        skip: torch.Tensor,
        ready: StreamEvent,
    ) -> None:
        """Start updating these chunks of some of the flats, in their order, once the event is reached.

        `table` has a row of values for each class of counts and, within it, each group; gradients are multiplied by
        `factor`. If `skip` is 1 nothing changes.
        """
        numbers = Readback(torch.cat([table.flatten(), factor.view(1), skip.view(1)]))
        if chunks != self._chunks:
            self._prepare(flats)
            self._chunks, self._groups = chunks, self._make_groups(chunks, table.shape[1])
        self._jobs = {id(chunk.flat): Future() for chunk in chunks}
        self._worker.submit(self._work, self._groups, numbers, ready, self._jobs)

    def finish(self, flat: Flat, meanwhile: Callable[[], None]) -> StreamEvent | None:
        """Wait until the flat's chunks are updated; return the event after which the device has what is copied to it.

        `meanwhile` is called again and again.
        """
        job = self._jobs.get(id(flat))
        if job is None:
            return None
        while not job.done():
            meanwhile()
            wait([job], POLL_SECONDS)
        return job.result()

    def _make_groups(self, chunks: list[Chunk], num_groups: int) -> list[Group]:
        groups: list[Group] = []
        for _, run in itertools.groupby(chunks, lambda chunk: id(chunk.flat)):
            found = list(run)
            for at in range(0, len(found), CPU_GROUP):
                copies = self._copies[len(groups) % len(self._copies)] if self._copies else None
                last = at + CPU_GROUP >= len(found)
                groups.append(Group(found[0].flat, found[at : at + CPU_GROUP], last, copies))
                self._describe(groups[-1], num_groups)
        return groups

    def _describe(self, group: Group, num_groups: int) -> None:
        """Find the memory of all that the group's update touches."""
        flat, rooms, at = group.flat, [_there(group.flat, chunk) for chunk in group.chunks], 0
        # Those of a width stand together, so that all are aligned.
        for name, tensor in sorted(_on_device(flat).items(), key=lambda found: -found[1].element_size()):
            assert group.copies is not None
            nbytes = tensor.element_size() * sum(chunk.span.numel for chunk in group.chunks)
            room, first = group.copies.pages.bytes[at : at + nbytes].view(tensor.dtype), 0
            for found, chunk in zip(rooms, group.chunks, strict=True):
                found[name] = room[first : first + chunk.span.numel]
                first += chunk.span.numel
            group.brought[name] = [(room[here], there) for here, there in _runs(group.chunks)]
            at += nbytes
        for found, chunk in zip(rooms, group.chunks, strict=True):
            for span, number, history in chunk.parts:
                part = slice(span.start, span.stop)
                master = found[REMAINDER if REMAINDER in found else MASTER][part]
                states = {name: found[name][part] for name in ("exp_avg", "exp_avg_sq")}
                group.calls.append(
                    self._kernel.call(span.numel, found["parameters"][part], master, found["grad"][part], states)
                )
                group.rows.append(history * num_groups + number)

    def _work(
        self, groups: list[Group], numbers: Readback, ready: StreamEvent, jobs: dict[int, Future[StreamEvent | None]]
    ) -> None:
        """Update all groups; run by the thread."""
        running: list[Future[None]] = []
        try:
            ready.synchronize()
            *table, factor, skip = numbers.values().tolist()
            width = len(VALUES) + 1
            rows = [table[at : at + width] for at in range(0, len(table), width)]
            ahead = max(1, len(self._copies) - 1)
            groups = [] if skip else groups
            for group in groups[:ahead]:
                self._bring(group, ready)
            for i, group in enumerate(groups):
                self._fill(group, rows, factor)
                running.append(self._kernels.submit(self._kernel.run, group.calls, self._threads))
                if i > 0:
                    self._end(groups[i - 1], running[i - 1], ready, jobs)
                if i + ahead < len(groups):  # into the memory of the group that has ended
                    self._bring(groups[i + ahead], ready)
            if groups:
                self._end(groups[-1], running[-1], ready, jobs)
            for job in jobs.values() if skip else ():
                job.set_result(None)
        except BaseException as error:  # raised where a flat's part is waited for
            wait(running)  # what a kernel works on may be freed then
            for job in jobs.values():
                if not job.done():
                    job.set_exception(error)

    def _bring(self, group: Group, ready: StreamEvent) -> None:
        """Start copying what the group has on the device, into memory that earlier copies have left."""
        copies, there = group.copies, _on_device(group.flat)
        if copies is None or not group.brought:
            return
        with self._down.run(after=ready):
            if copies.left is not None:
                copies.left.wait()
            for name, pairs in group.brought.items():
                for room, place in pairs:
                    room.copy_(there[name][place], non_blocking=True)
            copies.arrived = SleepEvent(self._device)

    def _fill(self, group: Group, rows: list[list[float]], factor: float) -> None:
        """Give the calls their values, once all that they touch has arrived."""
        flat = group.flat
        if group.copies is not None and group.copies.arrived is not None:
            group.copies.arrived.synchronize()
        stores = [each for each in (flat.record, flat.gradient.store, flat.param_store) if each is not None]
        for each in stores:
            for chunk in group.chunks:
                each.finish_transfers_in(chunk.span.start, chunk.span.stop)
        for call, row in zip(group.calls, group.rows, strict=True):
            *values, sign = rows[row]
            call.values, call.factor = Values(*values), factor * sign

    def _end(
        self, group: Group, running: Future[None], ready: StreamEvent, jobs: dict[int, Future[StreamEvent | None]]
    ) -> None:
        """Wait for a group's kernel and start copying its new parameters to the device, if they are kept there."""
        running.result()
        copied, copies = None, group.copies
        if copies is not None and "parameters" in group.brought:
            own = _on_device(group.flat)["parameters"]
            with self._up.run(after=ready):
                for room, place in group.brought["parameters"]:
                    own[place].copy_(room, non_blocking=True)
                copied = copies.left = self.copied = StreamEvent(self._device)
        if group.last:
            jobs[id(group.flat)].set_result(copied)


def _use_device(device: torch.device) -> None:
    """Make the device the thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _on_device(flat: Flat) -> dict[str, torch.Tensor]:
    """Return what the flat's update needs and has on the device."""
    named = {"grad": flat.gradient.held, "parameters": flat.held_parameters}
    return {name: each for name, each in named.items() if each is not None}


def _there(flat: Flat, chunk: Chunk) -> dict[str, torch.Tensor]:
    """Return what the chunk has in host memory, in place."""
    start, stop = chunk.span.start, chunk.span.stop
    assert flat.record is not None
    found = flat.record.split(start, stop, flat.record.view(start, stop))
    if flat.gradient.store is not None:
        found["grad"] = flat.gradient.store.view(start, stop)
    if flat.param_store is not None:
        found["parameters"] = flat.param_store.view(start, stop)
    return found


def _runs(chunks: Sequence[Chunk]) -> list[tuple[slice, slice]]:
    """Return (among the chunks, in the flat) of each run of neighbouring chunks."""
    runs: list[tuple[slice, slice]] = []
    at = 0
    for span in (chunk.span for chunk in chunks):
        here, there = slice(at, at + span.numel), slice(span.start, span.stop)
        if runs and runs[-1][1].stop == span.start:
            before = runs.pop()
            here, there = slice(before[0].start, here.stop), slice(before[1].start, there.stop)
        runs.append((here, there))
        at += span.numel
    return runs
