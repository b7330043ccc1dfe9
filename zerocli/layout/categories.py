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
STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer_states"}
"""Kind of model states, as a placement has it -> category."""


def model_states(
    numel: int,
    stage: int,
    world: int,
    compute_bytes: int,
    grad_bytes: int,
    state_bytes: int,
    trained: int | None = None,
) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer states that each rank holds.

    `compute_bytes` and the next two are bytes per parameter; `state_bytes` counts the optimizer's arrays and the
    master. `trained` of the parameters are trained, all by default; the others are frozen.
    """
    split = stage_of(stage)
    trained = numel if trained is None else trained

    def share(nbytes: int, partitioned: bool) -> int:
        return -(-nbytes // world) if partitioned else nbytes

    return {
        "parameters": share(numel * compute_bytes, split.parameters),
        "gradients": share(trained * grad_bytes, split.gradients),
        "optimizer_states": share(trained * state_bytes, split.optimizer),
    }
