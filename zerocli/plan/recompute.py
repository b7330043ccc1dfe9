"""`activations.policy=auto`: recompute as few blocks as a device's memory requires. Needs no torch.

The first blocks are recomputed and the last ones kept. With every further block the peak at the end of forward falls by
what the block would have kept; the peaks at the end of backward rise by one checkpoint, since the arena of checkpoints
stays. So the plan's peak falls and then rises with the number of recomputed blocks, and a bisection finds the smallest
number that fits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from offload.placement import ACTIVATIONS
from zerocli import machine
from zerocli.config import AUTO
from zerocli.layout.sizes import format_bytes
from zerocli.plan.build import plan_model, plan_traced
from zerocli.plan.hardware import USABLE
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Shape
from zerocli.plan.traced import Traced

MARGIN = 0.04
"""Share of the device's memory that a choice leaves free: for other processes, and for what a plan does not know."""
STATIC = ("parameters", "gradients", "optimizer_states", "gathered", "runtime")
"""Categories that do not depend on what is recomputed."""


def decide(model: Shape | Traced | int, setup: Setup, room: int) -> tuple[Setup, str]:
    """Return the setup with a number of recomputed blocks in place of `auto`, and the reason ("" if it was not `auto`).

    `room` is the device's memory in bytes. Of a bare parameter count nothing is known that could be recomputed.
    """
    if setup.recompute != AUTO:
        return setup, ""
    if isinstance(model, int):
        return replace(setup, recompute=False), ""
    if isinstance(model, Traced):
        whole, reason = _choose_traced(model, setup, room)
        return replace(setup, recompute=whole), reason
    count, reason = choose_recompute(model, setup, room)
    return replace(setup, recompute=count), reason


def choose_recompute(shape: Shape, setup: Setup, room: int) -> tuple[int, str]:
    """Return the smallest number of recomputed blocks whose plan leaves `MARGIN` of `room` bytes free, and the reason.

    If there is none, return the number with the lowest peak. Where the placement says where checkpoints are kept, all
    blocks are recomputed.
    """
    layers, limit = shape.layers, _limit(room)
    if ACTIVATIONS in setup.offload.shares:
        return layers, f"all {layers} blocks recomputed (--offload {setup.offload} says where their inputs are kept)"

    @functools.cache
    def plan(count: int) -> Plan:
        return plan_model(shape, replace(setup, recompute=count))

    def needed(count: int) -> int:
        return needed_by(plan(count))

    low, high = 0, layers
    if needed(0) <= limit:
        high = 0
    elif sum(plan(0).of(category) for category in STATIC) > limit:
        low = layers  # whatever is recomputed, it does not fit
    while low < high:
        middle = (low + high) // 2
        if needed(middle) <= limit or needed(middle + 1) >= needed(middle):
            high = middle
        else:
            low = middle + 1
    words = f"{layers - low} of {layers} blocks kept, {low} recomputed"
    words = {0: "nothing recomputed", layers: f"all {layers} blocks recomputed"}.get(low, words)
    return low, f"{words} ({_comparison(needed(low), room)})"


def _choose_traced(traced: Traced, setup: Setup, room: int) -> tuple[bool, str]:
    """Return whether all blocks of a traced model are recomputed, which is whether keeping them does not fit."""
    if ACTIVATIONS in setup.offload.shares:
        return True, f"all blocks recomputed (--offload {setup.offload} says where their inputs are kept)"
    kept, again = (needed_by(plan_traced(traced, replace(setup, recompute=each))) for each in (False, True))
    rule = "traced: all blocks are kept or all recomputed"
    if kept <= _limit(room) or kept <= again:
        return False, f"nothing recomputed ({_comparison(kept, room)}; {rule})"
    return True, f"all blocks recomputed ({_comparison(again, room)}; {rule})"


def needed_by(plan: Plan) -> int:
    """Return the bytes that one rank needs of its device; without a GPU that is host memory, like the dram tier."""
    shared = plan.needed("dram") // plan.setup.local_ranks if plan.setup.device == "cpu" else 0
    return plan.needed("hbm") + shared


def _limit(room: int) -> int:
    return int(room * (1 - MARGIN))


def _comparison(needed: int, room: int) -> str:
    text = f"{format_bytes(needed)} of {format_bytes(room)}"
    return text if needed <= _limit(room) else f"{text}, and no choice leaves {MARGIN:.0%} free"


def room_here(device: str, ranks: int, cap: int = 0) -> int:
    """Return the memory that each of `ranks` processes on this machine has on its device, at most `cap` (0: no cap).

    Asks no torch: of a GPU it is what the driver leaves of it; without a GPU each rank's part of free host memory.
    """
    if device == "cuda":
        gpus = machine.gpus()
        room = int(min((gpu.nbytes for gpu in gpus), default=0) * USABLE) // -(-ranks // max(1, len(gpus)))
    else:
        room = machine.memory().available // ranks
    return min(room, cap) if cap else room
