"""Units: the parameters that are gathered, computed with and released together.

A unit's parameters live in flat buffers: one per dtype of the trainable ones, one per dtype of the frozen ones. Each
rank owns one contiguous, aligned slice of each. Parameters are views of the gathered flat, so no copy-out is needed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload.record import Record
from offload.store import Store
from zerocli.engine.comm import Pending
from zerocli.engine.guards.accept import watch_scripts
from zerocli.engine.guards.holders import is_own, live_tensors, on_storages, storage_of
from zerocli.engine.guards.parameters import (
    attach,
    count_change,
    edited,
    edited_in_place,
    expect_update,
    is_sharded,
    moved,
    note_values,
    release,
)
from zerocli.engine.streams import StreamEvent
from zerocli.engine.units.codecs import decode, encode
from zerocli.engine.units.gradient import FlatGradient
from zerocli.engine.units.master import REMAINDER
from zerocli.errors import Refused
from zerocli.layout.flats import FlatSpec
from zerocli.layout.shards import Layout, Span

MASTER = "master"
"""Name of the fp32 copy of parameters whose compute dtype is bf16 or fp16."""

_VERSION: Any = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]

REPLICATED = 1 << 16
"""Added to the group of parameters that are replicated over tensor-parallel ranks; they come last in a flat."""


class State(enum.Enum):
    """Where a flat's parameters are; each docstring says what that costs on the device."""

    RESIDENT = enum.auto()
    """Whole at all times, because not partitioned or there is one rank. Costs the whole flat."""
    SHARDED = enum.auto()
    """Parameters have no values. Costs this rank's slice, or nothing if the slice is offloaded."""
    GATHERING = enum.auto()
    """A gather is in flight; no values yet. Costs the slice and a buffer as large as the flat."""
    GATHERED = enum.auto()
    """Whole in a gather buffer. Costs the slice and a buffer as large as the flat."""


@dataclass(eq=False)
class Flat:
    """One flat buffer of a unit: its layout, this rank's slice, and where its states currently are."""

    unit: Unit
    spec: FlatSpec
    """Its layout, this rank's slices, and the tiers of its pieces."""
    parameters: list[nn.Parameter]
    dtype: torch.dtype
    """Compute dtype: the dtype of the gathered parameters."""

    resident: torch.Tensor | None = None
    """The whole buffer, if parameters are not partitioned."""
    shard: torch.Tensor | None = None
    """This rank's slice in the compute dtype, or encoded; a view of `resident` if that is set."""
    written: StreamEvent | None = None
    """The optimizer's last write to `shard`; a gather starts after it."""
    master: torch.Tensor | None = None
    """`held` in fp32; shares memory with the parameters if they are fp32. None if it is split or offloaded."""
    remainder: torch.Tensor | None = None
    """A split master's low bits of `held`, unless they are offloaded; the parameters are its high bits."""
    states: dict[str, torch.Tensor] = field(default_factory=dict)
    """Optimizer states of `held`, by name."""

    param_store: Store | None = None
    """`own` in the compute dtype, or encoded, if parameters are offloaded; `shard` is None then."""
    record: Record | None = None
    """Optimizer states, and the master if there is one, if they are offloaded."""

    buffer: torch.Tensor | None = None
    """The buffer that the parameters are currently views of; None while they are released."""
    guarded: bool = False
    """Whether its parameters have the classes of parameters.py; fake ones have not."""
    pending: Pending | None = None
    """A gather that is in flight."""
    num_changes: int = 0
    """How often an update, a load or a write has changed the parameters' values: older graphs are refused."""
    compared: int = 0
    """`own_versions` when all ranks had the same values last."""
    unread: bool = False
    """Whether a deferred update makes reads of the whole parameters wrong until the unit is used."""

    @property
    def state(self) -> State:
        """Where the parameters are now."""
        if self.resident is not None:
            return State.RESIDENT
        if self.buffer is not None:
            return State.GATHERED
        return State.SHARDED if self.pending is None else State.GATHERING

    @property
    def layout(self) -> Layout:
        return self.spec.layout

    @property
    def trainable(self) -> bool:
        return self.spec.trainable

    @property
    def codec(self) -> str:
        """How its parameters are stored; empty if in the compute dtype."""
        return self.spec.codec

    @property
    def own(self) -> Span:
        """The slice that this rank owns."""
        return self.spec.own

    def read_own(self, device: torch.device) -> torch.Tensor:
        """Return this rank's slice of the parameters in the compute dtype, on the device."""
        kept = self.shard
        if kept is None:
            assert self.param_store is not None
            kept = torch.empty(self.param_store.numel, dtype=self.param_store.dtype, device=device)
            self.param_store.fetch(0, kept).synchronize()
        if not self.codec:
            return kept
        decoded = torch.empty(self.own.numel, dtype=self.dtype, device=kept.device)
        decode(self.codec, kept, decoded)
        return decoded

    def write_own(self, values: torch.Tensor) -> None:
        """Overwrite this rank's slice of the parameters with values in the compute dtype."""
        stored = encode(self.codec, values) if self.codec else values
        if self.shard is not None:
            self.shard.copy_(stored)
        elif self.param_store is not None:
            self.param_store.put(0, stored.clone() if stored is values else stored).synchronize()

    @property
    def held(self) -> Span:
        """The span that this rank keeps optimizer states for."""
        return self.spec.held

    @property
    def replicated(self) -> int:
        """Offset of the first parameter replicated over tensor-parallel ranks; the flat's end if there is none."""
        return self.layout.start_of(REPLICATED)

    @property
    def offloaded(self) -> bool:
        """Whether any of its states is offloaded."""
        return self.spec.offloaded

    @property
    def split(self) -> bool:
        """Whether its master is split: see master.py."""
        return self.remainder is not None or (self.record is not None and REMAINDER in self.record.arrays)

    @property
    def held_parameters(self) -> torch.Tensor | None:
        """`held` in the compute dtype, on the device; None if it is offloaded."""
        return self.shard if self.held == self.own else self.resident

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of its tensors on the device; of several on one storage the first counts."""
        unit = self.unit.name or "rest"
        for category, tensor in (
            ("parameters", self.resident),
            ("parameters", self.shard),
            ("gradients", self.gradient.whole),
            ("gradients", self.gradient.held),
            ("gradients", self.gradient.to_free),
            ("optimizer_states", self.master),
            ("optimizer_states", self.remainder),
            *(("optimizer_states", state) for state in self.states.values()),
        ):
            if tensor is not None and tensor.numel():
                yield category, f"{unit} {category}", tensor

    def scalars(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the one-element placeholder of released parameters."""
        if self._placeholders:
            yield "buffers", "released parameters", self._placeholders[0]

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters as views of a buffer of the flat's length."""
        return [buffer[e.offset : e.offset + e.numel].view(e.shape) for e in self.layout.entries]

    def attach(self, buffer: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
        """Make the parameters views of `buffer`."""
        if self.guarded:
            self.refuse_swapped()
        for parameter, view in zip(self.parameters, views, strict=True):
            attach(parameter, view)
            note_values(parameter)
        self.buffer = buffer

    def refuse_swapped(self) -> None:
        """Raise Refused if a parameter's object has become another tensor."""
        for entry, parameter in zip(self.layout.entries, self.parameters, strict=True):
            if not is_sharded(parameter):
                raise Refused(
                    f"{entry.name} was exchanged with another tensor after shard, as torch.utils.swap_tensors does: "
                    f"copy values into it inside `with engine.gathered({entry.name!r}, write=True)`"
                )

    def detach(self) -> None:
        """Leave the parameters with their shape but no values: reading one raises an error with its name."""
        watch_scripts()
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            release(parameter, placeholder)
        self.buffer = None

    def edited(self) -> list[str]:
        """Return the names of parameters whose values may have been changed in place."""
        return [e.name for e, p in zip(self.layout.entries, self.parameters, strict=True) if edited(p)]

    def restore_moved(self) -> None:
        """Copy parameters that were moved to other memory back into the flat, keeping their new values."""
        memory = self.resident if self.resident is not None else self.buffer
        assert memory is not None
        if self.guarded:
            self.refuse_swapped()
        for entry, parameter in zip(self.layout.entries, self.parameters, strict=True):
            if moved(parameter):
                view = memory[entry.offset : entry.offset + entry.numel].view(entry.shape)
                self._refuse_kept(entry.name, view)
                view.copy_(parameter.detach())
                attach(parameter, view)
                note_values(parameter, kept=True)

    def _refuse_kept(self, name: str, view: torch.Tensor) -> None:
        """Raise Refused if the user keeps the old values of a parameter whose `data` was replaced."""
        spans = {(tensor.data_ptr(), tensor.nbytes) for _, _, tensor in self.holdings()}
        start, stop = view.data_ptr(), view.data_ptr() + view.nbytes
        for tensor in on_storages(live_tensors(), {storage_of(view)}).get(storage_of(view), ()):
            at = tensor.data_ptr()
            known = tensor is view or is_own(tensor) or is_sharded(tensor) or (at, tensor.nbytes) in spans
            if not known and start <= at and at + tensor.nbytes <= stop:
                raise Refused(
                    f"{name}.data was replaced while another tensor keeps its old values, which lie in the engine's "
                    "memory: keep a copy of them (p.data.clone()), and copy new values in by p.data.copy_(values)"
                )

    def changed_while_whole(self) -> list[str]:
        """Return the names of gathered parameters that were changed; `p.data` and moved ones are compared by value."""
        if not any(edited(p) or moved(p) for p in self.parameters):
            return []
        assert self.buffer is not None
        rows = list(zip(self.layout.entries, self.parameters, self.views(self.buffer), strict=True))
        if elsewhere := [e.name for e, p, view in rows if moved(p) and not torch.equal(p.detach(), view)]:
            return elsewhere
        if not (names := self.edited()):
            return []
        known = [e.name for e, p, _ in rows if edited_in_place(p) and not moved(p)]
        if known or (self.shard is None and self.param_store is None):
            return known
        kept = self.read_own(self.buffer.device)
        gathered = self.buffer[self.own.start : self.own.stop]
        return [] if torch.equal(gathered.view(torch.uint8), kept.view(torch.uint8)) else names

    def note_values(self, compared: bool = True) -> None:
        """Record the parameters' current values as known, so that later edits are detected.

        `compared` if all ranks have the same.
        """
        for parameter in self.parameters:
            note_values(parameter, kept=self.resident is not None)
        if compared:
            self.compared = self.own_versions()

    def own_versions(self) -> int:
        """Return the sum of the parameters' version counters, without what the engine has added to them."""
        with torch._C.DisableTorchFunctionSubclass():  # a user's class may have functions of its own
            counted: int = sum(map(_VERSION, self.parameters))
        return counted - len(self.parameters) * self.num_changes

    def may_differ(self, data_read: bool) -> bool:
        """Whether this rank may have edited whole parameters since `compared`; `data_read`: also through `p.data`."""
        if self.resident is None:
            return False
        return self.own_versions() != self.compared or (data_read and bool(self.edited()))

    def note_change(self) -> None:
        """Record that the parameters' values were changed: autograd refuses graphs that were made with the old ones."""
        self.num_changes += 1
        if self.resident is not None:
            count_change(self.parameters)

    def forbid_reads(self, unread: bool) -> None:
        """Refuse reads of whole parameters until a deferred update is done; not `unread`: allow them again."""
        if self.unread != unread and self.resident is not None:
            self.unread = unread
            for parameter in self.parameters:
                expect_update(parameter, unread)

    def __post_init__(self) -> None:
        self.gradient = FlatGradient(self)
        device = self.parameters[0].device
        kind = torch.device("cpu") if device.type == "meta" else device
        fill = float("nan") if self.dtype.is_floating_point else 0
        one = torch.full((1,), fill, dtype=self.dtype, device=kind)
        # NaN, so that code which bypasses the check for released parameters never reads stale values.
        self._placeholders = [one.expand(entry.shape) if entry.shape else one[0] for entry in self.layout.entries]


class Unit:
    """A module whose parameters are gathered and released together."""

    def __init__(self, index: int, name: str, module: nn.Module) -> None:
        self.index, self.name, self.module = index, name, module
        self.flats: list[Flat] = []

    @property
    def trainable(self) -> list[Flat]:
        """Its flats of trainable parameters, one per dtype."""
        return [flat for flat in self.flats if flat.trainable]

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.name or "the rest"

    def __repr__(self) -> str:
        return f"Unit({self.name or 'rest'})"
