"""Verified reads: checks before a step is reported whether any rank read other bytes than were written.

On a CPU a corrupt read raises where it happens. On a GPU the comparison runs on the device, and its result is copied to
the host asynchronously. `issue` starts that copy when a backward begins; by then the previous update has been fully
issued. `look` reads the result at the end of the same step. So everything that step N reads, its update included, is
checked in step N + 1 at the latest, before the line of step N is written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.verify import Corrupted, Verifier
from zerocli.engine.streams import Readback, SideStream


class VerifiedReads:
    """Combines the results of `verifier` over all ranks; `gather` returns every rank's copy of a small tensor."""

    def __init__(
        self, verifier: Verifier, device: torch.device, gather: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._verifier, self._device, self._gather = verifier, device, gather
        self.active = verifier.active
        self._side = SideStream(device)
        self._issued: Readback | None = None

    def issue(self) -> None:
        """Start copying every rank's findings so far to the host (GPU only). Collective."""
        if not self.active or self._device.type != "cuda":
            return
        with self._side.run():
            self._issued = Readback(self._everyone())

    def look(self) -> None:
        """Raise `Corrupted` for findings of the last `issue`, or of this rank in host memory."""
        if self._issued is not None:
            issued, self._issued = self._issued, None
            self._refuse(issued.values())
        self._verifier.refuse()

    def look_now(self) -> None:
        """Raise `Corrupted` for what this rank has read so far; waits for its device."""
        found = self._verifier.collect()
        self._verifier.refuse(0 if found is None else int(found.item()))

    def look_everywhere(self) -> None:
        """Raise `Corrupted` for what any rank has read so far; waits for the devices. Collective."""
        if self.active:
            self._refuse(self._everyone().cpu())

    def _everyone(self) -> torch.Tensor:
        """Return every rank's finding: 0 for none, -1 for one in host memory, else the number of a piece."""
        mine = self._verifier.collect()
        if mine is None or self._verifier.failed:
            mine = torch.full((), -int(self._verifier.failed), dtype=torch.int64, device=self._device)
        return self._gather(mine)

    def _refuse(self, everyone: torch.Tensor) -> None:
        found = everyone.flatten().tolist()
        if any(found):
            self.look_now()
            ranks = ", ".join(str(rank) for rank, each in enumerate(found) if each)
            raise Corrupted(
                f"rank {ranks} has read bytes from a tier that are not what was written; its own message names them",
                tier="another rank's",
            )
