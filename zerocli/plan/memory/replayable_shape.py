"""A shape as a replayed step asks for it."""

from __future__ import annotations

import functools

from zerocli.errors import UserError
from zerocli.layout import constants
from zerocli.layout.flats import FP32
from zerocli.layout.shards import nearest_divisor
from zerocli.plan.blocks.shape import Shape
from zerocli.plan.memory.decoder import Decoder
from zerocli.plan.memory.ledger import Ledger
from zerocli.plan.memory.replayable import MicroStep, Replayable
from zerocli.plan.setup import Setup


class ReplayableShape(Replayable):
    """A decoder: unit 0 is the embedding (and the head, if tied), then come the blocks, then a head of its own."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.numel, self.trainable_numel, self.units = shape.numel, shape.trainable_numel, shape.units
        self.layers, self.kinds = shape.layers, shape.sparse
        self.period = shape.sparse_every if shape.experts else 1  # except where `dense_blocks` says otherwise
        self.rotary = shape.rotary
        self.frozen_input = not any(each.trainable for each in shape.embed_parameters())
        self.transposes = shape.family == "gpt2"

    def unit(self, block: int) -> int:
        return block + 1

    def micro_step(self, setup: Setup, ledger: Ledger) -> MicroStep:
        return Decoder(self.shape, setup, ledger)

    def tables(self, setup: Setup) -> list[int]:
        """Return the bytes of cosines and sines of rotary positions."""
        return [setup.seq * self.shape.head_size * FP32] * 2 if self.rotary else []

    def check(self, setup: Setup) -> None:
        shape = self.shape
        widths = {"heads": shape.heads, "kv_heads": shape.kv_heads or shape.heads, "the MLP's width": shape.mlp_hidden}
        for name, number in widths.items():
            if number % setup.tp:
                raise UserError(
                    f"tp {setup.tp} does not divide {name} {number}", hint=f"--tp {nearest_divisor(setup.tp, number)}"
                )
        if shape.positions and setup.seq > shape.positions:
            fact = f"seq {setup.seq} is beyond the {shape.positions} positions the model was made for"
            raise UserError(fact, hint=f"--seq {shape.positions}")

    def formulas(self, setup: Setup) -> dict[str, str]:
        shape, tokens = self.shape, setup.batch * setup.seq
        vocab = shape.local_vocab(setup.tp)
        chunk = min(constants.chunk_tokens(vocab, setup.device), tokens)
        logits = (
            f"{chunk} x {constants.padded_vocab(vocab)} logits at a time, and the two gradients: "
            f"{tokens} x {shape.hidden} x {setup.width} B, {vocab} x {shape.hidden} x 4 B"
        )
        return {"activations": _activations(shape, setup), "logits": logits}


@functools.lru_cache(maxsize=64)
def replayable_shape(shape: Shape) -> ReplayableShape:
    """Return a shape as steps are replayed with it; equal shapes have the same one."""
    return ReplayableShape(shape)


def _activations(shape: Shape, setup: Setup) -> str:
    tokens = f"{setup.batch} x {setup.seq} tokens"
    blocks = setup.blocks(shape.layers)
    again, kept = blocks.count, shape.layers - blocks.count
    each = f"for backward of {tokens}, {setup.width} B per element"
    if not again:
        return f"what {kept} blocks keep {each}"
    part = f" / {setup.parts}" if setup.parts > 1 else ""
    parts = [f"what {kept} blocks keep {each}"] if kept else []
    if blocks.selective:
        what = f"the matrix products and attention of {blocks.selective} blocks"
        parts.append(what if kept else f"{what} {each}")
    parts.append(f"{again} x {tokens} x {shape.hidden} x {setup.width} B{part}, and one block recomputed")
    if again < shape.layers or blocks.selective:
        words = {"recomputed": blocks.whole, "recomputed selectively": blocks.selective}
        counts = [f"{number} of {shape.layers} blocks are {word}" for word, number in words.items() if number]
        return f"{'; then '.join(parts)}: {', '.join(counts)}"
    return parts[0]
