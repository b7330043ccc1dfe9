"""Initialisation and training steps, replayed on a ledger in the engine's order of events."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from offload.placement import HBM
from zerocli.errors import DOES_NOT_FIT, UserError
from zerocli.layout import buffers, constants
from zerocli.layout.buffers import Spec
from zerocli.layout.flats import FP32, FlatSpec
from zerocli.plan.decoder import Batch, Decoder
from zerocli.plan.flats import WHOLE, by_unit
from zerocli.plan.ledger import Ledger, Peak, Storage
from zerocli.plan.setup import Setup
from zerocli.plan.shape import Shape
from zerocli.plan.tape import Tape, Tensor

GRANULARITY = {"cuda": 512, "cpu": 1}
"""Bytes to which the device's allocator rounds."""
ROUNDING = {"bf16": 6, "fp16": 2}
"""Bytes per element that rounding a master allocates (`engine.master.narrow`): bf16 has an fp32 copy between."""


@dataclass(frozen=True)
class Peaks:
    """Peaks of one rank's device memory, and the bytes of activation checkpoints on other tiers."""

    initialisation: Peak
    first_step: Peak
    steady: Peak
    offloaded: dict[str, int]
    checkpoint_nbytes: int = 0
    """Bytes of one activation checkpoint, a rank's part of it."""
    gloo_nbytes: int = 0
    """Bytes by which gloo's copies raise the peak of a CPU rank's process."""

    @property
    def highest(self) -> Peak:
        return max((self.steady, self.first_step, self.initialisation), key=lambda peak: peak.nbytes)


class Replay:
    """One rank's device memory through initialisation and a step."""

    def __init__(self, shape: Shape, setup: Setup, flats: list[FlatSpec], with_gloo: bool = False) -> None:
        """Take `with_gloo` to count gloo's copies of what it reduce-scatters, which are in the process's memory."""
        self._shape, self._setup, self._flats = shape, setup, flats
        self._with_gloo = with_gloo and setup.dp > 1 and setup.zero.optimizer
        self._copies: deque[Storage] = deque()
        """gloo's copies: one of each bucket in flight, or of every gradient that is reduced whole."""
        self._sizing, self._trainable = setup.sizing, [flat for flat in flats if flat.trainable]
        self._ledger = Ledger(GRANULARITY[setup.device])
        # With several micro-steps gradients are there in all forwards but the first.
        self._frees_grads = not self._sizing.keep_gradients and setup.accumulate == 1
        self._units = by_unit(shape, flats, setup)
        self._kept: list[Storage] = []
        """Allocations that live as long as the engine."""
        self._grads: dict[int, list[Storage]] = defaultdict(list)
        """Gradients of units in backward, until they are reduced."""
        self._flat_grads: dict[int, list[Storage]] = {}
        """Gradients of flats, by unit, if they do not stay allocated: from backward to the update."""
        self._tied: list[Storage] = []
        """The head's part of a tied weight's gradient, which autograd keeps until the embedding's part arrives."""
        self._slots: list[str] = []
        """The tier of each block's checkpoint; filled at the first checkpoint."""
        self._in_flight: dict[int, Storage] = {}
        """Checkpoints that are still being written to their tier, by block: two at most."""
        self._ahead: dict[int, Storage] = {}
        """Checkpoints prefetched before their block's backward."""
        self._checkpoints_away: dict[str, int] = {}
        self._checkpoint_nbytes = 0
        self._has_buckets = False
        self._num_recomputed = setup.num_recomputed(shape.layers)

    def run(self) -> Peaks:
        """Replay initialisation, the first step and a later one."""
        ledger = self._ledger
        ledger.begin("initialisation")
        self._initialise()
        initialisation = ledger.peak
        ledger.begin("first step")
        self._keep(*buffers.gather_buffers(self._flats, self._sizing))
        self._step()
        first = ledger.peak
        ledger.begin("steady state")
        self._keep(*buffers.update_slots(self._trainable, self._sizing))
        self._keep(*buffers.update_scratch(self._trainable, self._sizing))
        self._step()
        return Peaks(initialisation, first, ledger.peak, dict(self._checkpoints_away), self._checkpoint_nbytes)

    def _keep(self, *specs: Spec) -> None:
        """Allocate the device part of these buffers for the lifetime of the engine."""
        self._kept += [Storage(self._ledger, s.nbytes, s.category) for s in specs if s.nbytes and s.tier == HBM]

    def _keep_bytes(self, category: str, *sizes: int) -> None:
        self._kept += [Storage(self._ledger, size, category) for size in sizes if size]

    # -- initialisation --------------------------------------------------------------------------------------------

    def _initialise(self) -> None:
        """Initialise unit by unit: full values in fp32 are sliced and freed before the next unit; then gradients."""
        setup, ledger = self._setup, self._ledger
        # Scalars: loss scale, counters, norms, and what released parameters show.
        self._keep_bytes("buffers", *self._tables(), 4096 + 128 * len(self._flats))
        for flat in self._flats:
            ledger.moment = f"initialising {flat.unit}"
            wide = FP32 * flat.total
            # The check for uninitialised values reads one parameter at a time, one byte per element.
            largest = max(entry.numel for entry in flat.layout.entries)
            Storage(ledger, largest, "buffers")
            parts = [entry.numel for entry in flat.layout.entries if entry.group < WHOLE] if setup.tp > 1 else []
            if parts:  # a part is sliced from the full parameter, which is initialised as without tensor parallelism
                Storage(ledger, FP32 * max(parts) * (setup.tp + 1) + wide, "buffers")
            if flat.width == FP32 and flat.resident(self._sizing):
                self._keep(buffers.parameters(flat, self._sizing))
                whole = None
            else:
                whole = Storage(ledger, wide, "buffers")
                self._place_parameters(flat)
            if flat.trainable:
                self._place_states(flat)
            del whole
        if not self._frees_grads:
            if setup.zero.gradients or not self._sizing.keep_gradients:
                self._keep(*(buffers.gradients(flat, self._sizing) for flat in self._trainable))
            self._keep(*buffers.gradient_arenas(self._trainable, self._sizing))
        Storage(ledger, 8 * sum(self._tables()), "buffers")  # the tables' angles, in fp64, with copies

    def _place_parameters(self, flat: FlatSpec) -> None:
        spec = buffers.parameters(flat, self._sizing)
        if spec.tier == HBM:
            self._keep(spec)
        elif flat.width < FP32:
            Storage(self._ledger, spec.nbytes, "buffers")  # the slice, on its way to its tier

    def _place_states(self, flat: FlatSpec) -> None:
        self._keep(*buffers.optimizer_states(flat, self._sizing))
        if flat.tiers["optimizer"] != HBM:
            chunk = min(flat.held.numel, self._sizing.chunk)
            Storage(self._ledger, self._sizing.record_nbytes(flat.width, chunk), "buffers")

    def _tables(self) -> list[int]:
        """Return the model's own buffers: cosines and sines of rotary positions."""
        if not self._shape.rotary:
            return []
        table = self._setup.seq * self._shape.head_size * FP32
        return [table, table]

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Replay forward and backward of one micro-step; all micro-steps are the same."""
        setup, shape, ledger = self._setup, self._shape, self._ledger
        batch = Batch(setup.batch, setup.seq, setup.width, setup.device == "cuda", setup.tp)
        decoder = Decoder(shape, batch)
        tape = Tape(ledger, self._on_grad)
        inputs = [Storage(ledger, 2 * 8 * batch.tokens)]  # token ids and targets
        if setup.tp > 1:  # an unfinished all-reduce keeps its buffer alive
            inputs.append(Storage(ledger, decoder.hidden))
        ledger.moment = "embedding"
        x = decoder.embed(tape)
        for block in range(shape.layers):
            ledger.moment = f"forward of block {block + 1}"
            x = self._block(tape, decoder, x, block)
        ledger.moment = "head and loss"
        loss = self._head(tape, decoder, x)
        del x
        if setup.zero.gradients and not self._has_buckets:
            self._keep(*buffers.buckets(self._trainable, self._sizing))
            self._has_buckets = True
        ledger.moment = "backward of the head"
        root = loss.node
        assert root is not None
        del loss
        tape.backward(root, [Storage(ledger, 4)])
        for unit in list(self._grads) if setup.zero.gradients else [0]:
            self._reduce(unit)
        del inputs
        self._copies.clear()
        ledger.moment = "update"
        rounding = ROUNDING.get(setup.precision, 0)
        arrays = buffers.update_temporaries(self._trainable, self._sizing, setup.num_temporaries, rounding)
        Storage(ledger, sum(spec.nbytes for spec in arrays if spec.tier == HBM), "buffers")
        self._flat_grads.clear()

    def _block(self, tape: Tape, decoder: Decoder, x: Tensor, block: int) -> Tensor:
        unit = block + 1

        def run(t: Tape, y: Tensor) -> Tensor:
            return decoder.block(t, y, block, unit)

        self._mark(tape, x, f"end of backward of block {unit}", done=unit)
        if block < self._num_recomputed:
            size = x.storage.nbytes
            self._keep_checkpoint(x, block)
            out = tape.checkpoint(run, x, lambda: self._bring_back(block, size))
        else:
            out = run(tape, x)
        self._mark(tape, out, f"backward of block {unit}")
        return out

    # -- checkpoints: the rules of offload/stack.py and activations.py -------------------------------------------------

    def _keep_checkpoint(self, x: Tensor, block: int) -> None:
        """Copy a rank's part of a block's input into its slot; for another tier the copy lives until it is written."""
        part = -(-x.storage.nbytes // self._setup.parts)
        if not self._slots:
            self._open_slots(part)
        if self._slots[block] == HBM:
            return
        while len(self._in_flight) >= 2:
            self._in_flight.pop(min(self._in_flight))
        self._in_flight[block] = x.storage if self._setup.parts == 1 else Storage(self._ledger, part)

    def _open_slots(self, part: int) -> None:
        """Assign the blocks to tiers, and allocate the device's arena, which is kept."""
        checkpoints, self._checkpoint_nbytes = self._num_recomputed, part
        for share in self._setup.checkpoint_shares():
            align = {HBM: 512 if self._setup.device == "cuda" else 64}.get(share.tier, constants.PAGE_NBYTES)
            each = -(-part // align) * align
            left = checkpoints - len(self._slots)
            count = left if share.budget is None else min(left, share.budget // each)
            self._slots += [share.tier] * count
            if share.tier == HBM:
                self._keep_bytes("activations", count * each)
            elif count:
                self._checkpoints_away[share.tier] = self._checkpoints_away.get(share.tier, 0) + count * each
        if (left := checkpoints - len(self._slots)) > 0:
            fact = f"activations: {left} of {checkpoints} checkpoints have no place left in their budgets"
            raise UserError(fact, hint="name another tier after them: activations=cpu+nvme", exit_code=DOES_NOT_FIT)

    def _bring_back(self, block: int, size: int) -> Storage:
        """Return a block's input, and start prefetching that of the previous block."""
        if self._setup.parts == 1 and self._slots[block] == HBM:
            return Storage(self._ledger, 0)  # it is read in place
        source = self._in_flight.pop(block, None) if self._setup.parts == 1 else None
        source = source or self._ahead.pop(block, None) or Storage(self._ledger, size)
        before = block - 1
        resting = self._setup.parts == 1 and (before in self._in_flight or self._slots[before] == HBM)
        if before >= 0 and not resting:
            self._ahead[before] = Storage(self._ledger, size)
        if self._setup.parts > 1:
            self._in_flight.pop(block, None)
        return source

    def _mark(self, tape: Tape, x: Tensor, moment: str, done: int = 0) -> None:
        """Record the moment in backward when the gradient of `x` exists; `done` units are then reduced and freed."""
        node = tape.record(moment, [x])

        def reached(gradient: list[Storage]) -> list[Storage]:
            self._ledger.moment = moment
            if done:
                self._reduce(done)
            return [gradient.pop()]

        node.backward = reached
        x.node = node

    def _head(self, tape: Tape, decoder: Decoder, x: Tensor) -> Tensor:
        """Replay the final norm and the chunked loss, whose two gradients are computed in the forward pass."""
        shape, setup, ledger = self._shape, self._setup, self._ledger
        unit = 0 if shape.tie else shape.layers + 1
        if shape.final_norm:
            self._mark(tape, x, "end of backward of the head", done=unit)
            norm = [each for each in shape.head_parameters() if each.name.startswith("norm")]
            x = decoder.norm(tape, x, [each.numel * setup.width for each in norm], unit)
        tokens, width, vocab = decoder.batch.tokens, setup.width, shape.local_vocab(setup.tp)
        chunk = min(constants.chunk_tokens(vocab, setup.device), tokens)
        rows = chunk * constants.padded_vocab(vocab)
        grad_x = Storage(ledger, tokens * shape.hidden * width, "logits")
        grad_weight = Storage(ledger, vocab * shape.hidden * FP32, "logits")
        small = Storage(ledger, 5 * tokens, "logits")  # losses, and which targets count
        buffer = Storage(ledger, rows * width, "logits")
        if not decoder.batch.has_kernels or vocab != shape.vocab:
            # Indices and masks of a chunk, its maxima and sums, and in half precision its logits in fp32.
            few = (29 if setup.tp == 1 else 54) * chunk
            Storage(ledger, few + (rows * FP32 if width < FP32 else 0), "logits")
        if width < FP32 and setup.device == "cpu":
            Storage(ledger, chunk * (vocab + shape.hidden) * FP32, "logits")
        del buffer, small
        kept = [grad_weight, grad_x]
        del grad_weight, grad_x
        node = tape.record("loss", [x])
        node.backward = lambda incoming: self._loss_backward(incoming, kept, unit)
        return Tensor(Storage(ledger, 4), node)

    def _loss_backward(self, incoming: list[Storage], kept: list[Storage], unit: int) -> list[Storage]:
        incoming.clear()
        grad_x = kept.pop()
        weight = kept.pop()
        if self._setup.width < FP32:
            weight = Storage(self._ledger, weight.nbytes // FP32 * self._setup.width, "buffers")
        if self._shape.tie:
            self._tied.append(weight)
        else:
            self._on_grad(unit, weight)
        return [grad_x]

    def _on_grad(self, unit: int, grad: Storage) -> None:
        """Record a parameter's gradient: kept until its unit is reduced, or added at once to the full gradient."""
        if unit == 0 and self._tied and grad.nbytes == self._tied[0].nbytes:
            grad = Storage(self._ledger, grad.nbytes, "buffers")  # the sum of both: autograd adds them in new memory
            self._tied.clear()
        if self._setup.zero.gradients:
            self._grads[unit].append(grad)
        else:
            self._open_grads(unit)

    def _reduce(self, unit: int) -> None:
        """Reduce a unit's gradients into those of its flats, and free them."""
        if self._with_gloo:
            self._copy(unit)
        if unit in self._grads:
            self._open_grads(unit)
            del self._grads[unit]

    def _copy(self, unit: int) -> None:
        """Add gloo's copies of a unit's gradients; those of the buckets that are used again are freed."""
        sizing, trainable = self._sizing, self._trainable
        for flat in (flat for flat in self._units[unit] if flat.trainable):
            wire = sizing.wire_width(flat.width)
            left = flat.total
            each = buffers.bucket_numel(trainable, sizing, wire) if sizing.stage.gradients else flat.total
            while left > 0:
                if sizing.stage.gradients and len(self._copies) >= buffers.bucket_limit(trainable, sizing):
                    self._copies.popleft()
                self._copies.append(Storage(self._ledger, min(left, each) * wire, "buffers"))
                left -= each

    def _open_grads(self, unit: int) -> None:
        """Allocate the gradients of a unit's flats, unless they are there."""
        if self._frees_grads and unit not in self._flat_grads:
            specs = [buffers.gradients(flat, self._sizing) for flat in self._units[unit] if flat.trainable]
            self._flat_grads[unit] = [
                Storage(self._ledger, spec.nbytes, spec.category) for spec in specs if spec.nbytes and spec.tier == HBM
            ]
