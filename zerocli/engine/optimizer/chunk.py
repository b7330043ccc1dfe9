"""The update of a chunk of a flat: its parts are fetched into a slot if need be, updated and written back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from offload.record import UNIT
from tiers.transfer import Transfer
from zerocli.engine.guards.holders import mark_own
from zerocli.engine.optimizer.counts import Part
from zerocli.engine.optimizer.optim import FlatOptimizer, StepValues
from zerocli.engine.optimizer.piece import PieceUpdate, empty_beside, fused_update
from zerocli.engine.streams import StreamEvent, Waits
from zerocli.engine.units.master import REMAINDER, narrow
from zerocli.engine.units.unit import MASTER, Flat
from zerocli.layout.flats import Sizing
from zerocli.layout.shards import Span

if TYPE_CHECKING:  # needs triton
    from zerocli.engine.optimizer.update_kernels import Parts


@dataclass(eq=False)
class Chunk:
    """One chunk of a flat, with its span within what this rank holds."""

    flat: Flat
    span: Span
    parts: tuple[Part, ...]
    """What to update, relative to the chunk's start."""
    last: bool
    """Whether it is the last chunk of its flat."""
    passing: frozenset[str] = frozenset()
    """Names of the parts that are copied through a slot instead of updated in place: see `layout.slot_widths`."""
    on_cpu: bool = False
    """Whether the CPU updates it while the device updates others: see cpu_part.py."""
    arrays: dict[str, torch.Tensor] = field(default_factory=dict)
    """What it has in memory where it is updated in place, made on first use."""
    target: torch.Tensor | None = None
    """Its parameters, likewise."""
    kernel_parts: Parts | None = None
    """Its parts for the fused update, made on first use."""


class Slot:
    """Buffers for one chunk at a time."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, str], torch.Tensor] = {}
        """By name and device type."""
        self.parts: dict[str, torch.Tensor] = {}
        """The current chunk's parts in the buffers: record, grad, master or parameters."""
        self.arriving: list[Transfer] = []
        self.leaving: list[Transfer] = []
        """Write-backs that still read the buffers."""
        self.used: StreamEvent | None = None
        """The end of an update that reads the buffers and writes nothing back."""


class ChunkUpdate:
    """Updates chunks wherever their states are."""

    def __init__(
        self, rule: FlatOptimizer, device: torch.device, sizing: Sizing, pieces: PieceUpdate, waits: Waits
    ) -> None:
        self._device, self._sizing, self._pieces, self._waits = device, sizing, pieces, waits
        self.on_cpu = sizing.update_on_cpu
        self.before_update: Callable[[Flat], None] = lambda flat: None
        """Called before a flat's states change, on the update's stream: a checkpoint may still be reading them."""
        self._fused = fused_update(rule) if sizing.fused_update else None
        self._values: dict[str, StepValues] = {}
        """By device type. The device may read them until the next step replaces them."""
        self.into: tuple[Flat, torch.Tensor] | None = None
        """The flat whose new parameters are also written to memory of a gather, and that memory."""

    def begin(self, values: StepValues, flats: Iterable[Flat]) -> None:
        """Take a step's values to where these flats are updated."""
        self._values = {place.type: values.to(place) for place in {self.place(flat) for flat in flats}}
        if self._fused is not None and self._device.type in self._values:
            self._fused.begin(self._values[self._device.type])

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's numbers as the fused update has them: a row for each group, and the gradients' factor."""
        assert self._fused is not None
        return self._fused.table, self._fused.factor

    def place(self, flat: Flat) -> torch.device:
        """Return the device that updates a flat: the CPU if its states are offloaded and `on_cpu` is set."""
        return torch.device("cpu") if self.on_cpu and flat.record is not None else self._device

    def fuses(self, flat: Flat) -> bool:
        """Whether the fused update updates the flat."""
        return self._fused is not None and self.place(flat).type == "cuda" and flat.dtype != torch.float32

    def fetch(self, chunk: Chunk, slot: Slot) -> None:
        """Start fetching a chunk's parts into the slot, after the previous chunk's update and write-back."""
        flat, span = chunk.flat, chunk.span
        for transfer in slot.leaving:
            self._wait_for_host(transfer)
            transfer.wait()
        if slot.used is not None:
            slot.used.wait()
        slot.leaving, slot.arriving, slot.parts, slot.used = [], [], {}, None
        if not chunk.parts:
            return
        if "record" in chunk.passing:
            assert flat.record is not None
            memory = self._take(chunk, slot, "record", UNIT, flat.record.units(span.start, span.stop))
            slot.arriving.append(flat.record.fetch(span.start, span.stop, memory))
        # "master": in fp32 the parameters are the master; "parameters": they are a part of it where it is split.
        stores = {"grad": flat.gradient.store, "master": flat.param_store}
        for name, store in (stores | {"parameters": flat.param_store if flat.split else None}).items():
            if name in chunk.passing and store is not None:
                memory = self._take(chunk, slot, name, store.dtype, span.numel)
                slot.arriving.append(store.fetch(span.start, memory))

    def _wait_for_host(self, transfer: Transfer) -> None:
        """Block the host until its part of a transfer has ended: a slow disk is no slow optimizer."""
        if transfer.holds_host:
            with self._waits.waiting("transfers"):
                transfer.wait_for_host()

    def _take(self, chunk: Chunk, slot: Slot, name: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        place = self.place(chunk.flat)
        held = slot.buffers.get((name, place.type))
        if held is None or held.numel() < numel or held.dtype != dtype:
            held = None
            slot.buffers.pop((name, place.type), None)  # freed before the larger one is made
            held = slot.buffers[name, place.type] = empty_beside(self._device, numel, dtype, place)
        slot.parts[name] = held[:numel]
        return slot.parts[name]

    def update(self, chunk: Chunk, slot: Slot) -> None:
        """Update a chunk once its parts have arrived, and start writing them back."""
        if not chunk.parts:
            return
        flat, span, place = chunk.flat, chunk.span, self.place(chunk.flat)
        self.before_update(flat)
        for transfer in slot.arriving:
            self._wait_for_host(transfer)
            # The CPU computes at once; no stream orders it after the transfer.
            transfer.wait() if place == self._device else transfer.synchronize()
        if not flat.offloaded and not chunk.arrays:
            chunk.arrays, chunk.target = self._arrays(chunk, slot), self._target(chunk, slot)
            mark_own(*chunk.arrays.values(), *(() if chunk.target is None else (chunk.target,)))
        arrays = chunk.arrays or self._arrays(chunk, slot)
        target = chunk.target if chunk.arrays else self._target(chunk, slot)
        grad = self._grad(chunk, slot)
        if (
            "parameters" in slot.parts
            and MASTER in arrays
            and sum(part.numel for part, _, _ in chunk.parts) < span.numel
        ):
            assert target is not None  # the whole chunk is written back, including parameters that are not updated
            target.copy_(narrow(arrays[MASTER], flat.dtype))
        values = self._values[place.type]
        if self._fused is not None and self.fuses(flat):
            assert target is not None
            if chunk.kernel_parts is None:
                chunk.kernel_parts = self._fused.parts(chunk.parts)
            master = arrays[REMAINDER] if REMAINDER in arrays else arrays[MASTER]
            self._fused.update(target, master, grad, arrays, values, chunk.kernel_parts)
        else:
            # Pieces that fit the cache save memory traffic. A GPU updating offloaded states waits for the host link
            # anyway, so there the chunk is updated whole, with fewer launches.
            cached = place.type == "cpu" or not flat.offloaded
            if self._pieces.is_compiled(grad, target, values):  # no scratch memory, unless to copy from another device
                cached = any(each.device != place for each in (target, arrays.get(MASTER)) if each is not None)
            numel = self._sizing.update_chunk(flat.spec.width, place.type) if cached else span.numel
            for part, group, history in chunk.parts:
                at = values.at(history)
                for piece in part.pieces(numel):
                    where = slice(piece.start, piece.stop)
                    self._pieces.update(where, arrays, grad, target, values, values.groups[group], at)
        self._send_back(chunk, slot)

    def _send_back(self, chunk: Chunk, slot: Slot) -> None:
        """Start writing back the parts in the slot; parts updated in place are only marked as changed."""
        flat, span = chunk.flat, chunk.span
        if flat.record is not None and "record" in slot.parts:
            slot.leaving.append(flat.record.put(span.start, span.stop, slot.parts["record"]))
        elif flat.record is not None:
            flat.record.changed(span.start, span.stop)
        changed = slot.parts.get("parameters", slot.parts.get("master"))
        if self.into is not None and self.into[0] is flat and changed is not None:
            self.into[1][span.start : span.stop].copy_(changed)
        if flat.param_store is not None and changed is not None:
            slot.leaving.append(flat.param_store.put(span.start, changed))
        elif flat.param_store is not None:
            flat.param_store.changed(span.start, span.stop)
        if slot.parts and not slot.leaving:  # only gradients passed through it
            slot.used = StreamEvent(self._device)

    def _arrays(self, chunk: Chunk, slot: Slot) -> dict[str, torch.Tensor]:
        """Return the chunk's master and states, in the memory where they are updated."""
        flat, span = chunk.flat, chunk.span
        part = slice(span.start, span.stop)
        arrays = {name: array[part] for name, array in flat.states.items()}
        if flat.record is not None:
            memory = slot.parts.get("record")
            if memory is None:
                memory = flat.record.local(span.start, span.stop)
            arrays |= flat.record.split(span.start, span.stop, memory)
        if flat.remainder is not None:
            arrays[REMAINDER] = flat.remainder[part]
        elif MASTER not in arrays and not flat.split:
            arrays[MASTER] = flat.master[part] if flat.master is not None else slot.parts["master"]
        return arrays

    def _grad(self, chunk: Chunk, slot: Slot) -> torch.Tensor:
        flat, span = chunk.flat, chunk.span
        if flat.gradient.held is not None:
            whole = span.numel == flat.gradient.held.numel() and not self.on_cpu
            return flat.gradient.held if whole else flat.gradient.held[span.start : span.stop].to(self.place(flat))
        if "grad" in slot.parts:
            return slot.parts["grad"]
        assert flat.gradient.store is not None
        return flat.gradient.store.local(span.start, span.stop)

    def _target(self, chunk: Chunk, slot: Slot) -> torch.Tensor | None:
        """Return the memory of the chunk's parameters (compute dtype); None if the master is the parameters."""
        flat, span = chunk.flat, chunk.span
        if flat.dtype == torch.float32:
            return None
        if flat.param_store is None:
            assert flat.held_parameters is not None
            return flat.held_parameters[span.start : span.stop]
        if "parameters" not in chunk.passing:
            return flat.param_store.local(span.start, span.stop)
        if "parameters" in slot.parts:  # fetched: they are a part of the master
            return slot.parts["parameters"]
        return self._take(chunk, slot, "parameters", flat.dtype, span.numel)
