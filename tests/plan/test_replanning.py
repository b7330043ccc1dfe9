"""Laws of adapting, without a run: what is noticed, what is worth a change, and that nothing swings to and fro."""

from __future__ import annotations

import dataclasses
import random

import pytest

from zerocli import config as configs
from zerocli.plan.blocks.inputs import shape_of
from zerocli.plan.models.formula import Formula
from zerocli.plan.search import adapt
from zerocli.plan.search.adapt import Measured, Option, StepWindows, decide
from zerocli.plan.search.auto import choose
from zerocli.plan.search.candidates import weigh
from zerocli.plan.setup import setup_of
from zerocli.plan.time.hardware import PRESETS

PLANNED = Measured(1.0, 0.7, {"pcie": 0.5, "nvme": 0.6}, {"hbm": 1000, "nvme": 5000})


def noticed(windows: StepWindows, first: int, last: int, measured: Measured) -> str:
    """Add steps; return the first reason to plan again, and the step."""
    for step in range(first, last + 1):
        if reason := windows.add(step, measured):
            return f"{step}: {reason}"
    return ""


@pytest.mark.parametrize(
    "changes, words",
    [
        ({}, ""),
        ({"seconds": 1.1, "computing": 0.75, "busy": {"pcie": 0.55, "nvme": 0.66}}, ""),
        ({"seconds": 1.2}, "a step takes 1.2 s, 1 s planned"),
        ({"seconds": 2.0, "computing": 1.7}, "compute takes"),
        ({"seconds": 5.0, "busy": {"pcie": 0.5, "nvme": 4.5}}, "a step takes 5 s"),
        ({"seconds": 1.1, "busy": {"pcie": 0.5, "nvme": 1.0}}, "the disk is busy 1 s, 600 ms planned"),
        ({"rooms": {"hbm": 700, "nvme": 5000}}, "the device has"),
        ({"rooms": {"hbm": 1000, "nvme": 9000}}, "the disks have"),
    ],
)
def test_what_differs_by_more_than_a_tolerance_is_noticed_after_a_window(changes, words):
    found = noticed(StepWindows(PLANNED), 1, 40, dataclasses.replace(PLANNED, **changes))
    assert words in found and bool(words) == bool(found)
    if words:
        assert found.startswith(f"{adapt.SETTLING + adapt.WINDOW}: ")


def test_links_are_timed_in_the_first_window_and_where_steps_differ():
    windows, quiet = StepWindows(PLANNED), dataclasses.replace(PLANNED, busy={})
    first = adapt.SETTLING + adapt.WINDOW
    assert not noticed(windows, 1, first - 1, PLANNED) and windows.times_links
    assert not noticed(windows, first, 20, quiet) and not windows.times_links
    slow = dataclasses.replace(PLANNED, seconds=2.0)
    for step in range(21, 40):  # as a run does: links are in what is measured if they are timed
        if reason := windows.add(step, slow if windows.times_links else dataclasses.replace(slow, busy={})):
            break
    assert (step, reason) == (22 + 1 + adapt.WINDOW, "a step takes 2 s, 1 s planned") and windows.window.busy
    windows.keep(step)
    assert not noticed(windows, step + 1, step + 20, slow) and not windows.times_links


def test_one_slow_step_is_no_reason():
    windows = StepWindows(PLANNED)
    for step in range(1, 200):
        slow = dataclasses.replace(PLANNED, seconds=9.0 if step % 4 == 0 else 1.0)
        assert windows.add(step, slow) == ""


def test_after_nothing_better_was_found_only_another_difference_counts():
    windows, slow = StepWindows(PLANNED), dataclasses.replace(PLANNED, seconds=2.0)
    assert noticed(windows, 1, 20, slow)
    windows.keep(7)
    assert not noticed(windows, 8, 40, slow)
    assert noticed(windows, 41, 60, dataclasses.replace(PLANNED, seconds=3.0))


def test_a_load_that_comes_and_goes_changes_a_run_at_most_once_in_fifty_steps():
    for period in (3, 7, 20, 51):
        windows, changes = StepWindows(PLANNED), []
        for step in range(1, 1000):
            seconds = random.Random(step).uniform(0.98, 1.02) * (4.0 if step // period % 2 else 1.0)
            measured = dataclasses.replace(PLANNED, seconds=seconds, busy={"pcie": seconds / 2, "nvme": seconds})
            if windows.add(step, measured):  # as if every search found something better
                windows.change(step, measured)
                changes.append(step)
        assert all(later - earlier >= adapt.PAYBACK for earlier, later in zip(changes, changes[1:], strict=False))
        assert changes


STAY = Option("stay", 1.0)


@pytest.mark.parametrize(
    "options, steps, chosen",
    [
        ([], 1000, None),
        ([STAY], 1000, None),
        ([Option("faster", 0.5)], 1000, "faster"),
        ([Option("faster", 0.5), Option("fastest", 0.4)], 1000, "fastest"),
        ([Option("faster", 0.5, cost=1.0), Option("fastest", 0.4, cost=90.0)], 1000, "faster"),
        ([Option("faster", 0.5, cost=99.0)], 1000, "faster"),  # 50 steps of one second are saved
        ([Option("faster", 0.5, cost=101.0)], 1000, None),
        ([Option("faster", 0.5, cost=21.0)], 10, None),  # no more than ten steps are left
        ([Option("hardly", 0.96)], 1000, None),
        ([Option("faster", 0.5, fits=False)], 1000, None),
        ([Option("known", 0.5, measured=4.1)], 1000, None),
        ([Option("known", 0.5, measured=4.1), Option("new", 0.8)], 1000, "new"),
    ],
)
def test_a_change_pays_for_itself_or_is_not_made(options, steps, chosen):
    """The plan says 1 s for the current placement, which was measured to take 4: estimates of others are scaled."""
    decision = decide(Measured(4.0, 1.0), STAY, options, steps)
    assert (decision.option.name if decision.option else None) == chosen and decision.reason
    if chosen is not None:
        assert decision.seconds == pytest.approx(4 * decision.option.seconds)


def test_a_plan_that_is_wrong_about_two_placements_does_not_swing_between_them():
    """It takes b to be faster, and a run that is at a measures that it is not: it goes there once, and back."""
    true, planned, left = {"a": 1.0, "b": 1.5}, {"a": 1.0, "b": 0.7}, {}
    now, path = "a", ["a"]
    for _ in range(20):
        measured = Measured(true[now], true[now])
        options = [Option(each, planned[each], measured=left.get(each, 0.0)) for each in true]
        decision = decide(measured, next(each for each in options if each.name == now), options, 1000)
        if decision.option is not None:
            left[now] = true[now]
            now = decision.option.name
            left.pop(now, None)
            path.append(now)
    assert path == ["a", "b", "a"]


def test_what_does_not_fit_any_more_moves_at_any_price():
    slower = Option("slower", 3.0, cost=1000.0)
    assert decide(Measured(1.0, 1.0), dataclasses.replace(STAY, fits=False), [slower], 5).option is slower


# -- planning again ----------------------------------------------------------------------------------------------------

MODEL = Formula(shape_of(configs.load("gpt2-124m").model, 512))


def planned_on(room: float, **rates: float):
    """Return a machine with so many GiB per GPU, the choice for it, and what its steps should measure."""
    hardware = dataclasses.replace(PRESETS["h100"], gpu_memory=int(room * 2**30), products=600.0, **rates)
    setup = setup_of(configs.load("gpt2-124m"), ranks=1, ranks_per_node=1, precision="bf16", batch=8, seq=512)
    setup = dataclasses.replace(setup, update="stream")
    setup = dataclasses.replace(setup, recompute="auto")
    best = choose(MODEL, setup, hardware, (3,)).best
    assert best is not None
    return hardware, best, adapt.planned_steps(best, MODEL, hardware)


@pytest.mark.long
def test_a_plan_that_measures_as_planned_stays():
    hardware, best, planned = planned_on(2.2)
    again = adapt.plan_again(MODEL, best.setup, hardware, planned, 1000, True)
    assert again.decision.option is None
    for name in ("pcie", "disk", "hbm", "host_block"):
        assert getattr(again.hardware, name) == pytest.approx(getattr(hardware, name), rel=1e-6)


def test_a_slow_link_has_the_run_move_to_what_a_fresh_choice_takes():
    """Measured steps are those of the true machine; the plan knows only what they measured."""
    hardware, best, _ = planned_on(2.8)
    true = dataclasses.replace(hardware, pcie=hardware.pcie / 4)
    there = weigh(MODEL, best.setup, true)
    measured = adapt.planned_steps(there, MODEL, true)
    again = adapt.plan_again(MODEL, best.setup, hardware, measured, 1000, True)
    fresh = choose(MODEL, dataclasses.replace(best.setup, recompute="auto"), true, (3,)).best
    assert again.hardware.pcie == pytest.approx(true.pcie, rel=1e-6)
    assert again.decision.option is not None and fresh is not None
    moved = weigh(MODEL, again.setup, true)
    assert there.cost - moved.cost >= 0.5 * (there.cost - fresh.cost) > 0.05 * there.cost
    settled = adapt.planned_steps(moved, MODEL, true)
    assert adapt.plan_again(MODEL, again.setup, again.hardware, settled, 1000, True).decision.option is None


@pytest.mark.long
def test_more_and_less_memory_than_planned_move_the_budget():
    hardware, best, planned = planned_on(2.2)
    for room, grows in ((3.2, True), (1.9, False)):
        rooms = {**planned.rooms, "hbm": int(room * 2**30)}
        again = adapt.plan_again(MODEL, best.setup, hardware, dataclasses.replace(planned, rooms=rooms), 1000, True)
        assert again.decision.option is not None
        needed = weigh(MODEL, again.setup, hardware).plan.needed("hbm")
        assert needed <= rooms["hbm"] and (needed > weigh(MODEL, best.setup, hardware).plan.needed("hbm")) == grows


def test_after_a_failed_allocation_the_placement_needs_less():
    hardware, best, _ = planned_on(2.2)
    smaller = adapt.plan_smaller(MODEL, best.setup, hardware, hardware.gpu_memory, True)
    assert smaller is not None
    needed = [weigh(MODEL, each.setup, hardware).plan.needed("hbm") for each in (best, smaller)]
    assert needed[1] <= adapt.SMALLER * needed[0]
    assert adapt.plan_smaller(MODEL, best.setup, hardware, 1 << 20, True) is None
