"""The model states of one rank: flats, the slice of each that it owns, the tier of every piece; the engine's rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from offload.placement import HBM, Spill
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout.shards import Layout, Span, lay_out
from zerocli.plan import constants
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Parameter, Shape
from zerocli.plan.traced import Traced


@dataclass(frozen=True)
class FlatPlan:
    """One unit's flat buffer."""

    kind: str
    """Of its unit: rest, embed, block or head."""
    layout: Layout
    own: int
    """Elements of the slice that this rank owns."""
    held: int
    """Elements whose optimizer states this rank keeps."""
    tiers: dict[str, str] = field(default_factory=dict)
    """By kind of piece."""

    @property
    def total(self) -> int:
        return self.layout.total

    @property
    def away(self) -> bool:
        return any(tier != HBM for tier in self.tiers.values())

    def gathered(self, setup: Setup) -> bool:
        """Whether its parameters come and go through a gather buffer."""
        return self.tiers["parameters"] != HBM or (setup.zero.parameters and setup.dp > 1)


def plan_flats(shape: Shape | Traced, setup: Setup) -> list[FlatPlan]:
    """Return the flats of all units in the engine's order; raise UserError where no budget is left for a piece."""
    spills = {kind: Spill(kind, setup.placement().of(kind)) for kind in ("parameters", "gradients", "optimizer")}
    flats: list[FlatPlan] = []
    for unit, times in shape.units():
        layout = lay_out([(p.name, p.local(setup.tp), _group(p, setup.tp)) for p in unit.parameters], setup.dp)
        own = layout.total // setup.dp
        held = own if setup.zero.optimizer else layout.total
        sizes = {
            "parameters": own * setup.width,
            "gradients": own * setup.grad_width,
            "optimizer": own * 4 * setup.num_record_arrays,
        }
        try:
            for _ in range(times):
                # A rule without states has nothing to place, and its updates are made on the device.
                tiers = {kind: spills[kind].place(size) if size else HBM for kind, size in sizes.items()}
                flats.append(FlatPlan(unit.kind, layout, own, held, tiers))
        except ValueError as error:
            raise UserError(str(error), hint="a tier without a budget at the end", exit_code=DOES_NOT_FIT) from error
    return flats


def _group(parameter: Parameter, tp: int) -> int:
    """Return the optimizer group: with weight decay or without, of parts or of what all tensor-parallel ranks hold."""
    whole = tp > 1 and parameter.local(tp) == parameter.shape
    return (0 if len(parameter.shape) >= 2 else 1) + 2 * whole


def slot_buffers(flats: list[FlatPlan], setup: Setup, on_cpu: bool) -> Counter[str]:
    """Return the bytes of the updater's slots, by `device` and `host`: the largest chunk each slot ever takes."""
    chunk = constants.stream_chunk(setup.staging_nbytes, setup.num_states)
    most: dict[tuple[str, int, str], int] = {}
    at = 0
    for flat in (flat for flat in flats if flat.away):
        place = "host" if on_cpu and flat.tiers["optimizer"] != HBM else "device"
        widths = _slot_widths(flat, setup, on_cpu and flat.tiers["optimizer"] != HBM)
        for count, numel in _chunks(flat.layout, flat.held, chunk):
            for slot in range(at, at + min(count, constants.NUM_SLOTS)):
                for name, width in widths.items():
                    key = (place, slot % constants.NUM_SLOTS, name)
                    most[key] = max(most.get(key, 0), numel * width)
            at += count
    found: Counter[str] = Counter()
    for (place, _, _), nbytes in most.items():
        found[place] += nbytes
    return found


def _slot_widths(flat: FlatPlan, setup: Setup, on_cpu: bool) -> dict[str, int]:
    """Return the bytes an element takes in each buffer of a slot; none for what is updated where it lies."""
    tiers = flat.tiers

    def comes(kind: str) -> bool:
        return tiers[kind] != HBM and not (on_cpu and tiers[kind] == "dram")

    widths = {}
    if comes("optimizer") and setup.num_record_arrays:
        widths["record"] = 4 * setup.num_record_arrays
    if comes("gradients"):
        widths["grad"] = setup.grad_width
    if setup.width == 4 and tiers["parameters"] != HBM:
        widths["master"] = 4
    if setup.width < 4 and comes("parameters"):
        widths["out"] = setup.width
    return widths


def _chunks(layout: Layout, held: int, numel: int) -> Iterator[tuple[int, int]]:
    """Yield (how many in a row, size) of the chunks that tile the first rank's span, by optimizer group."""
    for _, segment in layout.segments(Span(0, held)):
        if segment.numel >= numel:
            yield segment.numel // numel, numel
        if segment.numel % numel:
            yield 1, segment.numel % numel


def buckets(flats: list[FlatPlan], setup: Setup) -> tuple[int, int]:
    """Return (number, bytes of each) of the reduction buckets; none where gradients are kept whole."""
    leaves = any(flat.tiers["gradients"] != HBM for flat in flats)
    if not setup.zero.gradients or (setup.dp == 1 and not leaves):
        return 0, 0
    largest = max(flat.total for flat in flats)
    numel = min(largest, max(setup.bucket_nbytes // setup.wire_width, setup.dp * 64))
    number = min(8, -(-largest // numel) + 1) if leaves else 2
    used = sum(-(-flat.total // numel) for flat in flats)
    return min(number, used), numel * setup.wire_width


def lifts(flats: list[FlatPlan], setup: Setup) -> int:
    """Return the bytes of the buckets in which gradients off the device are added up."""
    leaves = any(flat.tiers["gradients"] != HBM for flat in flats)
    if not leaves or (setup.accumulate == 1 and setup.grad_width == setup.wire_width):
        return 0
    number, nbytes = buckets(flats, setup)
    return number * (nbytes // setup.wire_width // setup.dp) * setup.grad_width


def update_buffers(flats: list[FlatPlan], setup: Setup, on_cpu: bool) -> int:
    """Return the bytes of the updater's slots and scratch on the device."""
    slots = slot_buffers(flats, setup, on_cpu)
    there = slots["device"] + (slots["host"] if setup.device == "cpu" else 0)
    here = any(not (on_cpu and flat.tiers["optimizer"] != HBM) for flat in flats)
    if setup.grad_width < 4 and (here or setup.device == "cpu"):
        there += 4 * constants.UPDATE_CHUNK[setup.device]
    return there


def gather_pool(flats: list[FlatPlan], setup: Setup) -> int:
    """Return the bytes of all gather buffers: of each size of flat, as many as the limit or the flats there are."""
    sharers = Counter(flat.total for flat in flats if flat.gathered(setup))
    return sum(min(setup.gather_buffers, count) * total * setup.width for total, count in sharers.items())


def arenas(sizes: list[int]) -> int:
    """Return the bytes that host memory tiers map and pin for blocks of these sizes, taken in this order."""
    mapped, rests = 0, [0]
    for size in sizes:
        size = -(-size // constants.PAGE_NBYTES) * constants.PAGE_NBYTES
        found = next((at for at, rest in enumerate(rests) if rest >= size), None)
        if found is not None:
            rests[found] -= size
            continue
        if 8 * size >= constants.ARENA_NBYTES:
            mapped += size
            continue
        arena = max(size, min(constants.ARENA_NBYTES, max(constants.FIRST_ARENA_NBYTES, mapped)))
        mapped += arena
        rests.append(arena - size)
    return mapped


def swap(sizes: list[int]) -> int:
    """Return the bytes that a swap file grows to for blocks of these sizes, taken in this order."""
    size = free = 0
    unit, page = constants.UNIT_NBYTES, constants.PAGE_NBYTES
    for nbytes in sizes:
        missing = -(-nbytes // unit) * unit - free
        if missing > unit:
            size, free = size + missing, free + missing
        needed = -(-nbytes // page) * page
        if free < needed:
            size, free = size + constants.GROW_NBYTES, free + constants.GROW_NBYTES
        free -= needed
    return size
