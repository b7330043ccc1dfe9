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
    numel: int, stage: int, world: int, compute_bytes: int, grad_bytes: int, state_bytes: int
) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states that each rank holds.

    The last three are bytes per parameter; `state_bytes` counts the optimizer's arrays and the master.
    """
    split = stage_of(stage)

    def share(nbytes: int, partitioned: bool) -> int:
        return -(-nbytes // world) if partitioned else nbytes

    return {
        "parameters": share(numel * compute_bytes, split.parameters),
        "gradients": share(numel * grad_bytes, split.gradients),
        "optimizer_states": share(numel * state_bytes, split.optimizer),
    }
