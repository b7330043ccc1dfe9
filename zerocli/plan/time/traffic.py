"""What the collectives of a step move, in the bytes that a run's metrics count."""

from __future__ import annotations

from dataclasses import dataclass

from offload.placement import HBM
from zerocli.plan.rows import Plan


@dataclass(frozen=True)
class Traffic:
    """Bytes of full buffers in the collectives of a step, per rank; an all-reduce counts twice."""

    inside: float
    """Inside a group of ranks, which may be all."""
    summed: float = 0.0
    """Across groups, of gradients."""
    renewed: float = 0.0
    """Across groups, of parameters: new ones, for the copies that groups gather from."""

    @property
    def across(self) -> float:
        return self.summed + self.renewed


def traffic(plan: Plan) -> Traffic:
    """Return what a step of this plan moves, without padding and without the collectives of tensor parallelism.

    Nor does it count what optimizers gather that need whole parameters (adafactor, muon): `optimizer/whole_update.py`.
    """
    setup, trained = plan.setup, plan.num_trained / plan.setup.tp
    inside = summed = renewed = 0.0
    if setup.group > 1:
        # Partitioned gradients are reduced in every pass; whole ones once, and stage 0 gathers them as well.
        once = trained * setup.grad_width
        reduced = trained * setup.sizing.wire_width(setup.width) * setup.accumulate if setup.zero.gradients else once
        gathered = trained * setup.width if setup.zero.optimizer else once
        inside = reduced + (2 * gathered_nbytes(plan) * setup.accumulate if setup.zero.parameters else gathered)
    if setup.group < setup.dp and (setup.copies == 1 or not setup.zero.optimizer):
        summed = 2 * trained / setup.group * setup.grad_width
    elif setup.group < setup.dp:
        each = setup.accumulate * setup.sizing.wire_width(setup.width) if setup.zero.gradients else setup.grad_width
        summed, renewed = trained / setup.group * each, _renewed(plan) / setup.group
    return Traffic(inside, summed, renewed)


def _renewed(plan: Plan) -> float:
    """Return the bytes of parameters that groups get from each other: new ones once, those of other tiers each time."""
    setup, new = plan.setup, plan.num_trained / plan.setup.tp * plan.setup.width
    if not setup.zero.parameters:
        return new
    share = share_off_device(plan, "parameters")
    return (1 - share) * new + share * 2 * setup.accumulate * gathered_nbytes(plan)


def gathered_nbytes(plan: Plan) -> float:
    """Return the bytes that a gather of all parameters moves; encoded ones are decoded where they arrive."""
    setup = plan.setup
    if not setup.codec:
        return plan.numel / setup.tp * setup.width
    own = plan.of("parameters", HBM) + off_device(plan, "parameters") / setup.local_ranks
    return own * (setup.shards if setup.zero.parameters else 1)


def off_device(plan: Plan, category: str) -> int:
    """Return a node's bytes of a category that are not on its devices; of other packages' tiers too."""
    return sum(plan.of(category, tier) for tier in plan.tiers if tier != HBM)


def share_off_device(plan: Plan, category: str) -> float:
    off = off_device(plan, category) / plan.setup.local_ranks
    return off / (off + plan.of(category, HBM)) if off else 0.0
