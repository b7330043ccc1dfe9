"""Agreement: ranks that run different units still meet in every gather and reduction.

A gather is a collective: all ranks must issue it, in one order. Where experts, dropped layers or task heads differ from
rank to rank, before each gather the ranks tell each other which flat they need next, and gather those that anybody
needs, one after another; who does not need it takes part all the same. A rank that has reached the end of its pass
says so and serves the others until all have. The exchange also carries how many flats are ready to be reduced: as many
are reduced, everywhere, as are ready on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zerocli.comm import Collectives
from zerocli.lanes import Waits

FORWARD = -1
"""Needs no flat for now: a call of the model ends. Returns when nobody does, so that ranks leave the call together."""
BACKWARD = -2
"""Ends a backward pass: returns when all ranks do."""
NOTHING = -3
"""Needs no flat: is there to have its gradients reduced. Returns after one exchange and the gather it leads to."""


class Agreement:
    """Exchanges what ranks need before each gather; inactive, every rank is taken to need what this one does."""

    def __init__(
        self,
        collectives: Collectives,
        active: bool,
        waits: Waits,
        ready: Callable[[], int],
        launch: Callable[[int], None],
        join: Callable[[int], None],
    ) -> None:
        self._collectives, self.active, self._waits = collectives, active, waits
        self._ready, self._launch, self._join = ready, launch, join

    def meet(self, want: int) -> None:
        """Return when all ranks are about to gather the flat `want`, or at the end that FORWARD, ... describe."""
        while self.active:
            with self._waits.waiting("collectives"):
                mine = torch.tensor([want, self._ready()])
                wants, ready = self._collectives.gather_control(mine).T.tolist()
            self._launch(min(ready))
            needed = [each for each in wants if each >= 0]
            if not needed:
                if want != BACKWARD or set(wants) == {BACKWARD}:
                    return
                continue
            # The one that most ranks wait for; of several the first.
            chosen = max(sorted(set(needed)), key=needed.count)
            if chosen == want:
                return
            self._join(chosen)
            if want == NOTHING:
                return
