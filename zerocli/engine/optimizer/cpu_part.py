"""The CPU's part of the update of offloaded states: a thread makes it while the device makes the rest.

States in host memory cross the link twice in an update. The CPU changes a part of them where they are, so that the link
carries less and both work at once. It takes the first chunks of each flat, in the order of the next forward; gradients
and parameters that are on the device are copied through two buffers, one of which arrives while the CPU works on the
other. Its kernel rounds as the device's does: which of them updates a parameter changes no bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tiers.pages import Pages, Registrar
from zerocli.engine.optimizer.chunk import Chunk
from zerocli.engine.optimizer.compiled_update import VALUES, Call, CompiledAdam, Values
from zerocli.engine.streams import Readback, SideStream, StreamEvent
from zerocli.engine.units.master import REMAINDER
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.layout.buffers import CPU_COPIES, cpu_copies
from zerocli.layout.constants import CPU_GROUP
from zerocli.layout.flats import Sizing

Work = tuple[Flat, list[Chunk]]
"""Up to `CPU_GROUP` chunks of a flat."""


class Copies:
    """A buffer of host memory for what a group of chunks has on the device."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.pages = Pages(nbytes)
        if device.type == "cuda":
            self.pages.pin(Registrar())
        self.arrived: StreamEvent | None = None
        self.left: StreamEvent | None = None
        self.parts: list[dict[str, torch.Tensor]] = []
        """Of each chunk: its gradient and its parameters, if they are on the device."""

    def take(self, tensors: Sequence[dict[str, torch.Tensor]]) -> None:
        """Make room for copies of tensors; those of a width stand together, so that all are aligned."""
        at, self.parts = 0, [{} for _ in tensors]
        for name, each, parts in sorted(
            ((name, each, parts) for row, parts in zip(tensors, self.parts, strict=True) for name, each in row.items()),
            key=lambda found: -found[1].element_size(),
        ):
            parts[name] = self.pages.bytes[at : at + each.nbytes].view(each.dtype)
            at += each.nbytes


class CpuPart:
    """Updates the chunks that are given to it, one step's after another's."""

    def __init__(self, kernel: CompiledAdam, device: torch.device, sizing: Sizing, threads: int) -> None:
        self._kernel, self._device, self._sizing, self._threads = kernel, device, sizing, threads
        self._down, self._up = SideStream(device), SideStream(device)
        self._worker = ThreadPoolExecutor(1, "cpu-update", self._use_device)
        self._copies: list[Copies] | None = None
        self._jobs: dict[int, Future[StreamEvent | None]] = {}
        """By flat's id; each ends with the event after which the device has its parameters, if they are kept there."""

    def _use_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def holdings(self) -> list[tuple[str, str, torch.Tensor]]:
        """Return (category, name, tensor) of its host memory."""
        return [("buffers", CPU_COPIES, each.pages.bytes) for each in self._copies or ()]

    def close(self) -> None:
        """End the thread and free the host memory; nothing may be under way."""
        self._worker.shutdown()
        for each in self._copies or ():
            each.pages.release()
        self._copies = None

    def prepare(self, flats: Iterable[Flat]) -> None:
        """Make the buffers that any of these flats may need, in the first step."""
        if self._copies is None:
            specs = [flat.spec for flat in flats]
            self._copies = [Copies(spec.nbytes, self._device) for spec in cpu_copies(specs, self._sizing)]

    def start(
        self, work: Sequence[Work], table: torch.Tensor, factor: torch.Tensor, skip: torch.Tensor, ready: StreamEvent
    ) -> None:
        """Start updating these chunks, flat by flat, once the event is reached.

        `table` has a row of values for each class of counts and, within it, each group; gradients are multiplied by
        `factor`. If `skip` is 1 nothing changes.
        """
        numbers = Readback(torch.cat([table.flatten(), factor.view(1), skip.view(1)]))
        groups = [(f, chunks[at : at + CPU_GROUP]) for f, chunks in work for at in range(0, len(chunks), CPU_GROUP)]
        self._jobs = {id(flat): Future() for flat, _ in work}
        self._worker.submit(self._work, groups, numbers, table.shape[1], ready, self._jobs)

    def finish(self, flat: Flat) -> None:
        """Wait until the flat's chunks are updated; the current stream waits for what is copied to the device."""
        job = self._jobs.get(id(flat))
        copied = job.result() if job is not None else None
        if copied is not None:
            copied.wait()

    def _work(
        self,
        groups: list[Work],
        numbers: Readback,
        num_groups: int,
        ready: StreamEvent,
        jobs: dict[int, Future[StreamEvent | None]],
    ) -> None:
        """Update all groups; run by the thread."""
        try:
            *table, factor, skip = numbers.values().tolist()
            width = len(VALUES) + 1
            rows = [table[at : at + width] for at in range(0, len(table), width)]
            ready.synchronize()
            copies = self._copies or []
            pairs = [copies[i % 2] if copies else None for i in range(len(groups))]
            if not skip:
                self._bring(groups[0], pairs[0], ready)
            for i, (flat, chunks) in enumerate(groups):
                copied = None
                if not skip:
                    if i + 1 < len(groups):
                        self._bring(groups[i + 1], pairs[i + 1], ready)
                    calls = self._calls(flat, chunks, pairs[i], rows, num_groups, factor)
                    self._kernel.run(calls, self._threads)
                    copied = self._return(flat, chunks, pairs[i], ready)
                if i + 1 == len(groups) or groups[i + 1][0] is not flat:
                    jobs[id(flat)].set_result(copied)
        except BaseException as error:  # raised where a flat's part is waited for
            for job in jobs.values():
                if not job.done():
                    job.set_exception(error)

    def _bring(self, group: Work, copies: Copies | None, ready: StreamEvent) -> None:
        """Start copying what the group has on the device, into memory that earlier copies have left."""
        flat, chunks = group
        named = {"grad": flat.gradient.held, "parameters": flat.held_parameters}
        there = {name: each for name, each in named.items() if each is not None}
        if copies is None:
            assert not there
            return
        tensors = [{n: each[c.span.start : c.span.stop] for n, each in there.items()} for c in chunks]
        copies.take(tensors)
        with self._down.run(after=ready):
            if copies.left is not None:
                copies.left.wait()
            for parts, found in zip(copies.parts, tensors, strict=True):
                for name, each in found.items():
                    parts[name].copy_(each, non_blocking=True)
            copies.arrived = StreamEvent(self._device)

    def _calls(
        self,
        flat: Flat,
        chunks: list[Chunk],
        copies: Copies | None,
        rows: list[list[float]],
        num_groups: int,
        factor: float,
    ) -> list[Call]:
        """Return the kernel's calls for a group, once all that they touch has arrived."""
        calls = []
        if copies is not None and copies.arrived is not None:
            copies.arrived.synchronize()
        for i, chunk in enumerate(chunks):
            start, stop = chunk.span.start, chunk.span.stop
            found = chunk.arrays = chunk.arrays or _there(flat, chunk)
            assert flat.record is not None
            flat.record.finish_transfers_in(start, stop)
            if flat.gradient.store is not None:
                flat.gradient.store.finish_transfers_in(start, stop)
            if flat.param_store is not None:
                flat.param_store.finish_transfers_in(start, stop)
            if copies is not None:
                found = found | copies.parts[i]
            for span, group, history in chunk.parts:
                part = slice(span.start, span.stop)
                master = found[REMAINDER if REMAINDER in found else MASTER][part]
                states = {name: found[name][part] for name in ("exp_avg", "exp_avg_sq")}
                call = self._kernel.call(span.numel, found["parameters"][part], master, found["grad"][part], states)
                *values, sign = rows[history * num_groups + group]
                call.values, call.factor = Values(*values), factor * sign
                calls.append(call)
        return calls

    def _return(self, flat: Flat, chunks: list[Chunk], copies: Copies | None, ready: StreamEvent) -> StreamEvent | None:
        """Start copying a group's new parameters to the device; return the event at the end, None if they stay."""
        if copies is None or flat.held_parameters is None:
            return None
        with self._up.run(after=ready):
            for chunk, parts in zip(chunks, copies.parts, strict=True):
                own = flat.held_parameters[chunk.span.start : chunk.span.stop]
                own.copy_(parts["parameters"], non_blocking=True)
            copies.left = StreamEvent(self._device)
        return copies.left


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
