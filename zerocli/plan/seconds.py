"""Estimate the seconds of a step from what must be computed and moved; `fit` ranks candidates by it.

A step has two phases. In the first, states are updated while the next forward runs, which needs a unit only once it is
updated. In the second come backward and, with accumulation, the other micro-steps. Within a phase everything runs
concurrently, so it takes as long as its slowest part; the gradient norm separates the phases.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.placement import HBM
from zerocli.plan.hardware import Hardware
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Shape

GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, of each of its parts if it ran alone, and the part that bounds the step."""

    seconds: float
    parts: dict[str, float]
    bound: str
    tokens_per_second: float


@dataclass
class Moved:
    """Bytes moved in one phase: up and down one GPU's PCIe link, and to and from the node's disks."""

    up: float = 0.0
    down: float = 0.0
    disk: float = 0.0

    def pcie_seconds(self, hardware: Hardware) -> float:
        both = (self.up + self.down) / (2 * hardware.both_ways)
        return max(self.up, self.down, both) / (hardware.pcie * GB)

    def disk_seconds(self, hardware: Hardware) -> float:
        return self.disk / (hardware.disk * GB)


@dataclass
class Stretch:
    """Seconds of the concurrent parts of one phase, by name."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return its seconds: tensor-parallel sums do not overlap with compute, everything else does."""
        alone = [value for name, value in self.parts.items() if name not in ("compute", "tensor parallel")]
        return max(self.parts["compute"] + self.parts["tensor parallel"], *alone)


def estimate(plan: Plan, shape: Shape, hardware: Hardware) -> Estimate:
    """Return the estimate of a step on this hardware."""
    setup = plan.setup
    first, rest = _stretches(plan, shape, hardware)
    held = plan.num_trained / setup.tp / (setup.dp if setup.zero.optimizer else 1)
    offloaded = sum(plan.of("optimizer_states", tier) for tier in _off_device(plan))
    # Update kernels use the GPU wherever their states come from; an update on the CPU runs concurrently.
    here = held * _update_nbytes(setup) / (hardware.hbm * GB)
    if offloaded and setup.updates_on_cpu:
        states = plan.of("optimizer_states") * setup.local_ranks + offloaded
        first.parts["update"] = held * setup.local_ranks * (offloaded / states) / (hardware.adam * GB)
        here *= 1 - offloaded / states
    seconds = first.seconds + rest.seconds + here
    parts = {name: first.parts[name] + rest.parts.get(name, 0.0) for name in first.parts}
    parts["update"] = parts.get("update", 0.0) + here
    bound = max(parts, key=lambda name: parts[name])
    return Estimate(seconds, parts, bound, setup.batch * setup.seq * setup.accumulate * setup.dp / seconds)


def _update_nbytes(setup: Setup) -> int:
    """Return what an update reads and writes per parameter: master and states, a gradient, the parameter.

    Parameters that are a part of the master are read too.
    """
    return 2 * setup.state_width + setup.grad_width + setup.width * (2 if setup.sizing.split_master else 1)


def _stretches(plan: Plan, shape: Shape, hardware: Hardware) -> tuple[Stretch, Stretch]:
    """Return the two phases: the update with the first forward, and everything after it."""
    setup = plan.setup
    again = setup.accumulate - 1
    rate = hardware.tflops * 1e12 * hardware.efficiency
    forward, backward = (flops / rate for flops in _flops(shape, setup))
    link = (hardware.links if setup.ranks <= setup.ranks_per_node else hardware.network) * GB
    wire = plan.numel / setup.tp * setup.width * (setup.dp - 1) / setup.dp / link
    gathers = (1, 2 * again + 1) if setup.zero.parameters else (int(setup.zero.optimizer), 0)
    reduces = (setup.accumulate if setup.zero.gradients else 1) * (1 if setup.zero.optimizer else 2)
    sums = 2 * shape.layers * _sum_seconds(shape, setup, hardware)
    made = [
        {"compute": forward, "tensor parallel": sums, "collectives": wire * gathers[0]},
        {
            "compute": forward * again + backward * setup.accumulate,
            "tensor parallel": sums * again + sums * (1 + _recomputed_share(shape, setup)) * setup.accumulate,
            "collectives": wire * (gathers[1] + reduces * plan.num_trained / plan.numel),
        },
    ]
    for parts, moved in zip(made, _moved(plan, plan.num_trained / setup.tp), strict=True):
        parts["pcie"], parts["nvme"] = moved.pcie_seconds(hardware), moved.disk_seconds(hardware)
    return Stretch(made[0]), Stretch(made[1])


def _flops(shape: Shape, setup: Setup) -> tuple[float, float]:
    """Return the executed operations of one micro-step's forward and backward on one rank.

    The loss computes its gradients in forward, so the head is never recomputed. An embedding that is only looked up
    needs no operations.
    """
    tokens = setup.batch * setup.seq
    head = shape.vocab * (shape.embed_dim or shape.hidden)
    blocks = shape.active_numel - sum(each.numel for each in shape.embed_parameters()) - (0 if shape.tie else head)
    attention = 2 * shape.layers * shape.width_q * setup.seq  # scores and values, 2 each: causal is half of 4
    through = (2 * blocks + attention) * tokens / setup.tp
    trained = shape.trainable_numel / shape.numel  # a frozen weight has no gradient: two products instead of three
    heads = (4 + 2 * (trained == 1)) * head * tokens * shape.local_vocab(setup.tp) / shape.vocab
    return through + heads, through * (1 + trained + _recomputed_share(shape, setup))


def _recomputed_share(shape: Shape, setup: Setup) -> float:
    """Return the share of the blocks whose forward runs again in backward."""
    return setup.num_recomputed(shape.layers) / shape.layers


def _sum_seconds(shape: Shape, setup: Setup, hardware: Hardware) -> float:
    """Return the seconds of one all-reduce of activations over tensor-parallel ranks; a block has two per direction."""
    hidden = setup.batch * setup.seq * shape.hidden * setup.width
    return hidden * 2 * (setup.tp - 1) / setup.tp / (hardware.links * GB)


def _off_device(plan: Plan) -> list[str]:
    """Return the tiers other than the device; for those of other packages only the PCIe time is known."""
    return [tier for tier in plan.tiers if tier != HBM]


def _moved(plan: Plan, local: float) -> tuple[Moved, Moved]:
    """Return the bytes that one rank moves over PCIe, and its node to and from disks, in the two phases of a step."""
    setup, ranks = plan.setup, plan.setup.local_ranks
    passes = setup.accumulate
    first, rest = Moved(), Moved()
    off_device = _off_device(plan)
    offloaded = [plan.of("optimizer_states", tier) for tier in off_device]
    on_cpu = setup.updates_on_cpu and any(offloaded)
    through = 0 if on_cpu else 1  # whether states, gradients and new parameters cross the link for the update
    for tier in off_device:
        states, gradients, parameters, checkpoints = (
            plan.of(kind, tier) / ranks for kind in ("optimizer_states", "gradients", "parameters", "activations")
        )
        updated = parameters * plan.num_trained / plan.numel
        fetched = updated if setup.sizing.split_master and states else 0  # for the update, beside the gather
        first.up += through * (states + gradients + fetched) + parameters
        first.down += through * (states + updated) + checkpoints
        rest.up += parameters * (2 * passes - 1) + gradients * (passes - 1) + checkpoints * passes
        rest.down += gradients * passes + checkpoints * (passes - 1)
        if tier == "nvme":
            kept = min(parameters, setup.read_ahead_nbytes)  # per pass, what is still in the read-ahead cache
            first.disk += ranks * (2 * states + gradients + fetched + updated + parameters - kept + checkpoints)
            rest.disk += ranks * ((parameters - kept) * (2 * passes - 1) + gradients * (2 * passes - 1))
            rest.disk += ranks * checkpoints * (2 * passes - 1)
    if on_cpu:
        share = local / (setup.dp if setup.zero.optimizer else 1)
        if not any(plan.of("gradients", tier) for tier in off_device):
            first.down += share * setup.grad_width
        if not any(plan.of("parameters", tier) for tier in off_device):
            first.up += share * setup.width
            first.down += share * setup.width * setup.sizing.split_master
    return first, rest
