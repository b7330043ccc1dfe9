"""Flats: the flat buffers of one rank, the slices it owns of them, and the tier of every piece. Integers only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offload.placement import HBM, KINDS, Placement, Spill
from zerocli.layout.codecs import GRAIN, encoded_nbytes
from zerocli.layout.constants import SPLIT_PIECE, UPDATE_CHUNK, stream_chunk
from zerocli.layout.shards import SHARD_ALIGN, Layout, Span, owned
from zerocli.layout.stage import Stage

FP32 = 4
"""Bytes per fp32 element."""
REMAINDER = 2
"""Bytes per element of a split master's remainder."""


NEARLY = 64
"""Flats share gather buffers if the smaller one lacks at most this part of itself: one 64th."""


@dataclass(frozen=True)
class Sizing:
    """What determines the sizes of an engine's buffers, apart from the model."""

    stage: Stage
    world: int = 1
    """Ranks over which states are partitioned."""
    num_states: int = 2
    """Number of the optimizer's fp32 arrays, each as long as the parameters; the master is not counted."""
    accumulate: int = 1
    reduce: str = "compute"
    bucket_nbytes: int = 32 << 20
    gather_buffers: int = 2
    staging_nbytes: int = 512 << 20
    device: str = "cuda"
    update_on_cpu: bool = False
    """Whether the CPU updates offloaded states."""
    cpu_share: float = 0.0
    """The share of offloaded states that the CPU updates while the device updates the others; 0: it takes no part."""
    addressable: frozenset[str] = frozenset({"dram"})
    """Tiers whose memory the CPU can update in place."""
    split_master: bool = False
    """Whether the master of narrower parameters is kept as a 16-bit remainder beside them, not as fp32."""
    keep_gradients: bool = True
    """Whether gradients on the device stay allocated between steps; else they exist from backward to the update."""
    fused_update: bool = False
    """Whether one kernel updates narrower parameters on a GPU, without scratch memory."""
    copies: int = 1
    """Groups of ranks that each keep a copy of partitioned parameters; 1: none does, beside the slices."""
    threads: int = 1
    """Threads that update on the CPU; a plan, which may be of another machine, counts the scratch memory of one."""

    def grad_width(self, width: int) -> int:
        """Return the bytes per gradient element: the compute dtype's, or fp32's if several are accumulated."""
        return width if self.accumulate == 1 and self.reduce == "compute" else FP32

    def wire_width(self, width: int) -> int:
        """Return the bytes per gradient element during reduction."""
        return FP32 if self.reduce == "fp32" else width

    def master_width(self, width: int) -> int:
        """Return the bytes per element of the master beside parameters of `width` bytes; fp32 ones need none."""
        if width >= FP32:
            return 0
        return REMAINDER if self.split_master else FP32

    def state_width(self, width: int) -> int:
        """Return the bytes per element of the optimizer's states and the master together."""
        return FP32 * self.num_states + self.master_width(width)

    def record_nbytes(self, width: int, numel: int) -> int:
        """Return the bytes of `numel` elements of master and states in one chunk of a record: whole fp32 words."""
        return -(-numel * self.state_width(width) // FP32) * FP32

    def update_chunk(self, width: int, device: str) -> int:
        """Return the elements of `width` bytes that are updated at a time on this type of device."""
        split = self.split_master and width < FP32 and device == "cpu"
        return min(UPDATE_CHUNK[device], SPLIT_PIECE * self.threads) if split else UPDATE_CHUNK[device]

    @property
    def chunk(self) -> int:
        """Elements per chunk of states that pass through the update's slots."""
        return stream_chunk(self.staging_nbytes, self.num_states)


@dataclass(frozen=True)
class FlatSpec:
    """One flat buffer of a unit, as one rank has it."""

    unit: str
    layout: Layout
    width: int
    """Bytes per element in the compute dtype."""
    own: Span
    """The slice that this rank owns."""
    held: Span
    """The span that this rank keeps optimizer states for: `own`, or all of it when the stage replicates them."""
    trainable: bool = True
    codec: str = ""
    """How its parameters are stored, if not in the compute dtype: see `zerocli.layout.codecs`."""
    tiers: Mapping[str, str] = field(default_factory=dict)
    """The tier of each piece, by kind; filled by `place`."""
    room: int = 0
    """Elements of the gather buffers that it shares with flats of nearly its size; 0: as many as it has."""

    @property
    def total(self) -> int:
        return self.layout.total

    @functools.cached_property
    def offloaded(self) -> bool:
        """Whether any of its states is offloaded."""
        return any(tier != HBM for tier in self.tiers.values())

    def resident(self, sizing: Sizing) -> bool:
        """Whether its parameters are whole on the device at all times.

        A slice that covers the whole buffer needs no gathering, so a single rank needs no special case.
        """
        if self.codec:
            return False
        return self.tiers["parameters"] == HBM and (not sizing.stage.parameters or sizing.world == 1)

    @property
    def own_nbytes(self) -> int:
        """Bytes of the parameters that this rank owns, as they are stored."""
        return encoded_nbytes(self.codec, self.own.numel) if self.codec else self.own.numel * self.width

    @property
    def staged_nbytes(self) -> int:
        """Bytes in which an encoded flat arrives before it is decoded; 0 if all of it is on the device already."""
        arrives = self.own.numel < self.total or self.tiers["parameters"] != HBM
        return encoded_nbytes(self.codec, self.total) if self.codec and arrives else 0

    @property
    def gather_size(self) -> tuple[int, int, int]:
        """What flats that share gather buffers have in common: elements, bytes per element, and staged bytes."""
        return max(self.room, self.total), self.width, self.staged_nbytes

    def pieces(self, sizing: Sizing) -> dict[str, int]:
        """Return the bytes of its pieces by kind; placement assigns a tier to each."""
        sizes = {"parameters": self.own_nbytes}
        if self.trainable:
            sizes["gradients"] = self.own.numel * sizing.grad_width(self.width)
            sizes["optimizer"] = self.own.numel * sizing.state_width(self.width)
        return sizes

    def chunks(self, numel: int) -> list[Span]:
        """Return pieces of at most `numel` elements that tile `held`; they count from its start."""
        return list(Span(0, self.held.numel).pieces(numel))


def flat_spec(
    unit: str,
    layout: Layout,
    width: int,
    stage: Stage,
    world: int,
    rank: int = 0,
    trainable: bool = True,
    codec: str = "",
) -> FlatSpec:
    """Return the flat of a layout for `rank` of `world`; its pieces have no tier yet.

    An encoded flat is whole on every rank unless the stage partitions parameters: nothing else needs a slice of it.
    """
    own = owned(layout.total, world, rank)
    if codec and not stage.parameters:
        own = Span(0, layout.total)
    held = own if stage.optimizer else Span(0, layout.total)
    return FlatSpec(unit, layout, width, own, held, trainable, codec)


def align_of(codec: str) -> int:
    """Return what the slices of ranks are multiples of."""
    return GRAIN if codec else SHARD_ALIGN


def place(flats: Iterable[FlatSpec], placement: Placement, sizing: Sizing) -> list[FlatSpec]:
    """Return the flats with the tier of every piece, kind by kind, in order; ValueError when the budgets are used up.

    An empty piece (an optimizer without states) stays on the device.
    """
    spills = {kind: Spill(kind, placement.of(kind)) for kind in KINDS}
    return in_rooms([_placed(flat, spills, sizing) for flat in flats], sizing)


def in_rooms(flats: Sequence[FlatSpec], sizing: Sizing) -> list[FlatSpec]:
    """Return the flats with the size of their gather buffers: that of a larger flat if it serves a smaller one too.

    An output layer with the last norm is a little larger than the embedding, and they are never used together. Encoded
    flats, which are those of equal blocks, have buffers of their own.
    """
    sizes = {flat.gather_size for flat in flats if not flat.codec and not flat.resident(sizing)}
    rooms: dict[tuple[int, int, int], int] = {}
    largest: dict[int, int] = {}
    for size in sorted(sizes, reverse=True):
        numel, width, _ = size
        if numel * (1 + 1 / NEARLY) < largest.get(width, 0) or width not in largest:
            largest[width] = numel
        rooms[size] = largest[width]
    found = [flat.total if flat.codec else rooms.get(flat.gather_size, flat.total) for flat in flats]
    pairs = zip(flats, found, strict=True)
    return [flat if room == flat.total else dataclasses.replace(flat, room=room) for flat, room in pairs]


def _placed(flat: FlatSpec, spills: Mapping[str, Spill], sizing: Sizing) -> FlatSpec:
    sizes = flat.pieces(sizing)
    tiers = {kind: spills[kind].place(size) if size else HBM for kind, size in sizes.items()}
    return dataclasses.replace(flat, tiers=tiers)


def place_alike(
    flats: Sequence[FlatSpec], times: int, spills: Mapping[str, Spill], sizing: Sizing
) -> Iterator[tuple[list[FlatSpec], int]]:
    """Yield (flats of one unit, number of units) of `times` equal units, placed as `place` would one after another."""
    sizes = [flat.pieces(sizing) for flat in flats]
    totals = {kind: sum(each.get(kind, 0) for each in sizes) for kind in spills}
    while times:
        placed = [_placed(flat, spills, sizing) for flat in flats]
        rooms = [spills[kind].room(nbytes) for kind, nbytes in totals.items() if nbytes]
        more = min([times - 1, *(room for room in rooms if room is not None)])
        # Those that follow are all in the tier where each kind is now; of this unit a part may be in the one before.
        now = {kind: spills[kind].repeat(more * nbytes) if nbytes else HBM for kind, nbytes in totals.items()}
        tiers = [{kind: now[kind] if size else HBM for kind, size in each.items()} for each in sizes]
        if [flat.tiers for flat in placed] == tiers:
            yield placed, more + 1
        else:
            yield placed, 1
            if more:
                again = zip(flats, tiers, strict=True)
                yield [dataclasses.replace(flat, tiers=each) for flat, each in again], more
        times -= more + 1
