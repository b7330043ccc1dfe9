"""Estimate the seconds of a step from what must be computed and moved; `fit` ranks candidates by it.

In the first phase of a step, states are updated while the first forward runs, which needs a unit only once it is
updated. Then come backward and, with accumulation, the forwards and backwards of the other micro-steps. Within a phase
everything runs concurrently, so it takes as long as its slowest part. The host runs ahead of the device, from one phase
into the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.placement import HBM, KINDS
from zerocli.layout.buffers import share_of_cpu, slowed_by_copies
from zerocli.plan.blocks.work import Work
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup
from zerocli.plan.time.compute import UPDATE, Computed, device_seconds
from zerocli.plan.time.hardware import Hardware, HostTimes
from zerocli.plan.time.network import Group
from zerocli.plan.time.schedule import UnitTimes, replay_blocks
from zerocli.plan.time.traffic import gathered_nbytes, off_device, share_off_device, traffic

GB = 1e9
LINK, DISK = 0.95, 0.9
"""Shares of the rates that copies alone reach which a step's transfers reach (measured on an H200; its disk was slower
with files of 8 GiB than with the benchmark's of one)."""
DISK_IN_TURN = 0.64
"""Share of those that a disk reaches for one array at a time, read or written while nothing else is (two H200s)."""
BESIDE_LINK = 0.8
"""Share of its rate that each of the link and the CPU's part of an update reaches while the other uses the same memory
(beside an H200 the CPU takes 0.26 to 0.28 s for a billion parameters, 0.22 s alone)."""
DECODING_NBYTES = {"nf4": 2.52, "int8": 3.02}
"""Bytes that decoding a parameter into bf16 reads and writes: its code, its share of the scales, the result."""
CHECKPOINT_WAIT = 0.4
"""Share of an activation checkpoint's way back that backward waits for (measured on an H200)."""
EXPOSED_GATHERS = 2.5
"""How often per micro-step compute waits for the gathers of offloaded embedding and head: in forward for both, in
backward for one of them, as nothing is before them that could hide it (measured on an H200)."""
OVERLAP_EXPONENT = 3
"""How sharply the longer of host and device decides (`_together`): if both take as long, they take a quarter more, and
4 % more if one takes half as long (measured on an H200)."""
BLOCKS_AHEAD = 12
"""Blocks that the host can be ahead of the device: CUDA holds 1024 calls, and a block with offloading has about 80."""
LEAD_TOLERANCE = 1e-12
"""Change of the host's lead over a micro-step, in parts of its seconds, below which all others take as long."""
MAX_FOLLOWED = 1024
"""Micro-steps that are followed at most. The lead is bounded by `BLOCKS_AHEAD` and changes ever less, so that those
after them take as long as the last one to about a thousandth."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, of each of its parts if it ran alone, and the part that bounds the step."""

    seconds: float
    parts: dict[str, float]
    bound: str
    tokens_per_second: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of forward, backward and update; the update has what forward does not hide of it."""
    mfu: float = 0.0
    """The share of the GPUs' peak that the model's own operations reach."""
    hidden: float = 1.0
    """The share of the collectives' seconds in which compute runs too."""


@dataclass
class Moved:
    """Bytes moved in one phase: up and down one GPU's PCIe link, and to and from the node's disks."""

    up: float = 0.0
    down: float = 0.0
    disk: float = 0.0

    def pcie_seconds(self, hardware: Hardware) -> float:
        both = (self.up + self.down) / (2 * hardware.both_ways)
        return max(self.up, self.down, both) / (hardware.pcie * GB * LINK)


@dataclass
class Phase:
    """Seconds of the concurrent parts of one phase, by name."""

    parts: dict[str, float] = field(default_factory=dict)
    tail: float = 0.0
    """Seconds of compute after the last transfer and the host's last block."""
    times: int = 1
    """How often a step has such a phase."""
    replayed: float = 0.0
    """Its seconds without transfers, by the schedule of its collectives."""

    @property
    def computing(self) -> float:
        """Its seconds without transfers: tensor-parallel sums do not overlap with compute, other collectives may."""
        return max(self.parts["compute"] + self.parts["tensor parallel"], self.replayed)

    @property
    def seconds(self) -> float:
        transfers = max(self.parts.get(name, 0.0) for name in ("pcie", "nvme", "update"))
        return max(self.computing, transfers + self.tail if transfers else 0.0)


def estimate(plan: Plan, work: Computed, hardware: Hardware) -> Estimate:
    """Return the estimate of a step that computes `work` on this hardware."""
    setup = plan.setup
    first, backward, forward = _phases(plan, work, hardware)
    held = plan.num_trained / setup.tp / (setup.shards if setup.zero.optimizer else 1)
    offloaded = off_device(plan, "optimizer_states")
    # An update reads and writes master and states, a gradient, and the parameter, which may be a part of the master.
    updated = 2 * setup.state_width + setup.grad_width + setup.width * (2 if setup.sizing.split_master else 1)
    # Update kernels use the GPU wherever their states come from; an update on the CPU runs concurrently.
    here = held * updated / (hardware.hbm * GB * UPDATE)
    if offloaded and (mine := _share_of_cpu(setup, hardware)):
        states = plan.of("optimizer_states") * setup.local_ranks + offloaded
        mine *= offloaded / states
        rate = hardware.adam * GB
        if not setup.updates_on_cpu:
            rate = _beside(hardware) / slowed_by_copies(setup.width, _away(setup), setup.sizing)
        first.parts["update"] = held * setup.local_ranks * mine / rate
        here *= 1 - mine
    here += _whole_seconds(plan, work, hardware)
    every = (first, backward, forward)
    parts = {name: sum(each.parts.get(name, 0.0) * each.times for each in every) for name in first.parts}
    # Compute waits for transfers: of what is offloaded of the ends, and of activation checkpoints in backward.
    waited = EXPOSED_GATHERS * share_off_device(plan, "parameters") * work.ends * setup.width / setup.tp
    waited += CHECKPOINT_WAIT * (off_device(plan, "activations") / setup.local_ranks)
    waits = here + setup.accumulate * waited / (hardware.pcie * GB * LINK)
    forwarded, seconds = _ends(every, setup.accumulate, waits, BLOCKS_AHEAD * hardware.host.block)
    parts["update"] = parts.get("update", 0.0) + here
    bound = max(parts, key=lambda name: parts[name])
    alone = min(forwarded, _together(first.computing - first.tail, first.parts["host"]) + first.tail)
    phases = {"forward": alone, "backward": seconds - forwarded, "update": forwarded - alone}
    tokens = setup.batch * setup.seq * setup.accumulate * setup.dp
    mfu = work.operations / (seconds * setup.ranks * hardware.tflops * 1e12)
    exposed = 0.0  # compute waits for collectives other than tensor-parallel sums
    for each in every:
        exposed += (each.computing - each.parts["compute"] - each.parts["tensor parallel"]) * each.times
    hidden = max(0.0, 1 - exposed / parts["collectives"]) if parts["collectives"] else 1.0
    return Estimate(seconds, parts, bound, tokens / seconds, phases, mfu, hidden)


def _share_of_cpu(setup: Setup, hardware: Hardware) -> float:
    """Return the share of offloaded states that the CPU updates: all, or with which it takes as long as the link."""
    if setup.updates_on_cpu:
        return 1.0
    if not setup.updates_on_both:
        return 0.0
    width = setup.state_width
    link = Moved(up=width, down=width).pcie_seconds(hardware) / BESIDE_LINK
    cpu = setup.local_ranks / _beside(hardware)
    return share_of_cpu(link, cpu, setup.width, _away(setup), setup.sizing)


def _beside(hardware: Hardware) -> float:
    """Return the parameters per second that a node's CPUs update while the links are busy."""
    return GB * (hardware.adam_beside or BESIDE_LINK * hardware.adam)


def _away(setup: Setup) -> list[str]:
    """Return the kinds of states of which some are not on the device."""
    placement = setup.placement()
    return [kind for kind in KINDS if any(share.tier != HBM for share in placement.of(kind))]


def _ends(phases: Sequence[Phase], accumulate: int, waits: float, ahead: float) -> tuple[float, float]:
    """Return when the device is done with the first forward and with the step; at first it waits for this many seconds.

    The host begins a phase once it has launched all before it, if it is not too far `ahead` of the device. Once it is
    ahead by the same time after each micro-step, all others take as long as the last one.
    """
    first, backward, forward = phases

    def run(each: Phase, device: float, host: float, waits: float = 0.0) -> tuple[float, float]:
        """Return when the device and the host are done with a phase that they begin then."""
        host = max(host, device - ahead) + each.parts["host"]
        return device + _together(each.seconds - each.tail + waits, max(0.0, host - device)) + each.tail, host

    forwarded = run(first, 0.0, 0.0, waits)
    device, host = run(backward, *forwarded)
    for number in range(1, accumulate):
        before, lead = device, device - host
        device, host = run(backward, *run(forward, device, host))
        if number == MAX_FOLLOWED or abs(device - host - lead) <= LEAD_TOLERANCE * (device - before):
            device += (accumulate - 1 - number) * (device - before)
            break
    return forwarded[0], device


def _together(device: float, host: float) -> float:
    """Return the seconds in which the host launches what the device computes, if each takes so long alone.

    Where these are alike, each waits for the other at times: some kernels are shorter than their launch, others longer.
    """
    return float((device**OVERLAP_EXPONENT + host**OVERLAP_EXPONENT) ** (1 / OVERLAP_EXPONENT))


def _phases(plan: Plan, of: Computed, hardware: Hardware) -> list[Phase]:
    """Return the phases: the update with the first forward, a backward, and a later forward."""
    setup = plan.setup
    # Frozen parameters of blocks are decoded wherever they are used.
    encoded = max(0, plan.numel - plan.num_trained - of.ends) / setup.tp if setup.codec else 0.0
    decoding = Work(moved=encoded * DECODING_NBYTES.get(setup.codec, 0))
    # Gradients are copied into flats or buckets in each backward, and read for their norm.
    gradients = Work(moved=plan.num_trained / setup.tp * (2 * setup.width + setup.grad_width))
    forward = of.forward + decoding
    backward = of.backward + of.again + gradients + decoding
    hidden = setup.batch * setup.seq * of.hidden * setup.width
    # Two sums per block and direction, and those of recomputed blocks once more.
    sums = 2 * of.layers * Group(setup.tp, setup.ranks_per_node).all_reduce(hidden, hardware)
    summed = sums * (1 + setup.blocks(of.layers).whole / of.layers)
    cpu = _share_of_cpu(setup, hardware)
    gathering, reducing, updating = _host_moves(plan, of, hardware.host)
    head = device_seconds(of.head, setup, hardware)
    wire = Wire(plan, of, hardware)
    every, last = float(setup.zero.parameters), device_seconds(backward, setup, hardware) / of.layers
    first = wire.phase(forward, sums, head, every or float(setup.zero.optimizer), 0.0, ahead=0.0, renews=1.0)
    later = wire.phase(forward, sums, head, every, 0.0, ahead=last)
    back = wire.phase(backward, summed, 0.0, every, 1.0, ahead=head)
    made = [
        (1, forward, gathering + updating, sums, first, head),
        (setup.accumulate, backward, gathering + reducing, summed, back, 0.0),
        (setup.accumulate - 1, forward, gathering, sums, later, head),
    ]
    phases = []
    moves = _moved(plan, cpu, of.whole)
    for (times, computed, hosted, exchanged, collectives, tail), moved in zip(made, moves, strict=True):
        parts = {
            "compute": device_seconds(computed, setup, hardware),
            "host": computed.host + hosted,
            "tensor parallel": exchanged,
            "collectives": collectives[0],
            "pcie": moved.pcie_seconds(hardware),
            "nvme": moved.disk / (hardware.disk * GB * DISK),
        }
        phases.append(Phase(parts, tail, times, replayed=collectives[1]))
    return phases


def _whole_seconds(plan: Plan, work: Computed, hardware: Hardware) -> float:
    """Return the seconds of updates of whole matrices: what is offloaded of them comes, and all but gradients goes, in
    turn.
    """
    moving, device = 0.0, device_seconds(work.update, plan.setup, hardware)
    for tier in (each for each in plan.tiers if each != HBM):
        both = plan.of("optimizer_states", tier) + plan.of("parameters", tier)
        moved = work.whole * (2 * both + plan.of("gradients", tier))
        link = Moved(up=moved / plan.setup.local_ranks)
        in_turn = hardware.disk * GB * DISK * DISK_IN_TURN
        moving += moved / in_turn if tier == "nvme" else link.pcie_seconds(hardware)
    return moving + device + work.update.host if moving else _together(device, work.update.host)


class Wire:
    """The collectives of a step's units: an embedding, equal blocks, a head."""

    def __init__(self, plan: Plan, of: Computed, hardware: Hardware) -> None:
        setup, near = plan.setup, max(1, plan.setup.ranks_per_node // plan.setup.tp)
        self._setup, self._hardware, self._layers = setup, hardware, max(1, of.layers)
        inside, across = Group(setup.group, near), Group(setup.dp // setup.group, max(1, near // setup.group))
        # Groups within a node, or copies on the same node: both pass the same links.
        self._shared = inside.nodes > 1 or across.here > 1
        end = min(1.0, of.ends / plan.numel) / 2
        shares = (end, (1 - 2 * end) / self._layers)
        trained = plan.num_trained / setup.tp
        width = setup.sizing.wire_width(setup.width) if setup.zero.gradients else setup.grad_width
        # Whole gradients are reduced in the last of a step's passes, and so are slices across groups: an equal share
        # of that is counted in each pass.
        once = 1.0 if setup.zero.gradients else 1 / setup.accumulate
        reduce = inside.gather if setup.zero.optimizer else inside.all_reduce
        scatters = setup.copies > 1 and setup.zero.optimizer
        add, ways = (across.gather, 1) if scatters else (across.all_reduce, 2)  # which counts bytes twice
        gathered, moved = gathered_nbytes(plan), traffic(plan)

        def times(share: float) -> UnitTimes:
            """Return the seconds of a unit's gather, reduction and sum across groups, and of renewing its copies."""
            nbytes = share * trained * width
            pieces = max(1, math.ceil(nbytes / setup.bucket_nbytes))
            return UnitTimes(
                gather=inside.gather(share * gathered, hardware),
                reduce=once * reduce(nbytes, hardware, pieces),
                across=add(share * moved.summed / ways, hardware, pieces) / setup.accumulate,
                renew=across.gather(share * moved.renewed, hardware) if moved.renewed else 0.0,
            )

        self._end, self._block = map(times, shares)

    def phase(
        self, work: Work, sums: float, head: float, gathers: float, reduces: float, ahead: float, renews: float = 0.0
    ) -> tuple[float, float]:
        """Return the seconds of a phase's collectives alone, and those until it is done; `head` of them are the head's.

        `gathers`, `reduces` and `renews` say whether it has such collectives.
        """
        block = (device_seconds(work, self._setup, self._hardware) - head + sums) / self._layers

        def unit(compute: float, of: UnitTimes) -> UnitTimes:
            return UnitTimes(compute, gathers * of.gather, reduces * of.reduce, reduces * of.across, renews * of.renew)

        first, middle, last = unit(0.0, self._end), unit(block, self._block), unit(head, self._end)
        resident = not self._setup.zero.parameters
        buffers = self._layers + 2 if resident else self._setup.sizing.gather_buffers
        counted = ((first, 1), (middle, self._layers), (last, 1))
        alone = sum(times * (each.gather + each.reduce + each.across + each.renew) for each, times in counted)
        ends = (last, first) if reduces else (first, last)
        return alone, replay_blocks(ends[0], middle, self._layers, ends[1], buffers, ahead, self._shared)


def _host_moves(plan: Plan, of: Computed, host: HostTimes) -> tuple[float, float, float]:
    """Return the seconds of the host for what is not on the device: in each pass, in backward, and in the update. The
    CPU's part of that takes as many: its thread runs Python too (measured: 0 to 9 % more than by the device alone).
    """
    units = of.layers + 2
    kept = (off_device(plan, "activations") > 0) * plan.setup.blocks(of.layers).whole
    states, gradients, parameters = (
        share_off_device(plan, each) for each in ("optimizer_states", "gradients", "parameters")
    )
    through = max(states, gradients, parameters)  # the share of the update that passes through its slots
    transfers = num_transfers(plan.setup, states, gradients, parameters)
    return (
        host.moved * units * parameters,
        host.reduced * units * gradients + host.kept * kept,
        (host.streamed * units + host.chunk * of.chunks) * through + host.transfer * of.chunks * transfers,
    )


def num_transfers(setup: Setup, states: float, gradients: float, parameters: float) -> float:
    """Return the transfers of a chunk of an update, by the offloaded share of each kind.

    States come and go, gradients come, parameters go; those that are a part of the master come, too.
    """
    return 2 * states + gradients + (1 + setup.sizing.split_master) * parameters


def _moved(plan: Plan, cpu: float, whole: float) -> tuple[Moved, Moved, Moved]:
    """Return the bytes that one rank moves over PCIe, and its node to and from disks, in each kind of phase, if the CPU
    updates this share of the offloaded states, and another share is updated `whole`, before these phases.
    """
    setup, ranks = plan.setup, plan.setup.local_ranks
    added = 1 - 1 / setup.accumulate  # share of backwards that add to gradients of earlier ones
    first, backward, forward = Moved(), Moved(), Moved()
    on_cpu = cpu if off_device(plan, "optimizer_states") else 0.0
    through = 1 - on_cpu - whole  # the share of states, gradients and new parameters that pass through the device
    for tier in (each for each in plan.tiers if each != HBM):
        states, gradients, parameters, checkpoints = (
            plan.of(kind, tier) / ranks for kind in ("optimizer_states", "gradients", "parameters", "activations")
        )
        updated = parameters * plan.num_trained / plan.numel
        fetched = updated if setup.sizing.split_master and states else 0  # for the update, beside the gather
        # What the device updates it also writes into the memory of the gather.
        first.up += through * (states + gradients + fetched - updated) + parameters
        first.down += through * (states + updated) + checkpoints
        backward.up += parameters + gradients * added + checkpoints
        backward.down += gradients
        forward.up += parameters
        forward.down += checkpoints
        if tier == "nvme":
            read = parameters - min(parameters, setup.read_ahead_nbytes)  # per pass, what is not in the cache any more
            first.disk += ranks * ((1 - whole) * (2 * states + gradients) + fetched + updated + read + checkpoints)
            backward.disk += ranks * (read + gradients * (1 + added) + checkpoints)
            forward.disk += ranks * (read + checkpoints)
    if on_cpu:
        share = on_cpu * (plan.num_trained / setup.tp) / (setup.shards if setup.zero.optimizer else 1)
        if not off_device(plan, "gradients"):
            first.down += share * setup.grad_width
        if not off_device(plan, "parameters"):
            first.up += share * setup.width
            first.down += share * setup.width * setup.sizing.split_master
    return first, backward, forward
