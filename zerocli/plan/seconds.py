"""How long a step would take: an estimate, from what must be computed and moved, so that 'fastest' means something."""

from __future__ import annotations

from dataclasses import dataclass

from zerocli.plan.hardware import Hardware
from zerocli.plan.rows import Plan
from zerocli.plan.shape import Shape
from zerocli.plan.step import updates_on_cpu

GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, of each thing that it waits for if nothing else holds it up, and which of them binds it."""

    seconds: float
    parts: dict[str, float]
    bound: str
    tokens_per_second: float


def estimate(plan: Plan, shape: Shape, hardware: Hardware) -> Estimate:
    """Return the estimate; backward hides the reductions, forward the gathers and the update of offloaded states."""
    setup = plan.setup
    tokens = setup.batch * setup.seq * setup.accumulate
    attention = 6 * shape.layers * shape.width_q * setup.seq  # causal: half of 12
    flops = (6 * shape.active_numel + attention) * tokens / setup.tp
    again = 4 / 3 if setup.recomputes else 1.0
    compute = flops * again / (hardware.tflops * 1e12 * hardware.efficiency)
    local = plan.numel / setup.tp
    wire = local * setup.width * (setup.dp - 1) / setup.dp
    link = (hardware.links if setup.ranks <= setup.ranks_per_node else hardware.network) * GB
    passes = setup.accumulate
    gathers = wire / link * (2 * passes if setup.zero.parameters else setup.zero.optimizer)
    reduces = wire / link * (passes if setup.zero.gradients else 1) * (1 if setup.zero.optimizer else 2)
    sums = 4 + 2 * (setup.recomputes)
    tensor = 0.0
    if setup.tp > 1:
        hidden = tokens * shape.hidden * setup.width
        tensor = sums * shape.layers * hidden * 2 * (setup.tp - 1) / setup.tp / (hardware.links * GB)
    moved = _moved(plan)
    pcie = moved["pcie"] / (hardware.pcie * GB)
    disk = moved["disk"] / (hardware.disk * GB)
    held = local / setup.dp if setup.zero.optimizer else local
    on_cpu = updates_on_cpu(setup) and plan.of("optimizer_states", "dram") > 0
    update = held * 28 / (hardware.hbm * GB) if not on_cpu else held * setup.local_ranks / (hardware.adam * GB)
    forward = compute / (4 if setup.recomputes else 3) + tensor / 3
    behind = max(forward, gathers / 2, pcie, disk, update if on_cpu else 0)
    seconds = max(compute + tensor - forward, reduces + gathers / 2) + behind + (0 if on_cpu else update)
    parts = {
        "compute": compute,
        "tensor parallel": tensor,
        "collectives": gathers + reduces,
        "pcie": pcie,
        "nvme": disk,
        "update": update,
    }
    bound = max(parts, key=lambda name: parts[name])
    return Estimate(seconds, parts, bound, tokens * setup.dp / seconds)


def _moved(plan: Plan) -> dict[str, float]:
    """Return the bytes a step that one rank moves over PCIe, and its node over its disks."""
    setup, ranks = plan.setup, plan.setup.local_ranks
    moved = {"pcie": 0.0, "disk": 0.0}
    for tier in ("dram", "nvme"):
        states = plan.of("optimizer_states", tier)
        gradients = plan.of("gradients", tier) * setup.accumulate
        parameters = plan.of("parameters", tier) * 2 * setup.accumulate
        checkpoints = plan.of("activations", tier)
        total = states + gradients + parameters + checkpoints
        moved["pcie"] += total / ranks
        if tier == "nvme":
            # A disk reads and writes over one link.
            moved["disk"] += 2 * (states + gradients + checkpoints) + parameters * 1.5
    return moved
