"""Activation checkpoints in a replayed step: the rules of `offload/stack.py` and `engine/recompute/activations.py`."""

from __future__ import annotations

from collections.abc import Callable

from offload.placement import ACTIVATIONS, HBM
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout import constants
from zerocli.plan.memory.ledger import Ledger, Storage
from zerocli.plan.memory.tape import Tensor
from zerocli.plan.setup import Setup


class Checkpoints:
    """The inputs of recomputed blocks, from forward to the block's backward, each on its tier."""

    def __init__(self, ledger: Ledger, setup: Setup, keep_slots: Callable[[int], None]) -> None:
        """`keep_slots` allocates this many bytes of slots on the device, for as long as the engine is there."""
        self._ledger, self._setup, self._keep_slots = ledger, setup, keep_slots
        self.tiers: list[str] = []
        """The tier of each recomputed block's input."""
        self.offloaded: dict[str, int] = {}
        """Bytes of slots on other tiers than the device."""
        self.nbytes = 0
        """Bytes of one checkpoint, a rank's part of it."""
        self._num_near = 0
        """Slots on the device that are not there yet."""
        self._first_input: list[Storage] = []
        """The first block's input, if it needs no gradient."""
        self._in_flight: dict[int, Storage] = {}
        """Checkpoints that are still being written to their tier, by block: two at most."""
        self._prefetched: dict[int, Storage] = {}
        """Checkpoints prefetched before their block's backward."""

    def assign(self, count: int, part: int, frozen_input: bool) -> None:
        """Assign the inputs of `count` blocks, `part` bytes of each, to their tiers.

        With a `frozen_input`, one that is computed from frozen parameters, the first block's takes no slot.
        """
        self.nbytes = part
        for share in self._setup.placement().of(ACTIVATIONS):
            each = self._slot_nbytes(share.tier, part)
            left = count - len(self.tiers)
            number = left if share.budget is None else min(left, share.budget // each)
            self.tiers += [share.tier] * number
            if share.tier != HBM and number:
                self.offloaded[share.tier] = self.offloaded.get(share.tier, 0) + number * each
        if (left := count - len(self.tiers)) > 0:
            fact = f"activations: {left} of {count} checkpoints have no place left in their budgets"
            raise UserError(fact, hint="name another tier after them: activations=cpu+nvme", exit_code=DOES_NOT_FIT)
        self._num_near = self.tiers.count(HBM)
        if frozen_input and self.tiers:
            self.tiers = [HBM, *self.tiers[:-1]]

    def _slot_nbytes(self, tier: str, part: int) -> int:
        align = {HBM: 512 if self._setup.device == "cuda" else 64}.get(tier, constants.PAGE_NBYTES)
        return -(-part // align) * align

    def keep(self, x: Tensor, block: int) -> None:
        """Copy a rank's part of a block's input into its slot; for another tier the copy lives until it is written."""
        if x.node is None:  # computed from frozen parameters: it stays as it is
            self._first_input.append(x.storage)
            return
        part = -(-x.storage.nbytes // self._setup.parts)
        self._keep_slots(self._num_near * self._slot_nbytes(HBM, part))
        self._num_near = 0  # they stay
        if self.tiers[block] == HBM:
            return
        while len(self._in_flight) >= 2:
            self._in_flight.pop(min(self._in_flight))
        self._in_flight[block] = x.storage if self._setup.parts == 1 else Storage(self._ledger, part)

    def bring_back(self, block: int, size: int) -> Storage:
        """Return a block's input, and start prefetching that of the previous block."""
        if block == 0 and self._first_input:
            return self._first_input.pop()
        if self._setup.parts == 1 and self.tiers[block] == HBM:
            return Storage(self._ledger, 0)  # it is read in place
        source = self._in_flight.pop(block, None) if self._setup.parts == 1 else None
        source = source or self._prefetched.pop(block, None) or Storage(self._ledger, size)
        before = block - 1
        resting = self._setup.parts == 1 and (before in self._in_flight or self.tiers[before] == HBM)
        if before >= 0 and not resting:
            self._prefetched[before] = Storage(self._ledger, size)
        if self._setup.parts > 1:
            self._in_flight.pop(block, None)
        return source

    def skip_forward(self, block: int, skipped: int) -> None:
        """Before a block's forward, let what is in flight be of the `skipped` blocks before it, which are counted."""
        if self.tiers[block : block + 1] not in ([HBM], []):  # else those in flight are of earlier blocks
            self._in_flight = {each + skipped: storage for each, storage in self._in_flight.items()}

    def skip_backward(self, skipped: int) -> None:
        """After a block's backward, let what is prefetched be for the block before the `skipped` ones."""
        self._prefetched = {each - skipped: storage for each, storage in self._prefetched.items()}
