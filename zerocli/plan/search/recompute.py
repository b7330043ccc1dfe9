"""`activations.policy=auto`: recompute as little as a device's memory requires. Needs no torch.

The choices have one order, from the cheapest in time: nothing is recomputed; the first blocks are recomputed
selectively, and the last ones kept; all are selective; the first ones are recomputed whole, and the others selectively;
all are whole. Within each half of that order a further block lowers the peak at the end of forward by what it no longer
keeps. The peaks in backward rise by one checkpoint for each selective block, since the arena of checkpoints stays. So
what is live at the peak falls and then rises within each half, and a bisection finds the first choice of a half for
which that fits. Fragmentation has no such order: from there on choices are tried one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from offload.placement import ACTIVATIONS
from zerocli import machine
from zerocli.config import AUTO
from zerocli.layout.recompute import NOTHING, SELECTIVELY, WHOLE, Recompute
from zerocli.layout.sizes import format_bytes
from zerocli.plan.models.model import TREATED_ALIKE, Model
from zerocli.plan.rows import Plan
from zerocli.plan.setup import Setup
from zerocli.plan.time.hardware import USABLE

MARGIN = 0.04
"""Share of the device's memory that a choice leaves free: for other processes, and for what a plan does not know."""
STATIC = ("parameters", "gradients", "optimizer_states", "gathered", "runtime")
"""Categories that do not depend on what is recomputed."""


def decide(model: Model, setup: Setup, room: int) -> tuple[Setup, str]:
    """Return the setup with what is recomputed in place of `auto`, and the reason ("" if it was not `auto`).

    `room` is the device's memory in bytes. Of a bare parameter count nothing is known that could be recomputed.
    """
    if setup.recompute != AUTO:
        return setup, ""
    if not model.whole:
        return replace(setup, recompute=NOTHING), ""
    chosen, reason = choose_recompute(model, setup, room)
    return replace(setup, recompute=chosen), reason


def plan_decided(model: Model, setup: Setup, room: int) -> Plan:
    """Return the plan of a setup with what is recomputed in place of `auto`, and the reason."""
    setup, reason = decide(model, setup, room)
    return replace(model.plan(setup), activations=reason)


def choices(layers: int) -> list[Recompute]:
    """Return what `auto` chooses from, in its order, for a model of this many blocks that are alike."""
    some = [Recompute(0, count) for count in range(layers + 1)]
    return some + [Recompute(count, layers - count) for count in range(1, layers + 1)]


def choose_recompute(model: Model, setup: Setup, room: int) -> tuple[Recompute, str]:
    """Return the first choice whose plan leaves `MARGIN` of `room` bytes free, and the reason.

    If there is none, return that with the lowest peak. Where the placement says where checkpoints are kept, all blocks
    are recomputed whole. Blocks that are not alike are all kept, selective or whole.
    """
    limit = int(room * (1 - MARGIN))
    if ACTIVATIONS in setup.offload.shares:
        every = Recompute(model.blocks) if model.blocks else WHOLE
        return every, f"{_words(model, every)} (--offload {setup.offload} says where their inputs are kept)"
    order = choices(model.blocks) if model.blocks else list(TREATED_ALIKE)

    @functools.cache
    def plan(at: int) -> Plan:
        return model.plan(replace(setup, recompute=order[at]))

    def needed(at: int) -> int:
        return needed_by(plan(at))

    def live(at: int) -> int:
        return needed(at) - plan(at).fragments

    def roughly_live(at: int) -> int:
        quick = model.quick_plan(replace(setup, recompute=order[at]))
        return needed_by(quick) - quick.fragments

    def first_live_fit(low: int, high: int, limit: int = limit) -> int:
        """Return the first position whose live bytes fit, or that of the fewest."""
        left = right = _first(roughly_live, low, high, limit)
        step = 1  # exact plans decide, from there on
        while right + step <= high and limit < live(right + step) < live(right):
            right, step = right + step, 2 * step
        right, step = min(high, right + step), 1
        while left - step >= low and (live(left - step) <= limit or live(left - step) < live(left)):
            left, step = left - step, 2 * step
        return _first(live, max(low, left - step), right, limit)

    def first_fit(low: int, high: int) -> int | None:
        for at in range(first_live_fit(low, high), high + 1):
            if needed(at) <= limit:
                return at
            if live(at) > limit:
                break
        return None

    last = len(order) - 1
    halves = ((0, last // 2), (last // 2, last))
    if needed(0) <= limit:
        at = 0
    elif sum(plan(0).of(category) for category in STATIC) - plan(0).fragments > limit:
        at = last  # whatever is recomputed, it does not fit
    else:
        tried = (first_fit(*half) for half in halves)
        found = next((each for each in tried if each is not None), None)
        at = min((first_live_fit(*half, limit=0) for half in halves), key=live) if found is None else found
    compared = f"{format_bytes(needed(at))} of {format_bytes(room)}"
    compared += "" if needed(at) <= limit else f", and no choice leaves {MARGIN:.0%} free"
    rule = "" if model.blocks else "; blocks that are not alike are all treated alike"
    return order[at], f"{_words(model, order[at])} ({compared}{rule})"


def _words(model: Model, recompute: Recompute) -> str:
    """Return what is recomputed in words; `describe` counts the blocks if each may be treated in its own way."""
    if model.blocks:
        return describe(recompute.of(model.blocks), model.blocks)
    words = {NOTHING: "nothing recomputed", SELECTIVELY: "all blocks recomputed selectively"}
    return words.get(recompute, "all blocks recomputed")


def _first(live: Callable[[int], int], low: int, high: int, limit: int) -> int:
    """Return the first position with at most `limit` bytes, or that of the fewest: they fall and then rise."""
    while low < high:
        middle = (low + high) // 2
        if live(middle) <= limit or live(middle + 1) >= live(middle):
            high = middle
        else:
            low = middle + 1
    return low


def describe(recompute: Recompute, layers: int) -> str:
    """Return what is recomputed of a model's blocks, in words."""
    whole, selective, kept = recompute.whole, recompute.selective, layers - recompute.count
    if not recompute.count:
        return "nothing recomputed"
    if layers in (whole, selective):
        return f"all {layers} blocks recomputed" + (" selectively" if selective else "")
    if kept:
        again = [f"{whole} recomputed whole"] if whole else []
        again += [f"{selective} recomputed selectively"] if selective else []
        return f"{kept} of {layers} blocks kept, {', '.join(again)}"
    return f"{whole} of {layers} blocks recomputed whole, {selective} selectively"


def needed_by(plan: Plan) -> int:
    """Return the bytes that one rank needs of its device; without a GPU that is host memory, like the dram tier."""
    shared = plan.needed("dram") // plan.setup.local_ranks if plan.setup.device == "cpu" else 0
    return plan.needed("hbm") + shared


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
