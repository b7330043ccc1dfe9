"""Agreement: ranks that run different units still issue the same gathers and reductions.

A gather is a collective: all ranks must issue it, in the same order. Experts, dropped layers or task heads may differ
from rank to rank. So before each gather the ranks exchange which flat they need next. Every flat that any rank needs is
then gathered by all ranks, one after another. A rank at the end of its pass reports that, and takes part in the others'
gathers until all ranks are there. The exchange also carries how many flats are ready to be reduced; every rank launches
the minimum over the ranks.

Between GPUs this would cost too much. There, ranks compare at the end of each step what they have gathered. If it
differs, some ranks have computed with another unit's parameters: the step updates nothing, and all ranks refuse it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from zerocli.engine.comm import Collectives
from zerocli.engine.exchange import gather_padded
from zerocli.engine.streams import Waits
from zerocli.errors import Refused

FORWARD = -1
"""End of a model call; needs no flat. Returns when no rank needs one, so that ranks leave the call together."""
BACKWARD = -2
"""End of a backward pass. Returns when all ranks are there."""
NOTHING = -3
"""Needs no flat; only launches reductions. Returns after one exchange and the gather that follows from it."""


class Agreement:
    """Exchanges what ranks need before each gather; if not active, all ranks are assumed to need the same."""

    def __init__(
        self,
        collectives: Collectives,
        active: bool,
        waits: Waits,
        ready: Callable[[], int],
        launch: Callable[[int], None],
        join: Callable[[int], None],
        about: Callable[[int], tuple[str, str]],
        name_of: Callable[[int], str],
    ) -> None:
        self._collectives, self.active, self._waits = collectives, active, waits
        self._ready, self._launch, self._join = ready, launch, join
        self._about, self._name_of = about, name_of
        self._mine = torch.zeros(2, dtype=torch.int64)
        # Written through numpy: torch.func forbids writes to such a tensor. Fake tensors do not support numpy.
        self._said: Any = self._mine.numpy() if active else None
        self._everyone = torch.zeros(collectives.world, 2, dtype=torch.int64)
        """Each rank's last message: (flat it wants, number of flats ready to reduce). Reused: a new tensor each time
        would live until a gloo thread releases it, and would show up in memory measurements."""
        self._trace: list[int] = []
        """The flats gathered in this step, in order."""
        self._suspect: tuple[torch.Tensor, list[int]] | None = None
        """Whether ranks gathered different flats in the last step (on the device), and this rank's trace."""

    def holdings(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (category, name, tensor) of the exchange's buffers."""
        if self.active:
            yield "buffers", "agreement", self._mine
            yield "buffers", "agreement", self._everyone

    def agree(self, want: int) -> None:
        """Return when all ranks are about to gather the flat `want`, or as FORWARD, BACKWARD and NOTHING describe."""
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
            # The flat that most ranks wait for; the lowest index of several.
            chosen = max(sorted(set(needed)), key=needed.count)
            if chosen == want:
                return
            self._join(chosen)
            if want == NOTHING:
                return

    def compare(self) -> torch.Tensor | None:
        """Return whether ranks gathered different flats in this step (1.0), on the device; end the trace. Collective.

        None if ranks agree before each gather, or there is nothing to compare.
        """
        trace, self._trace = self._trace, []
        if self.active or self._collectives.world == 1 or self._collectives.backend == "fake" or not trace:
            return None
        mine = torch.full((1,), zlib.crc32(repr(trace).encode()), dtype=torch.int64, device=self._collectives.device)
        everyone = self._collectives.gather_control(mine)
        differs = (everyone != everyone[0]).any().float()
        self._suspect = differs, trace
        return differs

    def refuse(self) -> None:
        """Raise Refused if ranks differed in the step compared last; the host waits for that result."""
        suspect, self._suspect = self._suspect, None
        if suspect is None or not suspect[0].item():
            return
        mine = torch.tensor(suspect[1], device=self._collectives.device)
        everyone, _ = gather_padded(mine, self._collectives.gather_control, padding=-1)
        at = int((everyone != everyone[0]).any(0).nonzero()[0])
        units = [self._name_of(place) if place >= 0 else "none" for place in everyone[:, at].tolist()]
        ran = ", ".join(f"rank {rank} {unit}" for rank, unit in enumerate(units))
        raise Refused(
            f"the ranks gathered different units in one step: {ran}. Nothing was updated. Pass shard(..., "
            "uneven=True) if that is meant: ranks then agree on each unit before they gather it"
        )
