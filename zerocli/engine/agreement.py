"""Agreement: ranks that run different units still meet in every gather and reduction.

A gather is a collective: all ranks must issue it, in one order. Where experts, dropped layers or task heads differ from
rank to rank, before each gather the ranks tell each other which flat they need next, and gather those that anybody
needs, one after another; who does not need it takes part all the same. A rank that has reached the end of its pass
says so and serves the others until all have. The exchange also carries how many flats are ready to be reduced: as many
are reduced, everywhere, as are ready on every rank.

Where that would cost too much, between GPUs, ranks compare at the end of each step what they have gathered. If it was
not the same, some have computed with another unit's parameters: the step changes nothing, and all ranks refuse it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerocli.engine.comm import Collectives
from zerocli.engine.streams import Waits
from zerocli.errors import Refused

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
        about: Callable[[int], tuple[str, str]],
    ) -> None:
        self._collectives, self.active, self._waits = collectives, active, waits
        self._ready, self._launch, self._join, self._about = ready, launch, join, about
        self._mine = torch.zeros(2, dtype=torch.int64)
        # Written by way of numpy: torch.func lets nobody write to such a tensor. A trace's tensors know no numpy.
        self._said: Any = self._mine.numpy() if active else None
        self._everyone = torch.zeros(collectives.world, 2, dtype=torch.int64)
        """What each rank said last: (the flat it wants, how many gradients are ready). Kept: a new one each time would
        live until a thread of gloo's lets go of it, and be counted among whatever is made meanwhile."""
        self._trace: list[int] = []
        """The flats gathered in this step, in order."""
        self._suspect: tuple[torch.Tensor, list[int]] | None = None
        """Whether ranks have gathered different flats in the last step, on the device, and what this one did."""

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of what the exchange goes through."""
        if self.active:
            yield "buffers", "agreement", self._mine
            yield "buffers", "agreement", self._everyone

    def agree(self, want: int) -> None:
        """Return when all ranks are about to gather the flat `want`, or at the end that FORWARD, ... describe."""
        if want >= 0:
            self._trace.append(want)
        while self.active:
            with self._waits.waiting("collectives"):
                self._said[:] = want, self._ready()
                self._collectives.gather_control(self._mine, *self._about(want), out=self._everyone)
                wants, ready = self._everyone.T.tolist()
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

    def compare(self) -> torch.Tensor | None:
        """End a step: return whether ranks have gathered different flats in it (1.0), on the device. Collective.

        None where they have agreed on each.
        """
        trace, self._trace = self._trace, []
        if self.active or self._collectives.world == 1 or self._collectives.backend == "fake" or not trace:
            return None
        mine = torch.full((1,), zlib.crc32(repr(trace).encode()), dtype=torch.int64, device=self._collectives.device)
        everyone = self._collectives.gather_control(mine)
        differs = (everyone != everyone[0]).any().float()
        self._suspect = differs, trace
        return differs

    def refuse(self, name_of: Callable[[int], str]) -> None:
        """Refuse the step that was compared last if ranks differed in it; waits for that point of the device's work."""
        suspect, self._suspect = self._suspect, None
        if suspect is None or not suspect[0].item():
            return
        trace, device = suspect[1], self._collectives.device
        lengths = self._collectives.gather_control(torch.tensor([len(trace)], device=device)).flatten().tolist()
        padded = torch.tensor(trace + [-1] * (max(lengths) - len(trace)), device=device)
        everyone = self._collectives.gather_control(padded)
        at = int((everyone != everyone[0]).any(0).nonzero()[0])
        ran = ", ".join(f"rank {r} {name_of(i) if i >= 0 else 'none'}" for r, i in enumerate(everyone[:, at].tolist()))
        raise Refused(
            f"the ranks gathered different units in one step: {ran}. Nothing was updated. Pass shard(..., "
            "uneven=True) if that is meant: ranks then agree on each unit before they gather it"
        )
