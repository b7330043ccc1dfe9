"""A shape as a replayed step asks for it: the decoder's operations, and its chunked loss."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from zerocli.errors import UserError
from zerocli.layout import constants
from zerocli.layout.flats import FP32
from zerocli.layout.shards import nearest_divisor
from zerocli.plan.blocks.shape import Shape, Unit
from zerocli.plan.memory.decoder import Batch, Decoder
from zerocli.plan.memory.ledger import Ledger, Storage
from zerocli.plan.memory.replayable import NO_UNIT, Enter, Mark, MicroStep, Replayable
from zerocli.plan.memory.tape import TIED, Tape, Tensor
from zerocli.plan.setup import Setup


class ReplayableShape(Replayable):
    """A decoder: unit 0 is the embedding (and the head, if tied), then come the blocks, then a head of its own."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.numel, self.trainable_numel = shape.numel, shape.trainable_numel
        self.layers, self.period, self.kinds = shape.layers, shape.period, shape.sparse
        self.rotary = shape.rotary
        self.frozen_input = not any(each.trainable for each in shape.embed_parameters())
        self.transposes = shape.family == "gpt2"

    def units(self) -> Iterator[tuple[Unit, int]]:
        return self.shape.units()

    def unit(self, block: int) -> int:
        return block + 1

    def micro_step(self, setup: Setup, ledger: Ledger) -> MicroStep:
        return _ShapeMicroStep(self.shape, setup, ledger)

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


class _ShapeMicroStep(MicroStep):
    def __init__(self, shape: Shape, setup: Setup, ledger: Ledger) -> None:
        batch = Batch(setup.batch, setup.seq, setup.width, setup.device == "cuda", setup.tp, setup.packed)
        self._decoder, self._shape, self._setup, self._ledger = Decoder(shape, batch), shape, setup, ledger
        self.hidden, self.compared = self._decoder.hidden, shape.lora is not None

    def inputs(self) -> list[int]:
        decoder = self._decoder
        # Token ids and targets; an unfinished all-reduce keeps its buffer alive.
        return [16 * decoder.batch.tokens, *decoder.shared_inputs(), *([decoder.hidden] if self._setup.tp > 1 else [])]

    def begin(self, tape: Tape, enter: Enter) -> Tensor:
        x = self._decoder.embed(tape)
        Storage(self._ledger, self._decoder.mask_scratch)
        return x

    def block(self, tape: Tape, x: Tensor, block: int) -> Tensor:
        return self._decoder.block(tape, x, block, block + 1)

    def end(self, tape: Tape, x: Tensor, enter: Enter, mark: Mark) -> Tensor:
        """Run the final norm and the chunked loss, whose two gradients are computed in the forward pass."""
        shape, setup, ledger, decoder = self._shape, self._setup, self._ledger, self._decoder
        unit = 0 if shape.tie else shape.layers + 1
        if unit:
            enter(unit)
        if shape.final_norm:
            mark(x, "end of backward of the head", unit or NO_UNIT)
            x = decoder.final_norm(tape, x, unit)
        tokens, width, vocab = decoder.batch.tokens, setup.width, shape.local_vocab(setup.tp)
        chunk = min(constants.chunk_tokens(vocab, setup.device), tokens)
        rows = chunk * constants.padded_vocab(vocab)
        grad_x = Storage(ledger, tokens * shape.hidden * width, "logits")
        frozen = not shape.trains_head
        grad_weight = None if frozen else Storage(ledger, vocab * shape.hidden * FP32, "logits")
        small = Storage(ledger, 5 * tokens, "logits")  # losses, and which targets count
        buffer = Storage(ledger, rows * width, "logits")
        if not decoder.batch.has_kernels or vocab != shape.vocab:
            # Indices and masks of a chunk, its maxima and sums, and in half precision its logits in fp32.
            few = (29 if setup.tp == 1 else 54) * chunk
            Storage(ledger, few + (rows * FP32 if width < FP32 else 0), "logits")
        if width < FP32 and setup.device == "cpu" and not frozen:
            Storage(ledger, chunk * (vocab + shape.hidden) * FP32, "logits")
        del buffer, small
        kept = [grad_weight, grad_x] if grad_weight is not None else [grad_x]
        del grad_weight, grad_x
        node = tape.record("loss", [x])
        node.backward = lambda incoming: self._loss_backward(tape, incoming, kept, unit)
        return Tensor(Storage(ledger, 4), node)

    def _loss_backward(self, tape: Tape, incoming: list[Storage], kept: list[Storage], unit: int) -> list[Storage]:
        incoming.clear()
        grad_x = kept.pop()
        if not kept:
            return [grad_x]
        weight = kept.pop()
        if self._setup.width < FP32:
            weight = Storage(self._ledger, weight.nbytes // FP32 * self._setup.width, "buffers")
        tape.hand_over(TIED if self._shape.tie else unit, weight)
        return [grad_x]
