"""Flats: the flat buffers of one rank, the slices it owns of them, and the tier of every piece. Pure integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offload.placement import HBM, KINDS, Placement, Spill
from zerocli.layout.constants import stream_chunk
from zerocli.layout.shards import Layout, Span, owned
from zerocli.layout.stage import Stage

FP32 = 4
"""Bytes of an element in fp32."""


def grad_width(width: int, accumulate: int, reduce: str) -> int:
    """Return the bytes of a gradient's element: of the compute dtype, or of fp32 if several are added up."""
    return width if accumulate == 1 and reduce == "compute" else FP32


@dataclass(frozen=True)
class Sizing:
    """What decides the sizes of an engine's buffers, beside the model."""

    stage: Stage
    world: int = 1
    """Data-parallel ranks."""
    num_states: int = 2
    """fp32 arrays of the optimizer, as long as the parameters; the master is not among them."""
    accumulate: int = 1
    reduce: str = "compute"
    bucket_nbytes: int = 32 << 20
    gather_buffers: int = 2
    staging_nbytes: int = 512 << 20
    device: str = "cuda"
    update_on_cpu: bool = False
    """Whether states off the device are updated by the CPU."""
    addressable: frozenset[str] = frozenset({"dram"})
    """Tiers whose memory the CPU can update in place."""

    def grad_width(self, width: int) -> int:
        """Return the bytes of a gradient's element."""
        return grad_width(width, self.accumulate, self.reduce)

    def wire_width(self, width: int) -> int:
        """Return the bytes of a gradient's element while it is reduced."""
        return FP32 if self.reduce == "fp32" else width

    def num_arrays(self, width: int) -> int:
        """Return the fp32 arrays beside the parameters, the master among them where parameters are narrower."""
        return self.num_states + (width < FP32)

    @property
    def chunk(self) -> int:
        """Elements of a chunk of states that pass through the update's slots."""
        return stream_chunk(self.staging_nbytes, self.num_states)


@dataclass(frozen=True)
class FlatSpec:
    """One flat buffer of a unit, as one rank has it."""

    unit: str
    layout: Layout
    width: int
    """Bytes of an element in the compute dtype."""
    own: Span
    """The slice that this rank owns."""
    held: Span
    """The span that this rank keeps optimizer states for: `own`, or all of it when the stage replicates them."""
    trainable: bool = True
    tiers: Mapping[str, str] = field(default_factory=dict)
    """Where each piece lies, by kind; filled by `place`."""

    @property
    def total(self) -> int:
        return self.layout.total

    @property
    def offloaded(self) -> bool:
        """Whether any of its states is kept off the device."""
        return any(tier != HBM for tier in self.tiers.values())

    def resident(self, sizing: Sizing) -> bool:
        """Whether its parameters are whole on the device at all times.

        A slice that is the whole buffer needs no gathering: one rank is the general case with a trivial slice.
        """
        return self.tiers["parameters"] == HBM and (not sizing.stage.parameters or sizing.world == 1)

    def pieces(self, sizing: Sizing) -> dict[str, int]:
        """Return the bytes of its pieces by kind: what placement moves."""
        sizes = {"parameters": self.own.numel * self.width}
        if self.trainable:
            sizes["gradients"] = self.own.numel * sizing.grad_width(self.width)
            sizes["optimizer"] = self.own.numel * FP32 * sizing.num_arrays(self.width)
        return sizes

    def chunks(self, numel: int) -> list[tuple[int, Span]]:
        """Return (group, span) of pieces of at most `numel` elements that tile `held`, counted from its start."""
        return [
            (group, span)
            for group, segment in self.layout.segments(self.held)
            for span in segment.shifted(-self.held.start).pieces(numel)
        ]


def flat_spec(
    unit: str, layout: Layout, width: int, stage: Stage, world: int, rank: int = 0, trainable: bool = True
) -> FlatSpec:
    """Return the flat of a layout as `rank` of `world` has it; its pieces have no place yet."""
    own = owned(layout.total, world, rank)
    held = own if stage.optimizer else Span(0, layout.total)
    return FlatSpec(unit, layout, width, own, held, trainable)


def place(flats: Iterable[FlatSpec], placement: Placement, sizing: Sizing) -> list[FlatSpec]:
    """Return the flats with the tier of every piece, kind by kind, in order; ValueError when the budgets are spent.

    An empty piece (the states of a rule that has none) needs no place: it stays with the device.
    """
    spills = {kind: Spill(kind, placement.of(kind)) for kind in KINDS}
    placed = []
    for flat in flats:
        sizes = flat.pieces(sizing)
        tiers = {kind: spills[kind].place(size) if size else HBM for kind, size in sizes.items()}
        placed.append(dataclasses.replace(flat, tiers=tiers))
    return placed
