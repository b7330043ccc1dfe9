"""What surrounds the steps of a run."""

from __future__ import annotations

import gc
import weakref

from zerocli.steps import long_lived


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
