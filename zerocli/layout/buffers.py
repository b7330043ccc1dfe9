"""Buffers: a specification of everything that an engine keeps from step to step.

The engine allocates these, a plan adds them up and a profile names them; sizes are computed nowhere else. Of the
activations only the checkpoint arena is here; a plan replays the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from offload.placement import HBM
from zerocli.layout.codecs import scratch_nbytes
from zerocli.layout.constants import CPU_GROUP, LEAST_CPU_SHARE, MAX_BUCKETS, NUM_CPU_COPIES, NUM_SLOTS
from zerocli.layout.flats import FP32, FlatSpec, Sizing
from zerocli.layout.shards import SHARD_ALIGN, Entry

BUCKETS, BUCKET_SUMS = "reduction buckets", "sums of buckets"
"""Names of the buckets, and of the buffers in which offloaded gradients are added up."""
COPIES = "copies in groups"
"""Name of this rank's parts of the copies of parameters that its group gathers from."""
DECODING = "scratch of decoding"
"""Name of the memory in which encoded parameters are decoded, a part at a time."""
CPU_COPIES = "copies for the CPU's part of the update"
"""Name of the host memory for gradients and parameters of the device that the CPU takes a part in updating."""
WRITTEN_SLOTS = "update slots of parameters"
"""Buffers that the update only writes; it makes them itself, where others are made to fetch into."""
SPLIT_NBYTES = 12
"""Bytes per element that splitting a master of a whole update allocates: a copy, both parts, and its rounded values."""
SlotKey = tuple[str, int, str]
"""The device of a buffer of the update's slots, the slot's number, and what is in it."""


@dataclass(frozen=True)
class Spec:
    """One buffer: its category, name and size."""

    category: str
    name: str
    numel: int
    width: int
    """Bytes per element."""
    tier: str = HBM

    @property
    def nbytes(self) -> int:
        return self.numel * self.width


def persistent(units: Sequence[Sequence[FlatSpec]], sizing: Sizing) -> list[Spec]:
    """Return all buffers that a rank keeps, on its device and on other tiers, after its first training step.

    `units` are the flats of each unit, in the order in which a forward uses them.
    """
    flats = [flat for unit in units for flat in unit]
    trainable = [flat for flat in flats if flat.trainable]
    return [
        *(spec for flat in flats for spec in states(flat, sizing)),
        *gradient_arenas(trainable, sizing),
        *gather_buffers(units, sizing),
        *buckets(trainable, sizing),
        *update_slots(trainable, sizing),
        *update_scratch(trainable, sizing),
        *cpu_copies(trainable, sizing),
    ]


# -- model states ------------------------------------------------------------------------------------------------------


def states(flat: FlatSpec, sizing: Sizing) -> Iterator[Spec]:
    """Yield a flat's model states, except gradients that share an arena with other flats."""
    yield parameters(flat, sizing)
    if has_copy(flat, sizing):
        yield Spec("gathered", COPIES, flat.own_nbytes * sizing.copies, 1)
    if flat.trainable:
        yield from optimizer_states(flat, sizing)
        if sizing.stage.gradients and (sizing.keep_gradients or flat.tiers["gradients"] != HBM):
            yield gradients(flat, sizing)


def parameters(flat: FlatSpec, sizing: Sizing) -> Spec:
    """Return a flat's parameters: the whole flat if it is resident, else the slice that this rank owns."""
    if flat.codec:
        return Spec("parameters", f"{flat.unit} parameters", flat.own_nbytes, 1, flat.tiers["parameters"])
    numel = flat.total if flat.resident(sizing) else flat.own.numel
    return Spec("parameters", f"{flat.unit} parameters", numel, flat.width, flat.tiers["parameters"])


def has_copy(flat: FlatSpec, sizing: Sizing) -> bool:
    """Whether each group of ranks keeps a copy of the flat: of parameters that are partitioned and on the device."""
    return sizing.copies > 1 and sizing.stage.parameters and flat.tiers["parameters"] == HBM


def optimizer_states(flat: FlatSpec, sizing: Sizing) -> Iterator[Spec]:
    """Yield a flat's master and states: separate buffers on the device, a single block on any other tier."""
    tier, name = flat.tiers["optimizer"], f"{flat.unit} optimizer_states"
    if tier == HBM:
        for width in (sizing.master_width(flat.width), *[FP32] * sizing.num_states):
            if width:
                yield Spec("optimizer_states", name, flat.held.numel, width)
    elif sizing.state_width(flat.width):
        chunks = [sizing.record_nbytes(flat.width, n) * count for count, n in chunk_runs(flat, sizing.chunk)]
        yield Spec("optimizer_states", name, sum(chunks) // FP32, FP32, tier)


def gradients(flat: FlatSpec, sizing: Sizing) -> Spec:
    """Return a flat's gradient: of the span that this rank holds if gradients are partitioned, else the whole."""
    numel = flat.held.numel if sizing.stage.gradients else flat.total
    width = sizing.grad_width(flat.width)
    return Spec("gradients", f"{flat.unit} gradients", numel, width, flat.tiers["gradients"])


def gradient_arenas(flats: Sequence[FlatSpec], sizing: Sizing) -> Iterator[Spec]:
    """Yield the arenas of unpartitioned gradients, one per dtype, so that adjacent gradients are reduced together.

    There are none if gradients do not stay allocated: each flat then has its own from backward to the update.
    """
    if not sizing.stage.gradients and sizing.keep_gradients:
        for width in dict.fromkeys(sizing.grad_width(flat.width) for flat in flats):
            total = sum(flat.total for flat in flats if sizing.grad_width(flat.width) == width)
            yield Spec("gradients", "gradients", total, width)


# -- gathering and reducing --------------------------------------------------------------------------------------------


def gather_limits(flats: Sequence[FlatSpec], sizing: Sizing) -> dict[tuple[int, int, int], int]:
    """Return the maximum number of gather buffers, by `FlatSpec.gather_size`."""
    sharers = Counter(flat.gather_size for flat in flats if not flat.resident(sizing))
    return {size: min(sizing.gather_buffers, count) for size, count in sharers.items()}


def gather_buffers(units: Sequence[Sequence[FlatSpec]], sizing: Sizing) -> Iterator[Spec]:
    """Yield the gather buffers of units that are used in this order: for each flat size, as many as are in use at once.

    Those are of the unit that computes and the ones prefetched after it. In backward the unit before may still be
    there. An embedding and a head of nearly equal size are far apart, and take turns in one buffer. A buffer of encoded
    flats that are not on the device has one beside it in which they arrive.
    """
    most: Counter[tuple[int, int, int]] = Counter()
    frozen = next((at for at, unit in enumerate(units) if any(flat.trainable for flat in unit)), len(units))
    for first in range(len(units)):  # nothing that is frozen before all that is trained is needed in backward
        near = units[first : first + sizing.gather_buffers + (first >= frozen)]
        most |= Counter(flat.gather_size for unit in near for flat in unit)
    for size, limit in gather_limits([flat for unit in units for flat in unit], sizing).items():
        numel, width, staged = size
        for _ in range(min(limit, most[size])):
            yield Spec("gathered", gather_name(numel), numel, width)
            if staged:
                yield Spec("gathered", staged_name(staged), staged, 1)
    encoded = (flat for unit in units for flat in unit if flat.codec)
    if scratch := max((scratch_nbytes(flat.codec, flat.total, sizing.device) for flat in encoded), default=0):
        yield Spec("buffers", DECODING, scratch, 1)


def gather_name(numel: int) -> str:
    """Return the name of gather buffers of `numel` elements."""
    return f"gather buffers of {numel} elements"


def staged_name(nbytes: int) -> str:
    """Return the name of the buffers in which encoded flats arrive."""
    return f"encoded gathers of {nbytes} bytes"


def bucket_numel(flats: Sequence[FlatSpec], sizing: Sizing, wire: int) -> int:
    """Return the elements of a reduction bucket for gradients that are reduced at `wire` bytes per element."""
    largest = max(flat.total for flat in flats if sizing.wire_width(flat.width) == wire)
    return min(largest, max(sizing.bucket_nbytes // wire, sizing.world * SHARD_ALIGN))


def bucket_limit(flats: Sequence[FlatSpec], sizing: Sizing) -> int:
    """Return the maximum number of buckets of one kind.

    Two, used alternately; with offloaded gradients, enough for one unit to be in flight while the next one fills.
    """
    if all(flat.tiers["gradients"] == HBM for flat in flats):
        return 2
    smallest = min(bucket_numel(flats, sizing, wire) for wire in _wires(flats, sizing))
    return min(MAX_BUCKETS, -(-max(flat.total for flat in flats) // smallest) + 1)


def bucket_width(total: int, world: int, numel: int) -> int:
    """Return how many elements of each rank's slice a bucket of `numel` elements carries."""
    return max(SHARD_ALIGN, min(total // world, numel // world // SHARD_ALIGN * SHARD_ALIGN))


def buckets(flats: Sequence[FlatSpec], sizing: Sizing) -> Iterator[Spec]:
    """Yield the reduction buckets, and the buckets in which offloaded gradients are accumulated.

    There are none if gradients are not partitioned. A single rank needs none for gradients that stay on its device.
    """
    if not sizing.stage.gradients:
        return
    limit = bucket_limit(flats, sizing)
    for wire in _wires(flats, sizing):
        numel = bucket_numel(flats, sizing, wire)
        alike = [flat for flat in flats if sizing.wire_width(flat.width) == wire]
        leaving = [flat for flat in alike if flat.tiers["gradients"] != HBM]
        for _ in range(min(limit, num_buckets(alike if sizing.world > 1 else leaving, sizing, numel))):
            yield Spec("buffers", BUCKETS, numel, wire)
        for width in dict.fromkeys(sizing.grad_width(flat.width) for flat in leaving):
            if sizing.accumulate > 1 or width != wire:
                adding = [flat for flat in leaving if sizing.grad_width(flat.width) == width]
                for _ in range(min(limit, num_buckets(adding, sizing, numel))):
                    yield Spec("buffers", BUCKET_SUMS, numel // sizing.world, width)


def num_buckets(flats: Sequence[FlatSpec], sizing: Sizing, numel: int) -> int:
    """Return the number of buckets of `numel` elements that the flats are cut into."""
    return sum(-(-flat.total // sizing.world // bucket_width(flat.total, sizing.world, numel)) for flat in flats)


def _wires(flats: Sequence[FlatSpec], sizing: Sizing) -> list[int]:
    return list(dict.fromkeys(sizing.wire_width(flat.width) for flat in flats))


# -- the update --------------------------------------------------------------------------------------------------------


def update_device(flat: FlatSpec, sizing: Sizing) -> str:
    """Return the type of device that updates a flat: the CPU for offloaded states if that was chosen."""
    return "cpu" if sizing.update_on_cpu and flat.tiers["optimizer"] != HBM else sizing.device


def fuses(flat: FlatSpec, sizing: Sizing) -> bool:
    """Whether one kernel updates the flat's parameters, master and states: narrower parameters on a GPU."""
    return sizing.fused_update and flat.width < FP32 and update_device(flat, sizing) != "cpu"


def takes_turns(flat: FlatSpec, sizing: Sizing) -> bool:
    """Whether the CPU updates a part of the flat's chunks where they are, and the device the others."""
    near = all(tier == HBM or tier in sizing.addressable for tier in flat.tiers.values())
    return sizing.cpu_share > 0 and near and flat.tiers["optimizer"] != HBM and fuses(flat, sizing)


def share_of_cpu(link: float, cpu: float, width: int, away: Collection[str], sizing: Sizing) -> float:
    """Return the share of the update with which the CPU takes as long as the link: 0 if it would be a small one.

    `link` and `cpu` are seconds of a parameter: for copies of its states in both directions, and for its update by the
    CPU. The kinds in `away` are in host memory. The link also carries what either device has to get of the other kinds.
    """
    states = 2 * sizing.state_width(width)
    grad, parameters = sizing.grad_width(width), "parameters" in away
    streamed = states + grad * ("gradients" in away) + width * parameters * (2 if sizing.split_master else 1)
    byte, kept = link / states, copied_for_cpu(width, away, sizing) + width * parameters
    cpu *= slowed_by_copies(width, away, sizing)
    share = min(1.0, byte * streamed / max(1e-30, cpu + byte * (streamed - kept)))
    return share if share >= LEAST_CPU_SHARE else 0.0


def copied_for_cpu(width: int, away: Collection[str], sizing: Sizing) -> int:
    """Return the bytes of a parameter that are copied between the devices for its update by the CPU."""
    return sizing.grad_width(width) * ("gradients" not in away) + width * 2 * ("parameters" not in away)


def slowed_by_copies(width: int, away: Collection[str], sizing: Sizing) -> float:
    """Return how much longer the CPU takes for what is copied for it, which passes through its memory once more."""
    reads = sizing.state_width(width) + sizing.grad_width(width) + width * sizing.split_master
    return 1 + copied_for_cpu(width, away, sizing) / (reads + sizing.state_width(width) + width)


class Turns:
    """How many of each flat's first chunks the CPU updates, flat by flat in the order of the update."""

    def __init__(self, sizing: Sizing) -> None:
        self._sizing = sizing
        self._owed = 0.0
        """Chunks that are the CPU's by its share and have not been given to it."""

    def take(self, flat: FlatSpec, num_chunks: int) -> int:
        """Return how many of the next flat's chunks the CPU takes."""
        if not takes_turns(flat, self._sizing):
            return 0
        self._owed += num_chunks * self._sizing.cpu_share
        taken = min(num_chunks, round(self._owed))
        self._owed -= taken
        return taken


def cpu_copies(flats: Sequence[FlatSpec], sizing: Sizing) -> Iterator[Spec]:
    """Yield the buffers of host memory through which gradients and parameters of the device pass for the CPU."""
    most = 0
    for flat in flats:
        if takes_turns(flat, sizing):
            widths = {"gradients": sizing.grad_width(flat.width), "parameters": flat.width}
            width = sum(width for kind, width in widths.items() if flat.tiers[kind] == HBM)
            most = max(most, min(CPU_GROUP * sizing.chunk, flat.held.numel) * width)
    if most:
        yield from [Spec("buffers", CPU_COPIES, most, 1, "dram")] * NUM_CPU_COPIES


def slot_widths(flat: FlatSpec, sizing: Sizing) -> dict[str, int]:
    """Return the bytes per element in each buffer of a slot, by name; what is updated in place needs no buffer.

    `record` is the master and the states together, `grad` the gradient, `master` fp32 parameters that are fetched and
    written back, `parameters` narrower ones; they are fetched too if they are a part of the master.
    """

    def passes(kind: str) -> bool:
        tier = flat.tiers[kind]
        in_place = sizing.update_on_cpu and flat.tiers["optimizer"] != HBM and tier in sizing.addressable
        return tier != HBM and not in_place

    widths = {}
    if passes("optimizer"):
        widths["record"] = sizing.state_width(flat.width)
    if passes("gradients"):
        widths["grad"] = sizing.grad_width(flat.width)
    if flat.width == FP32 and flat.tiers["parameters"] != HBM:
        widths["master"] = FP32
    if flat.width < FP32 and passes("parameters"):
        widths["parameters"] = flat.width
    return widths


def update_slots(flats: Sequence[FlatSpec], sizing: Sizing) -> Iterator[Spec]:
    """Yield the buffers of the update's slots, each as large as its largest chunk; `flats` are in update order."""
    yield from dict(growing_slots(flats, sizing)).values()


def growing_slots(flats: Sequence[FlatSpec], sizing: Sizing) -> Iterator[tuple[SlotKey, Spec]]:
    """Yield each buffer of the update's slots whenever a chunk needs it larger; the smaller one is freed before."""
    most: dict[SlotKey, int] = {}
    known: dict[int, list[tuple[int, list[tuple[str, int]]]]] = {}  # flats of equal units are one object
    turns, at = Turns(sizing), 0
    for flat in (flat for flat in flats if flat.offloaded):
        if id(flat) not in known:
            known[id(flat)] = list(_slot_sizes(flat, sizing))
        device = update_device(flat, sizing)
        first = turns.take(flat, sum(count for count, _ in known[id(flat)]))
        for count, sizes in known[id(flat)]:
            count, first = max(0, count - first), max(0, first - count)
            for slot in range(at, at + min(count, NUM_SLOTS)):
                for name, nbytes in sizes:
                    key = (device, slot % NUM_SLOTS, name)
                    if nbytes > most.get(key, 0):
                        most[key] = nbytes
                        written = name == "parameters" and not sizing.split_master
                        title = WRITTEN_SLOTS if written else "update slots"
                        yield key, Spec("buffers", title, nbytes, 1, _tier(device, sizing))
            at += count


def _slot_sizes(flat: FlatSpec, sizing: Sizing) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Yield (count, bytes of each buffer of a slot by name) of each run of equal chunks of a flat."""
    widths = slot_widths(flat, sizing)
    for count, numel in chunk_runs(flat, sizing.chunk):
        record = sizing.record_nbytes(flat.width, numel)
        yield count, [(name, record if name == "record" else numel * width) for name, width in widths.items()]


def chunk_runs(flat: FlatSpec, numel: int) -> Iterator[tuple[int, int]]:
    """Yield (count, size) of each run of equal chunks of a flat."""
    whole, rest = divmod(flat.held.numel, numel)
    if whole:
        yield whole, numel
    if rest:
        yield 1, rest


def update_scratch(flats: Sequence[FlatSpec], sizing: Sizing) -> Iterator[Spec]:
    """Yield the scratch memory in which the update converts to fp32, one piece at a time.

    That is one array for narrower gradients, and two for a split master that is joined and split again. A fused update
    needs none.
    """
    flats = [flat for flat in flats if not fuses(flat, sizing)]
    for narrower, arrays in (
        ([flat for flat in flats if sizing.grad_width(flat.width) < FP32], 1),
        ([flat for flat in flats if flat.width < FP32 and sizing.split_master], 2),
    ):
        for device in dict.fromkeys(update_device(flat, sizing) for flat in narrower):
            alike = [flat for flat in narrower if update_device(flat, sizing) == device]
            numel = max(sizing.update_chunk(flat.width, device) for flat in alike)
            if device != "cpu":  # a GPU converts a fetched chunk in one piece
                fetched = [flat for flat in alike if flat.offloaded]
                numel = max([numel, *(size for flat in fetched for _, size in chunk_runs(flat, sizing.chunk))])
            for _ in range(arrays):
                yield Spec("buffers", "update scratch", numel, FP32, _tier(device, sizing))


def update_temporaries(flats: Sequence[FlatSpec], sizing: Sizing, arrays: int, rounding: int) -> Iterator[Spec]:
    """Yield the memory in which the longest piece is updated by a rule that allocates `arrays` fp32 arrays for it.

    Rounding a whole master to narrower parameters then takes `rounding` bytes per element. None of it is kept from step
    to step, so it is not among the persistent buffers.
    """
    most: dict[str, int] = {}
    for flat in flats:
        if fuses(flat, sizing):
            continue
        device = update_device(flat, sizing)
        limits = [sizing.chunk] if flat.offloaded else []
        if device == "cpu" or not flat.offloaded:  # a GPU updates a fetched chunk in one piece
            limits.append(sizing.update_chunk(flat.width, device))
        numel = max((size for _, size in chunk_runs(flat, min(limits))), default=0)
        rounds = flat.width < FP32 and not sizing.split_master
        most[device] = max(most.get(device, 0), numel * arrays * FP32, numel * rounding * rounds)
    for device, nbytes in most.items():
        yield Spec("buffers", "arrays of an update", nbytes, 1, _tier(device, sizing))


def whole_update(flats: Sequence[FlatSpec], sizing: Sizing, made: int, rounding: int) -> list[Spec]:
    """Return the memory in which Muon updates the flat that takes most: any flat with a matrix is updated whole.

    That is all of its master, gradient and states in fp32 on every rank. Beside them there are, one after another, a
    state that is fetched, what a matrix takes with `made` fp32 arrays of its size, and the master's rounding, which
    takes `rounding` bytes per element. None of it is kept from step to step.
    """
    found: list[Spec] = []
    for flat in flats:
        matrices = [entry for entry in flat.layout.entries if is_matrix(entry.name, entry.shape)]
        if not matrices:
            continue
        narrow, held = flat.width < FP32, flat.held.numel
        beside = max(
            max(newton_schulz_nbytes(entry) + made * FP32 * entry.numel for entry in matrices),
            held * FP32 * (flat.tiers["optimizer"] != HBM),
            held * SPLIT_NBYTES * (narrow and sizing.split_master),
            (flat.total if flat.resident(sizing) else flat.own.numel) * rounding * narrow,
        )
        specs = [Spec("buffers", "whole states of an update", flat.total, FP32)] * (2 + sizing.num_states)
        specs.append(Spec("buffers", "arrays of an update", beside, 1))
        found = max(found, specs, key=lambda each: sum(spec.nbytes for spec in each))
    return found


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates a parameter of a plan: embeddings and vectors are left to AdamW."""
    return len(shape) == 2 and name not in ("tokens", "positions")


def newton_schulz_nbytes(matrix: Entry) -> int:
    """Return the bytes of Muon's iteration in bf16: a matrix, the next one, and two square ones of its short side."""
    return 2 * (2 * matrix.numel + 2 * min(matrix.shape) ** 2)


def _tier(device: str, sizing: Sizing) -> str:
    """Return the tier in which memory of a device type is counted: hbm for the computing device, else dram."""
    return HBM if device == sizing.device else "dram"
