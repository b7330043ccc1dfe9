"""The categories of memory, and model states per rank as the ZeRO paper counts them."""

from __future__ import annotations

from zerocli.layout.stage import stage as stage_of

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_states",
    "gathered",
    "activations",
    "logits",
    "buffers",
    "runtime",
)
"""The categories of memory in plans and profiles."""
HELD = ("parameters", "gradients", "optimizer_states", "gathered", "activations", "buffers")
"""The categories that an engine holds from step to step."""


def model_states(
    numel: int, stage: int, world: int, compute_bytes: int, grad_bytes: int, num_states: int
) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states that each rank holds.

    `num_states` is the number of fp32 optimizer arrays (2 for Adam); parameters narrower than fp32 add an fp32 master.
    """
    split = stage_of(stage)
    state_bytes = 4 * (num_states + (compute_bytes < 4))

    def share(nbytes: int, partitioned: bool) -> int:
        return -(-nbytes // world) if partitioned else nbytes

    return {
        "parameters": share(numel * compute_bytes, split.parameters),
        "gradients": share(numel * grad_bytes, split.gradients),
        "optimizer_states": share(numel * state_bytes, split.optimizer),
    }
