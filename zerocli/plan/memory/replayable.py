"""What a replayed step asks of a model, whether formulas or a trace describe it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

from zerocli.plan.blocks.shape import Unit
from zerocli.plan.memory.ledger import Ledger
from zerocli.plan.memory.tape import Tape, Tensor
from zerocli.plan.setup import Setup

Enter = Callable[[int], None]
"""Begins the forward of a unit."""
NO_UNIT = -1
Mark = Callable[[Tensor, str, int], None]
"""Notes the moment in backward when the gradient of a tensor exists, after which a unit (or `NO_UNIT`) is reduced."""


class MicroStep(ABC):
    """The operations of one micro-step on one rank."""

    hidden: int
    """Bytes of a block's input."""
    compared = False
    """Whether the engine compares a recomputed block's first call with its forward, as it does not know the block to
    change nothing: the block then runs again to its end."""

    def inputs(self) -> list[int]:
        """Return the bytes of what is there for the whole micro-step: the batch, and what all blocks read."""
        return []

    @abstractmethod
    def begin(self, tape: Tape, enter: Enter) -> Tensor:
        """Run what comes before the first block."""

    @abstractmethod
    def block(self, tape: Tape, x: Tensor, block: int) -> Tensor:
        """Run one block."""

    def between(self, tape: Tape, x: Tensor, block: int) -> Tensor:
        """Run what comes between a block and the next one."""
        return x

    @abstractmethod
    def end(self, tape: Tape, x: Tensor, enter: Enter, mark: Mark) -> Tensor:
        """Run what comes after the last block, up to the loss."""


class Replayable(ABC):
    """A model whose steps can be replayed."""

    numel: int
    trainable_numel: int
    units: Sequence[tuple[Unit, int]]
    """In the engine's order, each with its number of consecutive repeats."""
    layers: int
    """Blocks that may be recomputed, in the order in which they are called."""
    period: int
    """After this many blocks their kinds repeat."""
    kinds: Sequence[Hashable]
    """What blocks that allocate alike have in common."""
    frozen_input: bool
    """Whether the first block's input needs no gradient."""
    rotary: bool
    transposes: bool
    """Whether matrices of its files are transposed as they are loaded."""

    @abstractmethod
    def unit(self, block: int) -> int:
        """Return the place of a block's unit."""

    @abstractmethod
    def micro_step(self, setup: Setup, ledger: Ledger) -> MicroStep:
        """Return the operations of a micro-step."""

    def copied_nbytes(self, blocks: int) -> int:
        """Return the bytes of what the first blocks, if they are recomputed, keep copies of beside their inputs."""
        return 0

    @abstractmethod
    def tables(self, setup: Setup) -> list[int]:
        """Return the bytes of the model's own buffers."""

    def check(self, setup: Setup) -> None:
        """Raise UserError for a setup that the model cannot have."""
        return

    @abstractmethod
    def formulas(self, setup: Setup) -> dict[str, str]:
        """Return the sentences of activations and of logits in a plan's rows."""
