"""What surrounds the steps of a run."""

from __future__ import annotations

import gc
import weakref

import pytest

from zerocli.garbage import long_lived
from zerocli.profile.lines import History


class Node:
    """Something that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_the_collector_passes_over_what_was_there_and_comes_back_to_it():
    node = Node()
    before = weakref.ref(node)
    with long_lived():
        del node
        within = weakref.ref(Node())
        gc.collect()
        assert before() is not None and within() is None
    gc.collect()
    assert before() is None and gc.get_freeze_count() == 0


@pytest.mark.parametrize("num_steps", [1, 9, 10, 11, 1000])
def test_a_month_of_steps_stays_in_bounds_with_its_first_and_newest(monkeypatch, num_steps):
    monkeypatch.setattr(History, "KEPT", 5)
    history = History()
    for step in range(num_steps):
        history.append(step)
    assert history.num_steps == num_steps and len(history) <= 10
    assert history[0] == 0 and history[1:] == list(range(num_steps))[max(1, num_steps - len(history) + 1) :]
    assert len(history) >= min(num_steps, 6)
