"""The update: every chunk of what this rank holds, from wherever it lies, through the optimizer, and back.

One pipeline for all placements. What the update device can address is updated in place. What it cannot is fetched into
one of three slots while the chunks before it are updated, and written back while those after it are: on a GPU on
streams of their own, so that the host waits for nothing and the next forward overlaps with what it does not need yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from tiers.transfer import Transfer
from zerocli.lanes import Lane, Mark
from zerocli.optim import FlatOptimizer, Group, StepValues
from zerocli.shards import Span
from zerocli.unit import MASTER, Flat

UPDATE_CHUNK = {"cpu": 1 << 18, "cuda": 2 << 20}
"""Elements updated at a time where gradients need an fp32 copy: that copy, and what it meets, stay in cache."""
NUM_SLOTS = 3


@dataclass(frozen=True)
class Job:
    """One chunk of a flat: its group, and its span within what this rank holds."""

    flat: Flat
    group: int
    span: Span
    last: bool
    """Whether it ends its flat."""


@dataclass
class Slot:
    """Memory through which one chunk passes."""

    record: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    master: torch.Tensor | None = None
    out: torch.Tensor | None = None
    leaving: list[Transfer] = field(default_factory=list)
    """Writes that still read the slot's memory."""
    arriving: list[Transfer] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.record, self.grad, self.master, self.out) if t is not None)


class Updater:
    """Updates flats in order; `chunk` is the elements of a chunk of states that are off the device."""

    def __init__(
        self, optimizer: FlatOptimizer, groups: Sequence[Group], device: torch.device, on_cpu: bool, chunk: int
    ) -> None:
        self._optimizer, self._groups, self._device = optimizer, groups, device
        self._on_cpu = on_cpu
        self._where = torch.device("cpu") if on_cpu else device
        self._chunk = chunk
        self._fetching, self._updating = Lane(device), Lane(device)
        self._slots = [Slot() for _ in range(NUM_SLOTS)]
        self._scratch: torch.Tensor | None = None
        self._values: StepValues | None = None

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of slots and scratch, by the type of device they are on."""
        scratch = self._scratch.nbytes if self._scratch is not None else 0
        return {self._where.type: scratch + sum(slot.nbytes for slot in self._slots)}

    def run(self, flats: Iterable[Flat], values: StepValues, updated: Callable[[Flat], None]) -> None:
        """Update the flats in order; `updated` is called after each, on the lane that its writes are on."""
        # Until these values are replaced, in the next step, the device may still be reading them.
        self._values = values = values.to(self._where)
        flats = list(flats)
        away = [flat for flat in flats if flat.away]
        if not away:
            for flat in flats:
                for job in self._jobs(flat):
                    self._update(job, Slot())
                self._close(flat, updated)
            return
        jobs = [job for flat in flats for job in self._jobs(flat)]
        with self._fetching.run(), self._updating.run():
            pass  # both lanes start after the compute issued so far
        start = Mark(self._device)
        for i in range(len(jobs) + NUM_SLOTS - 1):
            if i < len(jobs):
                with self._fetching.run(after=start):
                    self._fetch(jobs[i], self._slots[i % NUM_SLOTS])
            at = i - (NUM_SLOTS - 1)
            if at >= 0:
                with self._updating.run(after=start):
                    self._update(jobs[at], self._slots[at % NUM_SLOTS])
                    if jobs[at].last:
                        self._close(jobs[at].flat, updated)

    def _close(self, flat: Flat, updated: Callable[[Flat], None]) -> None:
        flat.written = Mark(self._device)
        updated(flat)

    def _jobs(self, flat: Flat) -> list[Job]:
        spans = flat.chunks(self._chunk if flat.away else UPDATE_CHUNK[self._device.type])
        return [Job(flat, group, span, i == len(spans) - 1) for i, (group, span) in enumerate(spans)]

    # -- one chunk -------------------------------------------------------------------------------------------------

    def _fetch(self, job: Job, slot: Slot) -> None:
        """Start bringing a chunk's parts into the slot, once the last chunk's have left it."""
        flat, span = job.flat, job.span
        for transfer in slot.leaving:
            transfer.wait()
        slot.leaving, slot.arriving = [], []
        if flat.record is not None and not (self._on_cpu and flat.record.store.tier.addressable):
            slot.record = self._memory(slot.record, len(flat.record.arrays) * self._chunk, torch.float32)
            slot.arriving.append(flat.record.fetch(span.start, span.stop, slot.record))
        if flat.grad_store is not None and not (self._on_cpu and flat.grad_store.tier.addressable):
            slot.grad = self._memory(slot.grad, self._chunk, flat.grad_store.dtype)
            slot.arriving.append(flat.grad_store.fetch(span.start, slot.grad[: span.numel]))
        in_record = flat.record is not None and MASTER in flat.record.arrays
        if flat.master is None and not in_record:  # fp32: the parameters are the master
            assert flat.param_store is not None
            slot.master = self._memory(slot.master, self._chunk, torch.float32)
            slot.arriving.append(flat.param_store.fetch(span.start, slot.master[: span.numel]))

    def _memory(self, held: torch.Tensor | None, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if held is None or held.numel() < numel or held.dtype != dtype:
            pin = self._where.type == "cpu" and self._device.type == "cuda"
            held = torch.empty(numel, dtype=dtype, device=self._where, pin_memory=pin)
        return held

    def _update(self, job: Job, slot: Slot) -> None:
        """Update a chunk whose parts have arrived, and start sending them back."""
        flat, span, values = job.flat, job.span, self._values
        assert values is not None
        for transfer in slot.arriving:
            transfer.wait() if self._where == self._device else transfer.synchronize()
        part = slice(span.start, span.stop)
        arrays = self._arrays(job, slot)
        grad, scale = self._fp32(self._grad(job, slot), values)
        states = {name: arrays[name] for name in self._optimizer.state_names}
        master = arrays[MASTER]
        self._optimizer.update(master, grad, scale, states, self._groups[job.group], values)
        if flat.record is not None and slot.record is not None:
            slot.leaving.append(flat.record.put(span.start, span.stop, slot.record))
        if flat.param_store is not None:
            self._send_parameters(flat, span, master, slot)
        elif (target := flat.shard if flat.held == flat.own else flat.resident) is not None:
            if target.data_ptr() + span.start * target.element_size() != master.data_ptr():
                target[part].copy_(master, non_blocking=True)

    def _arrays(self, job: Job, slot: Slot) -> dict[str, torch.Tensor]:
        """Return the chunk's master and states where they can be updated."""
        flat, span = job.flat, job.span
        part = slice(span.start, span.stop)
        arrays = {name: array[part] for name, array in flat.states.items()}
        if flat.record is not None:
            memory = slot.record if slot.record is not None else flat.record.local(span.start, span.stop)
            assert memory is not None
            arrays |= flat.record.split(span.start, span.stop, memory)
        if MASTER not in arrays:
            if flat.master is not None:
                arrays[MASTER] = flat.master[part]
            else:
                assert slot.master is not None
                arrays[MASTER] = slot.master[: span.numel]
        return arrays

    def _grad(self, job: Job, slot: Slot) -> torch.Tensor:
        flat, span = job.flat, job.span
        if flat.grad is not None:
            return flat.grad[span.start : span.stop].to(self._where)
        assert flat.grad_store is not None
        if slot.grad is not None:
            return slot.grad[: span.numel]
        local = flat.grad_store.local()
        assert local is not None
        return local[span.start : span.stop]

    def _send_parameters(self, flat: Flat, span: Span, master: torch.Tensor, slot: Slot) -> None:
        """Write the chunk's new parameters, in the compute dtype, to the tier that holds them."""
        assert flat.param_store is not None
        if flat.dtype == master.dtype:
            slot.leaving.append(flat.param_store.put(span.start, master))
            return
        local = flat.param_store.local() if self._on_cpu else None
        if local is not None:
            local[span.start : span.stop].copy_(master)
            return
        slot.out = self._memory(slot.out, self._chunk, flat.dtype)
        out = slot.out[: span.numel].copy_(master)
        slot.leaving.append(flat.param_store.put(span.start, out))

    def _fp32(self, grad: torch.Tensor, values: StepValues) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gradient in fp32 and what the kernel still has to divide it by.

        Itself, or a chunk's copy in a buffer that is made once, scaled on the way: the kernel then writes none back.
        """
        if grad.dtype == torch.float32:
            if grad.is_cuda:
                return grad, values.grad_scale
            # The CPU kernel is a third slower when it scales; the chunk is in cache, and the host may look at the scale.
            return (grad if values.grad_scale == 1 else grad.mul_(values.inverse_scale)), None
        self._scratch = self._memory(self._scratch, max(grad.numel(), UPDATE_CHUNK[self._where.type]), torch.float32)
        return torch.mul(grad, values.inverse_scale, out=self._scratch[: grad.numel()]), None
